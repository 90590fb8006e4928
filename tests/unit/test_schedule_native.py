"""Native schedules are the numpy ones, array for array."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from test_planner import problems

from deepspeed_cad.planner import PlanInput, make_plan
from deepspeed_cad.schedule import Slices, build_slices, schedule_rank
from deepspeed_cad.schedule.native import build_slices as build_natively
from deepspeed_cad.schedule.native import is_available, schedule_all

pytestmark = pytest.mark.skipif(not is_available(), reason="the native library is not built")


@settings(max_examples=300, deadline=None)
@given(problems())
def test_equal_to_numpy_and_every_rank_at_once(problem: PlanInput) -> None:
    tasks = make_plan(problem).tasks
    slices = build_slices(problem.tick, tasks, problem.window)
    native = build_natively(problem.tick, tasks, problem.window)
    for field in dataclasses.fields(Slices):
        ours, theirs = getattr(native, field.name), getattr(slices, field.name)
        np.testing.assert_array_equal(ours, theirs.reshape(ours.shape), err_msg=field.name)
    groups = problem.shape.groups
    for rank, ours in enumerate(schedule_all(problem.tick, native, groups, problem.window)):
        theirs = schedule_rank(problem.tick, slices, rank, groups, problem.window)
        for name in ("sends", "receives", "own"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)
        for name in ("local", "served"):
            for a, b in zip(getattr(ours, name), getattr(theirs, name), strict=True):
                assert (a.q_row, a.k_row, a.group_begin, a.group_end) == (b.q_row, b.k_row, b.group_begin, b.group_end)
                np.testing.assert_array_equal(a.cu_q, b.cu_q)
                np.testing.assert_array_equal(a.cu_k, b.cu_k)
