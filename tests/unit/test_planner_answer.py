"""From a core's solution to a plan: finish times, notes.

The core is a table of solutions, so that each decision can be seen by itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from deepspeed_cad.cost import CostModel
from deepspeed_cad.layout import Layout
from deepspeed_cad.planner import HeadShape, PlanInput, answer, make_plan
from deepspeed_cad.planner.core import Aim, Solution
from deepspeed_cad.planner.plan import Flows, Plan

SHAPE = HeadShape(8, 4, 16, 16, 2)
TICK = Layout.from_rank_lengths([[10], [10]]).tick()
TASKS = np.array([[0, 0, 10, 0, 4, 0], [1, 0, 10, 0, 4, 1]])
FREE = CostModel()


def solution(work: list[float], received: list[int] = [0, 0]) -> Solution:  # noqa: B006
    """So much work, and so many bytes of Q, K and V that each rank receives of the other one."""
    moved = np.zeros((4, 2, 2), np.int64)
    moved[0, 0], moved[1, 0] = received[::-1], received
    flows = Flows(moved, np.zeros(2), np.zeros((0, 3), np.int64), np.zeros(2), np.zeros((2, 2), np.int64))
    return Solution(TASKS, np.array(work), np.array([30.0, 10.0]), flows)


def plan(core: Callable[[Aim], Solution], **fields: Any) -> tuple[Plan, list[Aim]]:
    """The plan, and what the core was asked for."""
    asked: list[Aim] = []

    def solve(problem: PlanInput, aim: Aim) -> Solution:
        asked.append(aim)
        return core(aim)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answer, "solve", solve)
        return make_plan(PlanInput(TICK, SHAPE, FREE, **fields)), asked


def test_loads_are_finish_times() -> None:
    found, asked = plan(
        lambda aim: solution([20.0, 0.0], [7, 9]), speed=np.array([2.0, 0.0]), base_load=np.array([1.0, 4.0])
    )
    assert asked == [Aim(0.05)]
    assert found.load.tolist() == [11.0, 4.0] and found.load_before.tolist() == [16.0, 14.0]
    assert found.tasks is TASKS and found.sent_bytes.tolist() == [9, 7] and found.received_bytes.tolist() == [7, 9]
    assert 0 < found.planning_ms < 1e4
    assert found.imbalance == pytest.approx(11 / 7.5) and found.imbalance_before == pytest.approx(16 / 15)


FAST = {"speed": np.array([2.0, 1.0])}
NONE = {"speed": np.array([1.0, 0.0])}
LATE = {"base_load": np.array([0.0, 8.0])}
LATER = {"base_load": np.array([0.0, 50.0])}


@pytest.mark.parametrize(
    ("work", "fields", "ranks", "farthest"),
    [
        ([10.5, 9.5], {}, 0, ""),
        ([10.51, 9.49], {}, 2, "were wanted"),
        ([13.6, 6.4], FAST, 0, ""),
        ([14.2, 5.8], FAST, 2, "rank 1 with 5.8 where 6.33333 to 7 were wanted"),
        ([13.9, 6.1], FAST, 1, "rank 1 with 6.1 where 6.33333 to 7 were wanted"),
        ([12.5, 7.5], FAST, 2, "rank 1 with 7.5 where 6.33333 to 7 were wanted"),
        ([14.6, 5.4], LATE, 0, ""),
        ([12.0, 8.0], LATE, 2, "were wanted"),
        ([20.0, 0.0], LATER, 0, ""),
        ([19.2, 0.8], LATER, 1, "rank 1 with 0.8 where 0 to 0 were wanted"),
        ([20.0, 0.0], NONE, 0, ""),
        ([19.5, 0.5], NONE, 1, "rank 1 with 0.5 where 0 to 0 were wanted"),
    ],
)
def test_ranks_out_of_the_tolerance_are_noted(
    work: list[float], fields: dict[str, Any], ranks: int, farthest: str
) -> None:
    found, _ = plan(lambda aim: solution(work), **fields)
    assert len(found.notes) == (1 if ranks else 0)
    for note in found.notes:
        start = (
            f"{ranks} of 2 ranks are out of the tolerance of 0.05: the granularity, or too few rows; the farthest is"
        )
        assert note.startswith(start) and note.endswith(farthest)


def test_plans_are_plain_data() -> None:
    found, _ = plan(lambda aim: solution([14.0, 6.0], [7, 9]))
    saved = json.loads(json.dumps(found.to_json()))
    assert saved["notes"] == list(found.notes) and len(saved["notes"]) == 1
    assert saved["load"] == [14.0, 6.0] and saved["load_before"] == [30.0, 10.0]
    assert (
        saved["sent_bytes"] == [9, 7]
        and saved["finish"] == [14.0, 6.0]
        and saved["between_bytes"] == 0
        and saved["tasks"] == TASKS.tolist()
        and saved["planning_ms"] > 0
    )
    other = Plan(TASKS + 1, *[found.load] * 4)
    assert 0 <= found.fingerprint() < 1 << 63 and found.fingerprint() != other.fingerprint()
    assert Plan(TASKS, *[np.zeros(0)] * 4).imbalance == 1.0 and Plan(TASKS, *[np.zeros(2)] * 4).imbalance == 1.0


def test_sizes_of_a_head_group() -> None:
    shape = HeadShape(query_heads=12, groups=4, head_dim=6, value_dim=5, bytes_per_element=2)
    assert shape.heads_per_group == 3
    assert (shape.query_bytes, shape.output_bytes, shape.key_value_bytes) == (36, 30, 22)
