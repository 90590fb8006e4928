"""The planner: plans of random questions counted again, balance, bytes, and inputs at the edge."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_checks import SECONDS, check_plan, check_solution, check_tasks, fingerprint, random_problem

from deepspeed_cad.cost import PAIRS, CostModel
from deepspeed_cad.errors import CADConfigError
from deepspeed_cad.layout import Layout
from deepspeed_cad.planner import HeadShape, Plan, PlanInput, answer, make_plan
from deepspeed_cad.planner.constants import UNBOUNDED
from deepspeed_cad.planner.core import Aim, Solution, Units, solve, split_own_rows
from deepspeed_cad.planner.plan import Flows
from deepspeed_cad.planner.question import check_input
from deepspeed_cad.schedule import build_slices

SHAPE = HeadShape(query_heads=8, groups=4, head_dim=16, value_dim=16, bytes_per_element=2)


def problems() -> st.SearchStrategy[PlanInput]:
    """Questions of any kind, also of a nano-batch, whose rows read keys of the one before."""
    return st.builds(random_problem, st.integers(0, 1 << 20), st.sampled_from([None, 0, 1]))


@settings(max_examples=60)
@given(problems())
def test_plans_of_any_kind_are_plans(problem: PlanInput) -> None:
    """Every row and head group once; loads and bytes as counted again."""
    check_plan(problem, make_plan(problem))


@settings(max_examples=60)
@given(problems(), st.sampled_from(Units), st.floats(0.2, 3), st.sampled_from([-1, 0, 1, 2]))
def test_what_the_core_finds_for_any_aim(problem: PlanInput, units: Units, level: float, kept: int) -> None:
    """With units they come down to a level around the mean."""
    mean = float(solve(problem, Aim(UNBOUNDED)).work_before.sum() / problem.speeds.sum())
    check_solution(problem, solve(problem, Aim(problem.tolerance, units, level * mean, kept)))


@settings(max_examples=60)
@given(st.lists(st.integers(2000, 60000), min_size=4, max_size=30), st.integers(2, 8), st.sampled_from([0.02, 0.05]))
def test_balance_is_reached_on_both_sides(lengths: list[int], ranks: int, tolerance: float) -> None:
    tick = Layout.from_stream(lengths, ranks, -(-sum(lengths) // ranks)).tick()
    plan = make_plan(PlanInput(tick, SHAPE, PAIRS, tolerance=tolerance, granularity=64))
    assert np.abs(plan.load / plan.load.mean() - 1).max() <= tolerance


def test_balanced_tick_moves_nothing() -> None:
    plan = make_plan(PlanInput(Layout.from_rank_lengths([[4096] * 4] * 4).tick(), SHAPE, PAIRS, tolerance=0.02))
    assert plan.sent_bytes.sum() == 0 and plan.received_bytes.sum() == 0
    assert plan.load.tolist() == plan.load_before.tolist() and len(plan.tasks) == 16


def test_same_plan_again_and_from_shuffled_segments() -> None:
    layout = Layout.from_stream([50000, 300, 12000, 7, 4000], 4, 16580)
    problem = PlanInput(layout.tick(), SHAPE, SECONDS)
    first = make_plan(problem)
    order = np.random.default_rng(0).permutation(len(layout.segments))
    tick = dataclasses.replace(layout.tick(), query=layout.segments.select(order), key=layout.segments.select(order))
    second = make_plan(dataclasses.replace(problem, tick=tick))
    assert first.fingerprint() == second.fingerprint() == make_plan(problem).fingerprint()


def test_plans_are_those_that_other_compilers_gave() -> None:
    """Where plans change on purpose: `python tests/plan_checks.py > tests/unit/plans.json`."""
    wanted = json.loads(Path(__file__).with_name("plans.json").read_text())
    assert [fingerprint(seed) for seed in range(len(wanted))] == wanted


@settings(max_examples=40)
@given(problems(), st.sampled_from([1, 2, 64, 700]))
def test_the_same_rows_on_the_same_ranks(problem: PlanInput, window: int) -> None:
    """Bytes are as before: only what lies at servers is less."""
    problem = dataclasses.replace(problem, window=window)
    plan = make_plan(problem)
    check_tasks(problem, plan.tasks)
    np.testing.assert_array_equal(split_own_rows(problem.tick, plan.tasks, window, problem.granularity), plan.tasks)
    table = build_slices(problem.tick, plan.tasks, window).table
    moved = table[table[:, 1] != table[:, 2]]
    size = np.where(moved[:, 0] == 0, problem.shape.query_bytes, problem.shape.key_value_bytes) * moved[:, 6]
    queries = moved[moved[:, 0] == 0]
    back = np.bincount(queries[:, 1], queries[:, 6] * problem.shape.output_bytes, problem.tick.ranks)
    np.testing.assert_array_equal(np.bincount(moved[:, 2], size, problem.tick.ranks) + back, plan.received_bytes)


TICK = Layout.from_rank_lengths([[10], [10]]).tick()
TASKS = np.array([[0, 0, 10, 0, 4, 0], [1, 0, 10, 0, 4, 1]])


def plan(work: list[float], received: tuple[int, int] = (0, 0), **fields: Any) -> Plan:
    """The plan of a core that finds so much work, and bytes of Q, K and V that each rank receives of the other one."""
    moved = np.zeros((4, 2, 2), np.int64)
    moved[0, 0], moved[1, 0] = received[::-1], received
    flows = Flows(moved, np.zeros(2), np.zeros((0, 3), np.int64), np.zeros(2), np.zeros((2, 2), np.int64))
    found = Solution(TASKS, np.array(work), np.array([30.0, 10.0]), flows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answer, "solve", lambda problem, aim: found)
        return make_plan(PlanInput(TICK, SHAPE, CostModel(), **fields))


def test_loads_are_finish_times_and_plans_plain_data() -> None:
    found = plan([20.0, 0.0], (7, 9), speed=np.array([2.0, 0.0]), base_load=np.array([1.0, 4.0]))
    assert found.imbalance == pytest.approx(11 / 7.5) and found.imbalance_before == pytest.approx(16 / 15)
    saved = json.loads(json.dumps(found.to_json()))
    assert 0 < saved.pop("planning_ms") < 1e4
    assert saved == {
        "tasks": TASKS.tolist(), "load": [11.0, 4.0], "load_before": [16.0, 14.0], "sent_bytes": [9, 7],
        "received_bytes": [7, 9], "finish": [11.0, 4.0], "between_bytes": 0, "waves": 1, "notes": [],
    }  # fmt: skip
    other = Plan(TASKS + 1, *[found.load] * 4)
    assert 0 <= found.fingerprint() < 1 << 63 and found.fingerprint() != other.fingerprint()
    assert Plan(TASKS, *[np.zeros(0)] * 4).imbalance == 1.0 and Plan(TASKS, *[np.zeros(2)] * 4).imbalance == 1.0


FAST, NONE = {"speed": np.array([2.0, 1.0])}, {"speed": np.array([1.0, 0.0])}
LATE, LATER = {"base_load": np.array([0.0, 8.0])}, {"base_load": np.array([0.0, 50.0])}


@pytest.mark.parametrize("work, fields, ranks, farthest", [
    ([10.5, 9.5], {}, 0, ""), ([13.9, 6.1], FAST, 1, "rank 1 with 6.1 where 6.33333 to 7 were wanted"),
    ([12.0, 8.0], LATE, 2, "were wanted"), ([20.0, 0.0], LATER, 0, ""),
    ([19.5, 0.5], NONE, 1, "rank 1 with 0.5 where 0 to 0 were wanted"),
])  # fmt: skip
def test_ranks_out_of_the_tolerance_are_noted(work: list[float], fields: Any, ranks: int, farthest: str) -> None:
    notes = plan(work, **fields).notes
    start = f"{ranks} of 2 ranks are out of the tolerance of 0.05: the granularity, or too few rows; the farthest is"
    assert not notes if not ranks else notes[0].startswith(start) and notes[0].endswith(farthest)


GOOD = PlanInput(Layout.from_rank_lengths([[10, 20], [30]]).tick(), SHAPE, PAIRS)


@pytest.mark.parametrize("change, words", [
    ({"tolerance": 1.0}, "tolerance is 1.0"), ({"tolerance": float("nan")}, "tolerance is nan"),
    ({"speed": np.array([1.0, -1.0])}, "speed of rank 1 is -1.0"),
    ({"speed": np.array([0.0, 0.0])}, "speed is 0 on every rank"),
    ({"base_load": np.array([0.0, np.inf])}, "base_load of rank 1 is inf"),
    ({"tick": Layout.from_stream([1 << 31], 2, 1 << 30).tick()}, "2147483648 tokens is longer"),
])  # fmt: skip
def test_what_is_refused(change: dict[str, Any], words: str) -> None:
    check_input(GOOD)
    with pytest.raises(CADConfigError, match=words):
        make_plan(dataclasses.replace(GOOD, **change))


def test_a_tolerance_narrower_than_the_least_move_is_kept() -> None:
    tick = Layout.from_rank_lengths([[65536], [4096] * 16, [32768] * 2, [16384] * 4]).tick()
    assert not make_plan(PlanInput(tick, SHAPE, PAIRS, tolerance=0.0005)).notes
