"""When ranks are done, transfers included: the model by itself, on figures that can be added up by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from test_planner import SHAPE

from deepspeed_cad.cost import PAIRS, CostModel
from deepspeed_cad.layout import Layout
from deepspeed_cad.planner import PlanInput, finish
from deepspeed_cad.planner.constants import UNBOUNDED
from deepspeed_cad.planner.core import Aim, link_weights, solve
from deepspeed_cad.planner.finish import common_finish, finish_times
from deepspeed_cad.planner.plan import Flows

LINKS = CostModel(byte_inside=2.0, byte_between=20.0)
"""A byte takes one second inside a host and ten between hosts."""


@pytest.fixture(autouse=True)
def half_is_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finish, "FORWARD_SHARE", 0.5)


def flows(out: dict[tuple[int, int], tuple[int, int]], waiting: list[float], hosts: list[int]) -> Flows:
    """For each (home, server): bytes of Q, K and V, and of O."""
    moved = np.zeros((4, 2, len(hosts)), np.int64)
    for (home, server), (qkv, o) in out.items():
        where = int(hosts[home] != hosts[server])
        moved[0, where, home] += qkv
        moved[1, where, server] += qkv
        moved[2, where, server] += o
        moved[3, where, home] += o
    pairs = [[home, server, int(o > 0)] for (home, server), (_, o) in sorted(out.items())]
    parts, served = np.full(len(hosts), 8.0), np.zeros((2, len(hosts)), np.int64)
    return Flows(moved, np.array(waiting), np.array(pairs, np.int64).reshape(-1, 3), parts, served)


def times(
    work: list[float], moved: Flows, hosts: list[int], base: list[float] | None = None, waves: int = 1, **fields: Any
) -> Any:
    tick = Layout.from_rank_lengths([[1]] * len(work)).tick()
    floor = None if base is None else np.array(base)
    problem = PlanInput(tick, SHAPE, LINKS, hosts=np.array(hosts), base_load=floor, **fields)
    return finish_times(problem, np.array(work), moved, waves).tolist()


ONE, FAR = {(0, 1): (3, 2)}, {(0, 1): (1, 1), (0, 2): (4, 1)}
CASES = {
    # Forward: 3 out, 4 of work, 2 back. Backward: dO 2 and Q, K, V 3 out, 4, dQ, dK, dV 3 back. Home works longer.
    "one after the other": ([40, 30], ONE, [0, 8], [0, 0], None, [40, 30]),
    # Ten times as long: 30 + 4 + 20 and 50 + 4 + 30.
    "between hosts": ([40, 30], ONE, [0, 8], [0, 1], None, [54 + 84, 34 + 54]),
    # 34 and 54 until what it serves is done, or all of its work.
    "a server works while it waits": ([0, 90], ONE, [0, 8], [0, 1], None, [138, 45 + 54]),
    "or longer": ([0, 200], ONE, [0, 8], [0, 1], None, [138, 200]),
    "base load is time for transfers": ([40, 30], ONE, [0, 8], [0, 1], [200, 0], [240, 88]),
    "of homes": ([40, 30], ONE, [0, 8], [0, 1], [0, 20], [138 + 20, 88 + 20]),
    # The far server is waited for: 10 + 1 + 10 and 20 + 1 + 10, the near one would be back after 9 and 12.
    "two kinds of links": ([0, 30, 2], ONE | {(0, 2): (1, 1)}, [0, 8, 2], [0, 0, 1], None, [52, 30, None]),
    # All is out after 50 and 70. Each server works 1 for it and sends 10 and 40; the home takes in 20 and 50.
    "one that sends to many": ([0, 2, 2], FAR, [0, 2, 2], [0, 1, 2], None, [51 + 20 + 71 + 50, 51 + 71, 51 + 71]),
    # Documents that span ranks: rank 1 reads keys of rank 0 for its own rows, 6 of its 8; only gradients return.
    "keys alone": ([8, 8], {(0, 1): (2, 0)}, [0, 6], [0, 1], None, [4 + 20 + 3 + 20, 23 + 23]),
}


@pytest.mark.parametrize("name", CASES)
def test_when_ranks_are_done(name: str) -> None:
    work, out, waiting, hosts, base, expected = CASES[name]
    found = times(work, flows(out, waiting, hosts), hosts, base)
    assert found == [one if right is None else right for one, right in zip(found, expected)]


@pytest.mark.parametrize(
    ("waves", "parts", "expected"),
    [
        # Forward: 30 out, 4 of work, 20 back: 27 for the first half of each, 15 for the second of the slowest.
        # Backward: 50, 4 and 30.
        (2, 8.0, [27.0 + 15.0 + 42.0 + 25.0, 17.0 + 15.0 + 27.0 + 25.0]),
        (4, 8.0, [13.5 + 22.5 + 21.0 + 37.5, 8.5 + 22.5 + 13.5 + 37.5]),
        # Two head groups cannot go in four waves.
        (4, 2.0, [27.0 + 15.0 + 42.0 + 25.0, 17.0 + 15.0 + 27.0 + 25.0]),
        (4, 0.0, [54.0 + 84.0, 34.0 + 54.0]),
    ],
)
def test_waves_overlap(waves: int, parts: float, expected: list[float]) -> None:
    moved = dataclasses.replace(flows({(0, 1): (3, 2)}, [0.0, 8.0], [0, 1]), parts=np.array([0.0, parts]))
    assert times([0.0, 8.0], moved, [0, 1], waves=waves) == expected


def test_the_number_of_waves_that_ends_first() -> None:
    moved, zero = flows({(0, 1): (3, 2)}, [0.0, 8.0], [0, 1]), np.zeros(2)
    problem = PlanInput(
        Layout.from_rank_lengths([[1]] * 2).tick(), SHAPE, LINKS, hosts=np.array([0, 1]), waves=(1, 2, 4)
    )

    def best(work: list[float], moved: Flows, asked: PlanInput) -> int:
        found, waves = finish.finish_best(asked, np.array(work), moved)
        assert found.tolist() == finish_times(asked, np.array(work), moved, waves).tolist()
        return waves

    assert best([0.0, 8.0], moved, problem) == 4
    assert best([200.0, 200.0], moved, problem) == 1, "own work hides everything"
    # One wave more costs two passes 0.3 ms, and saves at most a part of what a byte takes here.
    seconds = dataclasses.replace(LINKS, unit="seconds", byte_between=1e-4, byte_inside=1e-5)
    assert best([0.0, 1e-4], moved, dataclasses.replace(problem, cost=seconds)) == 1
    assert best([0.0, 8.0], moved, dataclasses.replace(problem, waves=(3,))) == 3
    nothing = Flows(moved.bytes * 0, zero, np.zeros((0, 3), np.int64), zero, moved.served)
    assert best([0.0, 8.0], nothing, dataclasses.replace(problem, waves=(3,))) == 1


def test_without_figures_for_links_they_take_no_time() -> None:
    moved = flows({(0, 1): (3, 2)}, [0.0, 8.0], [0, 0])
    tick, ones = Layout.from_rank_lengths([[1]] * 2).tick(), np.ones(2)
    problem = PlanInput(tick, SHAPE, CostModel(), base_load=ones, speed=ones * 2)
    assert finish_times(problem, np.array([40.0, 30.0]), moved).tolist() == [21.0, 16.0]


def test_work_that_waits() -> None:
    """Rows of others, and all rows of a document's head group where some of them read keys of others."""
    tick = Layout.from_stream([64, 32], 3, 32).tick()
    problem = PlanInput(tick, SHAPE, LINKS)
    first, second = float(LINKS.of(0, 32)), float(LINKS.of(32, 64))
    at_home = solve(problem, Aim(UNBOUNDED)).flows
    assert at_home.waiting.tolist() == [0.0, 4 * second, 0.0] and at_home.pairs.tolist() == [[0, 1, 0]]
    alone = solve(dataclasses.replace(problem, speed=np.array([1.0, 0.0, 0.0])), Aim(problem.tolerance)).flows
    assert alone.waiting.tolist() == [4 * (first + second + first), 0.0, 0.0]
    assert alone.pairs.tolist() == [[1, 0, 1], [2, 0, 1]] and alone.parts.tolist() == [8.0, 0.0, 0.0]


