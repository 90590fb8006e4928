"""Rows that find at home all that they read."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_planner import problems

from deepspeed_cad.layout import Layout
from deepspeed_cad.planner import PlanInput, make_plan
from deepspeed_cad.planner.checks import check_coverage, check_cuts
from deepspeed_cad.planner.own_rows import split_own_rows
from deepspeed_cad.schedule import build_slices

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


@settings(max_examples=200, deadline=None)
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
