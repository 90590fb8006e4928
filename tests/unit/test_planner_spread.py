"""Documents on many ranks dealt out by head groups: what moves, against arithmetic, and when that start is taken."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_checks import check_coverage, check_cuts
from test_planner import problems
from test_planner_search import BIG, H200

from deepspeed_cad.cost import PAIRS
from deepspeed_cad.layout import Layout, Segments, Tick
from deepspeed_cad.planner import HeadShape, Plan, PlanInput, answer, make_plan
from deepspeed_cad.planner.answer import burden, landing
from deepspeed_cad.planner.constants import FINER
from deepspeed_cad.planner.core import Aim, Solution, solve, split_own_rows
from deepspeed_cad.planner.plan import O_RECEIVED, O_SENT, QKV_RECEIVED, QKV_SENT
from deepspeed_cad.planner.question import with_links
from deepspeed_cad.schedule import build_slices

MILLION = 1 << 20
MHA = HeadShape(query_heads=32, groups=32, head_dim=128, value_dim=128, bytes_per_element=2)
TOLERANCE = 0.02


def ask(lengths: list[int], ranks: int, tokens: int, shape: HeadShape = BIG, **fields: Any) -> PlanInput:
    """A stream cut into ranks, at the costs of an H200."""
    tick = Layout.from_stream(lengths, ranks, tokens).tick()
    return PlanInput(tick, shape, fields.pop("cost", H200), tolerance=TOLERANCE, **fields)


def start(problem: PlanInput, kept: int) -> Solution:
    """The plan from one start; −1: home."""
    found = solve(problem, Aim(problem.tolerance, kept=kept))
    check_coverage(found.tasks, problem.tick, problem.shape.groups)
    assert check_cuts(found.tasks, problem.tick, problem.granularity) == 0
    return found


def burden_of(problem: PlanInput, plan: Plan) -> float:
    """What `starts` weighs, of a plan whichever start it had: the start that gives its tasks."""
    for found in (even_at_home(problem), *(start(problem, kept) for kept in (-1, 0, 1))):
        if np.array_equal(split_own_rows(problem.tick, found.tasks, problem.window, 128), plan.tasks):
            return burden(problem, found.flows)
    pytest.fail("the plan has none of the starts")


def even_at_home(problem: PlanInput) -> Solution:
    """The start at home, made more even, as it is tried where documents lie on many ranks."""
    return solve(problem, Aim(FINER * problem.tolerance))


@pytest.mark.parametrize(("ranks", "shape"), [(4, BIG), (8, BIG), (4, MHA), (16, MHA)])
def test_one_document_moves_what_ulysses_moves(ranks: int, shape: HeadShape) -> None:
    """(n - 1) / n of Q, K and V in, and of O back, on every rank, forward."""
    problem = ask([MILLION], ranks, MILLION // ranks, shape)
    found = start(problem, 0)
    away = (ranks - 1) / ranks * (MILLION // ranks) * shape.groups
    qkv, o = shape.query_bytes + shape.key_value_bytes, shape.output_bytes
    for what, size in ((QKV_SENT, qkv), (QKV_RECEIVED, qkv), (O_SENT, o), (O_RECEIVED, o)):
        assert found.flows.bytes[what].sum(0).tolist() == [away * size] * ranks
    assert np.ptp(found.work) <= 1e-9 * found.work.max()
    out, back = landing(problem, found.flows)
    rows = MILLION * shape.groups // ranks
    assert out.tolist() == [rows * (qkv + o)] * ranks and back.tolist() == [away * qkv] * ranks


@settings(max_examples=60, deadline=None)
@given(problems(), st.sampled_from([-1, 0, 1, 2]))
def test_what_lies_at_a_server_is_what_its_schedule_says(problem: PlanInput, kept: int) -> None:
    found = start(problem, kept)
    slices = build_slices(problem.tick, found.tasks, problem.window)
    np.testing.assert_array_equal(found.flows.served, slices.served_rows.T)


CASES = {
    "8 head groups on 3 ranks": ([3 * 65536], 3, 65536, BIG),
    "half of a head group each": ([16 * 32768], 16, 32768, BIG),
    "fewer head groups than ranks": ([64 * 4096], 64, 4096, HeadShape(32, 4, 128, 128, 2)),
    "a long one and short ones": ([700_000, *[8000] * 40], 4, MILLION // 4, MHA),
    "short ones before it too": ([30_000] * 5 + [700_000] + [8000] * 20, 4, MILLION // 4, MHA),
    "two": ([600_000, 448_576], 8, MILLION // 8, MHA),
    "two on ranks of their own": ([MILLION // 2] * 2, 8, MILLION // 8, BIG),
    "nearly one": ([MILLION - 4096, 4096], 8, MILLION // 8, BIG),
}


@pytest.mark.parametrize("name", list(CASES))
def test_the_lighter_start_is_taken_and_is_even(name: str) -> None:
    problem = ask(*CASES[name])
    plan = make_plan(problem)
    mean = plan.load.mean()
    assert plan.load.max() <= 1.02 * mean and plan.load.min() >= 0.98 * mean and not plan.notes
    starts = [burden(problem, found.flows) for found in (even_at_home(problem), start(problem, 0), start(problem, 1))]
    assert burden_of(problem, plan) <= min(starts) / 0.95 and burden_of(problem, plan) < 0.95 * max(starts)


@pytest.mark.parametrize(
    ("lengths", "ranks", "shape", "fields"),
    [
        ([MILLION // 2], 2, BIG, {}),
        ([MILLION // 2], 4, HeadShape(32, 1, 128, 128, 2), {}),
        ([MILLION // 2], 4, HeadShape(32, 2, 128, 128, 2), {}),
        ([MILLION // 2], 4, BIG, {"window": 4096}),
        ([MILLION // 2], 4, BIG, {"window": MILLION // 8}),
        ([70_000] * 7, 8, BIG, {}),
    ],
    ids=["two ranks", "one head group", "two head groups", "window", "window of a rank", "two ranks each"],
)
def test_home_stays_the_start(lengths: list[int], ranks: int, shape: HeadShape, fields: dict[str, Any]) -> None:
    problem = ask(lengths, ranks, -(-sum(lengths) // ranks), shape, **fields)
    found, homes = make_plan(problem), [start(problem, -1), even_at_home(problem)]
    assert any(
        np.array_equal(found.received_bytes, home.flows.received) and np.array_equal(found.load, home.work)
        for home in homes
    )


@pytest.mark.parametrize("between", [1.0, 10.0, 50.0, 400.0])
def test_over_hosts_only_where_it_pays(between: float, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = ask([MILLION], 8, MILLION // 8, hosts=np.arange(8) // 4, cost=with_links(H200, 362.0, between))
    plan = make_plan(problem)
    monkeypatch.setattr(answer, "solve", lambda asked, aim: solve(asked, dataclasses.replace(aim, kept=-1)))
    only_home = make_plan(problem)
    assert plan.finish.max() <= only_home.finish.max() * (1 + 0.5 * TOLERANCE)


@pytest.mark.parametrize(
    ("speed", "expected"),
    [
        # Two head groups by four equal ranks: the second half of the pairs is behind row 724, the nearest cut is 720.
        ([1, 1, 1, 1], [(0, 720, 0, 0), (720, 1024, 0, 1), (0, 720, 1, 2), (720, 1024, 1, 3)]),
        ([2, 0, 2, 0], [(0, 1024, 0, 0), (0, 1024, 1, 2)]),
        # Ends of shares that are near one of a head group are moved there; others are cut at the nearest granule.
        ([2.004, 1.996, 0, 0], [(0, 1024, 0, 0), (0, 1024, 1, 1)]),
        ([2.01, 1.99, 0, 0], [(0, 1024, 0, 0), (0, 64, 1, 0), (64, 1024, 1, 1)]),
        ([1.99, 2.01, 0, 0], [(0, 1024, 0, 0), (0, 1024, 1, 1)]),
        ([1.94, 2.06, 0, 0], [(0, 1008, 0, 0), (1008, 1024, 0, 1), (0, 1024, 1, 1)]),
        ([2.06, 1.94, 0, 0], [(0, 1024, 0, 0), (0, 176, 1, 0), (176, 1024, 1, 1)]),
    ],
)
def test_shares_are_stretches_of_a_line(speed: list[float], expected: list[tuple[int, int, int, int]]) -> None:
    tick = Layout.from_stream([1024], 4, 256).tick()
    shape = HeadShape(2, 2, 8, 8, 2)
    problem = PlanInput(tick, shape, PAIRS, granularity=16, tolerance=TOLERANCE, speed=np.array(speed, float))
    found = start(problem, 0).tasks
    each = [
        (begin, end, group, server)
        for _, begin, end, first, last, server in found.tolist()
        for group in range(first, last)
    ]
    assert sorted(each) == sorted(expected)


GAP = Segments([0, 0, 0], [0, 400, 800], [300, 700, 1100], [0, 1, 2], [0, 0, 0])


@pytest.mark.parametrize(
    ("tick", "window", "kept", "expected"),
    [
        (Layout.from_stream([900], 3, 300).tick(), None, 0, (0, 900)),
        (Layout.from_stream([900], 3, 300).tick(), None, 1, (300, 900)),
        (Layout.from_stream([900], 3, 300).tick(), None, 2, None),
        (Layout.from_stream([900], 3, 300).tick(), 217, 0, None),
        (Layout.from_stream([900], 3, 300).tick(), 218, 0, (0, 900)),
        (Layout.from_stream([500, 700], 4, 300).tick(), None, 0, (0, 700)),
        (Layout.from_stream([600], 3, 300).tick(), None, 0, None),
        (dataclasses.replace(Layout.from_stream([1200], 3, 400).tick(), query=GAP), None, 0, None),
    ],
    ids=["all", "but the first", "one is left", "window of two", "window of three", "one of two", "two ranks", "gaps"],
)
def test_what_is_dealt_out(tick: Tick, window: int | None, kept: int, expected: tuple[int, int] | None) -> None:
    """A rank that is dealt head groups runs all of their rows; the first one runs its own beside them."""
    problem = PlanInput(tick, BIG, PAIRS, window=window, granularity=1)
    found = start(problem, kept).tasks
    assert np.array_equal(found, start(problem, -1).tasks) == (expected is None)
    if expected is not None:
        others = found[found[:, 5] != 0]
        assert tuple(others[(others[:, 2] - others[:, 1]).argmax(), 1:3]) == expected