BASE, SPEED = np.array([0.0, 6.0, 100.0, 1.0]), np.array([1.0, 2.0, 1.0, 0.0])


@pytest.mark.parametrize(("work", "end"), [(18.0, 10.0), (5.0, 5.0), (0.0, 0.0)])
def test_all_ranks_stop_together(work: float, end: float) -> None:
    """10 of rank 0, from 6 on twice as much of rank 1; rank 2 begins too late, and rank 3 runs nothing."""
    assert common_finish(np.array([work]), BASE, SPEED) == pytest.approx([end])


def test_groups_of_ranks_stop_each_by_itself() -> None:
    found = common_finish(np.array([18.0, 7.0, 3.0]), BASE, SPEED, np.array([0, 0, 1, 2]))
    assert found == pytest.approx([10.0, 107.0, 0.0])


@pytest.mark.parametrize(
    ("nodes", "cost", "weights"),
    [
        (None, CostModel(byte_inside=1.0, byte_between=5.0), (1.0, 1.0)),
        (4, CostModel(byte_inside=1.0, byte_between=5.0), (1.0, 1.0)),
        (5, PAIRS, (1.0, 1.0)),
        (2, PAIRS, (1.0, 8.0)),
        (2, CostModel(byte_inside=2.0, byte_between=5.0), (1.0, 2.5)),
        (2, CostModel(byte_inside=5.0, byte_between=2.0), (1.0, 1.0)),
        (2, CostModel(byte_inside=2.0, byte_between=2.0), (1.0, 1.0)),
        (2, CostModel(byte_inside=2.0), (1.0, 8.0)),
        (2, CostModel(byte_between=2.0), (1.0, 1.0)),
    ],
)
def test_weights_of_links(nodes: int | None, cost: CostModel, weights: tuple[float, float]) -> None:
    tick = Layout.from_rank_lengths([[1]] * 4).tick()
    problem = PlanInput(tick, SHAPE, cost, hosts=None if nodes is None else np.arange(4) // nodes)
    assert link_weights(problem) == weights
