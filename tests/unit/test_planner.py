"""The planner: plans of random questions counted again, balance, bytes, and inputs at the edge."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_checks import SECONDS, check_coverage, check_cuts, check_plan, check_solution, fingerprint, random_problem

from deepspeed_cad.cost import PAIRS
from deepspeed_cad.layout import Layout, Segments
from deepspeed_cad.planner import HeadShape, Plan, PlanInput, make_plan
from deepspeed_cad.planner.constants import UNBOUNDED
from deepspeed_cad.planner.core import Aim, Units, solve
from deepspeed_cad.planner.own_rows import split_own_rows
from deepspeed_cad.schedule import build_slices

SHAPE = HeadShape(query_heads=8, groups=4, head_dim=16, value_dim=16, bytes_per_element=2)


@st.composite
def problems(draw: st.DrawFn) -> PlanInput:
    ranks = draw(st.integers(1, 6))
    lengths = draw(st.lists(st.one_of(st.integers(1, 40), st.integers(1, 3000)), max_size=12))
    if draw(st.booleans()):
        tokens = -(-sum(lengths) // ranks)
        layout = Layout.from_stream(lengths, ranks, tokens + draw(st.integers(0, 50)), draw(st.booleans()))
    else:
        homes = draw(st.lists(st.integers(0, ranks - 1), min_size=len(lengths), max_size=len(lengths)))
        layout = Layout.from_rank_lengths(
            [[n for n, home in zip(lengths, homes, strict=True) if home == r] for r in range(ranks)]
        )
    tick = layout.tick()
    if draw(st.booleans()):
        cut = layout.tokens // 2
        if layout.can_cut(cut):
            tick = layout.cut(cut)[draw(st.integers(0, 1))]
    groups = draw(st.sampled_from([1, 2, 4, 8]))
    return PlanInput(
        tick,
        HeadShape(groups * draw(st.sampled_from([1, 4])), groups, 16, draw(st.sampled_from([16, 8])), 2),
        draw(st.sampled_from([PAIRS, SECONDS])),
        window=draw(st.sampled_from([None, None, 1, 64, 700])),
        tolerance=draw(st.sampled_from([0.0, 0.02, 0.05, 0.2])),
        granularity=draw(st.sampled_from([1, 16, 128, 5000])),
        base_load=draw(st.sampled_from([None, np.arange(ranks) * 1e4])),
        speed=draw(st.sampled_from([None, 1.0 + np.arange(ranks) % 2, np.minimum(np.arange(ranks)[::-1], 1.0) + 0.0]))
        if ranks > 1
        else None,
        hosts=draw(st.sampled_from([None, np.arange(ranks), np.arange(ranks) // 2, np.arange(ranks) % 2])),
    )


def finish_spread(plan: Plan) -> tuple[float, float]:
    """Largest and smallest finish time over the mean."""
    mean = plan.load.mean()
    return plan.load.max() / mean, plan.load.min() / mean


@settings(max_examples=80, deadline=None)
@given(problems())
def test_every_row_and_group_once_and_loads_and_bytes_as_counted_again(problem: PlanInput) -> None:
    check_plan(problem, make_plan(problem))


@settings(max_examples=80, deadline=None)
@given(
    problems(),
    st.sampled_from(Units),
    st.floats(0.2, 3),
    st.sampled_from([-1, 0, 1, 2]),
)
def test_what_the_core_finds_for_any_aim(problem: PlanInput, units: Units, level: float, kept: int) -> None:
    """With units they come down to a level around the mean."""
    at_home = solve(problem, Aim(UNBOUNDED))
    mean = float(at_home.work_before.sum() / problem.speeds.sum())
    check_solution(problem, solve(problem, Aim(problem.tolerance, units, level * mean, kept)))


def check_random(seed: int) -> None:
    """The plan of a random problem, and what the core finds from each start."""
    problem = random_problem(seed)
    for kept in (-1, 0, 1):
        check_solution(problem, solve(problem, Aim(problem.tolerance, kept=kept)))
    check_plan(problem, make_plan(problem))


@pytest.mark.parametrize("part", range(4))
def test_plans_of_any_kind_are_plans(part: int) -> None:
    for seed in range(part, 48, 4):
        check_random(seed)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_plans_of_any_kind_are_plans_thousands_of_them(part: int) -> None:
    for seed in range(48 + part, 2400, 8):
        check_random(seed)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(2000, 60000), min_size=4, max_size=30), st.integers(2, 8), st.sampled_from([0.02, 0.05]))
def test_balance_is_reached_on_both_sides(lengths: list[int], ranks: int, tolerance: float) -> None:
    tick = Layout.from_stream(lengths, ranks, -(-sum(lengths) // ranks)).tick()
    plan = make_plan(PlanInput(tick, SHAPE, PAIRS, tolerance=tolerance, granularity=64))
    most, least = finish_spread(plan)
    assert most <= 1 + tolerance and least >= 1 - tolerance


def test_balanced_tick_moves_nothing() -> None:
    tick = Layout.from_rank_lengths([[4096] * 4] * 4).tick()
    plan = make_plan(PlanInput(tick, SHAPE, PAIRS, tolerance=0.02))
    assert plan.sent_bytes.sum() == 0 and plan.received_bytes.sum() == 0
    assert plan.load.tolist() == plan.load_before.tolist()
    assert len(plan.tasks) == 16


def test_zero_speed_rank_serves_nothing_and_a_fast_rank_serves_more() -> None:
    tick = Layout.from_rank_lengths([[30000], [20000], [10000], []]).tick()
    plan = make_plan(PlanInput(tick, SHAPE, PAIRS, tolerance=0.05, speed=np.array([1.0, 0.0, 2.0, 1.0])))
    assert not (plan.tasks[:, 5] == 1).any()
    times = plan.load[[0, 2, 3]]
    assert times.max() <= times.mean() * 1.05 and times.min() >= times.mean() * 0.95


def test_segments_in_any_order_and_in_pieces() -> None:
    """Neighbouring segments on one rank are one; empty ones are none."""
    columns = np.array([[0, 5, 9, 1], [0, 0, 2, 0], [0, 2, 5, 0], [1, 3, 3, 0], [2, 0, 4, 1]]).T
    segments = Segments(*columns, [0] * 5)
    tick = dataclasses.replace(Layout.from_rank_lengths([[5], [8]]).tick(), query=segments, key=segments)
    found = solve(PlanInput(tick, SHAPE, PAIRS), Aim(UNBOUNDED))
    assert found.tasks.tolist() == [[0, 0, 5, 0, 4, 0], [0, 5, 9, 0, 4, 1], [2, 0, 4, 0, 4, 1]]
    assert found.flows.received.tolist() == [0, 5 * 4 * SHAPE.key_value_bytes]
    assert found.work_before.tolist() == [4 * 15, 4 * (5 * 4 + 10 + 10)]


@pytest.mark.parametrize(
    ("lengths", "bounds"),
    [
        # One rank is far above: it comes down to the edge of what is aimed at, and the others rise as that needs.
        ([3000, 1800, 1800, 1800], {0: 1.08}),
        # One rank is far below: it rises to the other edge, and the others come down as that needs.
        ([1000, 2000, 2000, 2000], {0: 0.92}),
    ],
)
def test_no_more_moves_than_must(lengths: list[int], bounds: dict[int, float]) -> None:
    """With a tolerance of 0.2 ranks aim at 0.8 of half of it."""
    tick = Layout.from_rank_lengths([[length] for length in lengths]).tick()
    plan = make_plan(PlanInput(tick, SHAPE, PAIRS, tolerance=0.2, granularity=1))
    for rank, share in bounds.items():
        assert plan.load[rank] / plan.load.mean() == pytest.approx(share, abs=0.01)
    assert np.ptp(plan.load[1:]) / plan.load.mean() < 0.1


def test_many_short_documents() -> None:
    """Whole short documents leave in company: none is cut."""
    random = np.random.default_rng(0)
    lengths = [random.integers(50, 1000, 300 if rank % 2 else 20).tolist() for rank in range(4)]
    tick = Layout.from_rank_lengths(lengths).tick()
    problem = PlanInput(tick, SHAPE, PAIRS, tolerance=0.02)
    plan = make_plan(problem)
    check_plan(problem, plan)
    assert len(plan.tasks) < len(tick.query) + 40


def test_same_plan_again_and_from_shuffled_segments() -> None:
    layout = Layout.from_stream([50000, 300, 12000, 7, 4000], 4, 16580)
    problem = PlanInput(layout.tick(), SHAPE, SECONDS)
    first = make_plan(problem)
    order = np.random.default_rng(0).permutation(len(layout.segments))
    tick = dataclasses.replace(layout.tick(), query=layout.segments.select(order), key=layout.segments.select(order))
    second = make_plan(dataclasses.replace(problem, tick=tick))
    assert first.fingerprint() == second.fingerprint() == make_plan(problem).fingerprint()


# Plans are the same on every machine and by every compiler: ranks make them for themselves.


PLANS = Path(__file__).with_name("plans.json")


def test_plans_are_those_that_other_compilers_gave() -> None:
    """Where plans change on purpose: `python tests/plan_checks.py > tests/unit/plans.json`."""
    wanted = json.loads(PLANS.read_text())
    assert [fingerprint(seed) for seed in range(len(wanted))] == wanted


# Rows that find at home all that they read.


STREAM = Layout.from_stream([900], 3, 300).tick()


@pytest.mark.parametrize(
    ("task", "window", "granularity", "expected"),
    [
        # Row 331 is the first on rank 1 that reads no key before 300; it has row 332 of a granule of 4.
        ([0, 300, 600, 0, 8, 1], 32, 1, [[0, 300, 331, 0, 8, 1], [0, 331, 600, 0, 8, 1]]),
        ([0, 300, 600, 0, 8, 1], 32, 4, [[0, 300, 332, 0, 8, 1], [0, 332, 600, 0, 8, 1]]),
        ([0, 320, 500, 2, 3, 1], 32, 4, [[0, 320, 332, 2, 3, 1], [0, 332, 500, 2, 3, 1]]),
        ([0, 340, 600, 0, 8, 1], 32, 4, [[0, 340, 600, 0, 8, 1]]),
        ([0, 300, 600, 0, 8, 1], 301, 1, [[0, 300, 600, 0, 8, 1]]),
        ([0, 300, 600, 0, 8, 1], 300, 1, [[0, 300, 599, 0, 8, 1], [0, 599, 600, 0, 8, 1]]),
        ([0, 300, 600, 0, 8, 1], None, 1, [[0, 300, 600, 0, 8, 1]]),
        # The rank with the begin of the document runs rows of others, too.
        ([0, 0, 900, 0, 2, 0], None, 128, [[0, 0, 300, 0, 2, 0], [0, 300, 900, 0, 2, 0]]),
        ([0, 128, 600, 0, 2, 0], 32, 128, [[0, 128, 300, 0, 2, 0], [0, 300, 600, 0, 2, 0]]),
        ([0, 0, 900, 0, 2, 1], None, 128, [[0, 0, 900, 0, 2, 1]]),
        ([0, 300, 900, 0, 2, 0], None, 128, [[0, 300, 900, 0, 2, 0]]),
        ([0, 0, 300, 0, 2, 0], None, 128, [[0, 0, 300, 0, 2, 0]]),
        # Rows of others come first, those of its own follow.
        ([0, 200, 600, 0, 8, 1], 32, 4, [[0, 200, 332, 0, 8, 1], [0, 332, 600, 0, 8, 1]]),
        ([0, 200, 300, 0, 8, 1], 32, 4, [[0, 200, 300, 0, 8, 1]]),
        ([0, 0, 300, 0, 8, 0], 32, 4, [[0, 0, 300, 0, 8, 0]]),
        ([0, 300, 600, 0, 8, 2], 32, 4, [[0, 300, 600, 0, 8, 2]]),
    ],
)
def test_where_a_task_is_cut(task: list[int], window: int | None, granularity: int, expected: list[list[int]]) -> None:
    found = split_own_rows(STREAM, np.array([task]), window, granularity)
    assert found.tolist() == expected


def test_no_tasks() -> None:
    nothing = np.zeros((0, 6), np.int64)
    assert split_own_rows(Layout.from_rank_lengths([[], []]).tick(), nothing, 8, 1).shape == (0, 6)


@settings(max_examples=80, deadline=None)
@given(problems(), st.sampled_from([1, 2, 64, 700]))
def test_the_same_rows_on_the_same_ranks(problem: PlanInput, window: int) -> None:
    """Bytes are as before: only what lies at servers is less."""
    problem = dataclasses.replace(problem, window=window)
    plan = make_plan(problem)
    check_coverage(plan.tasks, problem.tick, problem.shape.groups)
    assert check_cuts(plan.tasks, problem.tick, problem.granularity) == 0
    again = split_own_rows(problem.tick, plan.tasks, window, problem.granularity)
    np.testing.assert_array_equal(again, plan.tasks)
    table = build_slices(problem.tick, plan.tasks, window).table
    moved = table[table[:, 1] != table[:, 2]]
    size = np.where(moved[:, 0] == 0, problem.shape.query_bytes, problem.shape.key_value_bytes) * moved[:, 6]
    queries = moved[moved[:, 0] == 0]
    back = np.bincount(queries[:, 1], queries[:, 6] * problem.shape.output_bytes, problem.tick.ranks)
    np.testing.assert_array_equal(np.bincount(moved[:, 2], size, problem.tick.ranks) + back, plan.received_bytes)
