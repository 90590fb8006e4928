"""When ranks are done, transfers included: the model by itself, on figures that can be added up by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from test_planner import SHAPE

from deepspeed_cad.cost import CostModel
from deepspeed_cad.layout import Layout
from deepspeed_cad.planner import HeadShape, PlanInput, finish, make_plan
from deepspeed_cad.planner.finish import begin_in_place, common_finish, finish_times
from deepspeed_cad.planner.plan import Flows, Plan

LINKS = CostModel(byte_inside=2.0, byte_between=20.0)
"""A byte takes one second inside a host and ten between hosts."""


@pytest.fixture
def half_is_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finish, "FORWARD_SHARE", 0.5)


def flows(out: dict[tuple[int, int], tuple[int, int]], waiting: list[float], hosts: list[int]) -> Flows:
    """For each (home, server): bytes of Q, K and V, and of O."""
    moved = np.zeros((4, 2, len(hosts)), np.int64)
    for (home, server), (qkv, o) in out.items():
        where = int(hosts[home] != hosts[server])
        moved[[0, 3], where, home] += qkv, o
        moved[[1, 2], where, server] += qkv, o
    pairs = [[home, server, int(o > 0)] for (home, server), (_, o) in sorted(out.items())]
    parts, served = np.full(len(hosts), 8.0), np.zeros((2, len(hosts)), np.int64)
    return Flows(moved, np.array(waiting), np.array(pairs, np.int64).reshape(-1, 3), parts, served)


def times(work: Any, moved: Flows, hosts: list[int], base: Any = None, waves: int = 1) -> Any:
    tick = Layout.from_rank_lengths([[1]] * len(work)).tick()
    problem = PlanInput(tick, SHAPE, LINKS, hosts=np.array(hosts), base_load=base and np.array(base))
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


@pytest.mark.usefixtures("half_is_forward")
@pytest.mark.parametrize("name", CASES)
def test_when_ranks_are_done(name: str) -> None:
    work, out, waiting, hosts, base, expected = CASES[name]
    found = times(work, flows(out, waiting, hosts), hosts, base)
    assert found == [one if right is None else right for one, right in zip(found, expected)]


@pytest.mark.usefixtures("half_is_forward")
@pytest.mark.parametrize("waves, parts, expected", [
    # Forward: 30 out, 4 of work, 20 back: 27 for the first half of each, 15 for the second of the slowest.
    # Backward: 50, 4 and 30.
    (2, 8.0, [27.0 + 15.0 + 42.0 + 25.0, 17.0 + 15.0 + 27.0 + 25.0]),
    (4, 8.0, [13.5 + 22.5 + 21.0 + 37.5, 8.5 + 22.5 + 13.5 + 37.5]),
    # Two head groups cannot go in four waves.
    (4, 2.0, [27.0 + 15.0 + 42.0 + 25.0, 17.0 + 15.0 + 27.0 + 25.0]),
    (4, 0.0, [54.0 + 84.0, 34.0 + 54.0]),
])  # fmt: skip
def test_waves_overlap(waves: int, parts: float, expected: list[float]) -> None:
    moved = dataclasses.replace(flows({(0, 1): (3, 2)}, [0.0, 8.0], [0, 1]), parts=np.array([0.0, parts]))
    assert times([0.0, 8.0], moved, [0, 1], waves=waves) == expected


BASE, SPEED = np.array([0.0, 6.0, 100.0, 1.0]), np.array([1.0, 2.0, 1.0, 0.0])


@pytest.mark.parametrize(("work", "end"), [(18.0, 10.0), (5.0, 5.0), (0.0, 0.0)])
def test_all_ranks_stop_together(work: float, end: float) -> None:
    """10 of rank 0, from 6 on twice as much of rank 1; rank 2 begins too late, and rank 3 runs nothing."""
    assert common_finish(np.array([work]), BASE, SPEED) == pytest.approx([end])


HEADS = HeadShape(8, 2, 64, 64, 2)
COST = CostModel("a nanosecond per pair", "seconds", pair=1e-9)


def planned(layout: Layout, seconds: np.ndarray, knows: bool = True) -> Plan:
    tick = layout.tick()
    base = begin_in_place(seconds, tick, COST, HEADS.groups, None) if knows else None
    return make_plan(PlanInput(tick, HEADS, COST, tolerance=0.01, granularity=16, base_load=base))


def ends(layout: Layout, plan: Plan, seconds: np.ndarray) -> np.ndarray:
    """[ranks] when attention ends: own tasks at once, those of others when all of their homes have come to it."""
    before = seconds * layout.tokens
    documents = {int(document): int(rank) for document, rank in zip(layout.segments.document, layout.segments.rank)}
    end = before.copy()
    tasks = sorted(plan.tasks.tolist(), key=lambda task: before[documents[task[0]]] * (documents[task[0]] != task[5]))
    for document, begin, stop, first, last, server in tasks:
        work = float(COST.of(np.array([begin]), np.array([stop])).sum()) * (last - first)
        end[server] = max(end[server], before[documents[document]]) + work
    return end


@pytest.mark.parametrize("lengths", [
    [[4096] * 4, [4096, 4096, 1600]],  # rows 100 % and 60 % full
    [[4096] * 4, [9792]],
    [[8192] * 2, [2048] * 4, [4096] * 3, []],
])  # fmt: skip
def test_whole_layers_end_together_where_attention_fills_the_difference(lengths: list[list[int]]) -> None:
    layout = Layout.from_rank_lengths(lengths)
    own, tokens = layout.segments, layout.tokens
    work = np.bincount(own.rank, COST.of(own.begin, own.end) * HEADS.groups, layout.ranks)
    # Outside attention a layer takes as long as half of the mean attention of the fullest rank.
    seconds = np.full(layout.ranks, 0.5 * work.mean() / tokens.max())
    even = (seconds * tokens + work.mean()).mean()
    end = ends(layout, planned(layout, seconds), seconds)
    assert end.max() < 1.03 * even or (seconds[0] * (tokens.max() - tokens) > work).any(), (end, even)
    assert end.max() <= 1.001 * ends(layout, planned(layout, seconds, knows=False), seconds).max()


def test_rows_that_read_keys_of_a_late_rank_fill_no_time() -> None:
    tick = Layout.from_stream([16384], 2, 8192).tick()
    assert begin_in_place(np.array([2e-6, 1e-6]), tick, COST, HEADS.groups, None) is None
    starts = begin_in_place(np.array([1e-6, 2e-6]), tick, COST, HEADS.groups, None)
    assert starts is not None and starts == pytest.approx([0.0, 8192e-6]), "earlier rows read no later ones"
