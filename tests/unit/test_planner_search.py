"""How much is moved over slow links: never more than pays, close to the best, and less the slower they are."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_checks import check_plan
from test_planner import problems

from deepspeed_cad.cost import CostModel
from deepspeed_cad.layout import Layout
from deepspeed_cad.planner import HeadShape, PlanInput, make_plan
from deepspeed_cad.planner.constants import UNBOUNDED
from deepspeed_cad.planner.core import Aim, solve
from deepspeed_cad.planner.finish import finish_times
from deepspeed_cad.planner.question import with_links

BIG = HeadShape(query_heads=32, groups=8, head_dim=128, value_dim=128, bytes_per_element=2)
H200 = CostModel("H200", "seconds", pair=1.122e-11, row=6.495e-9, key=2.376e-9)
"""As the shipped profile has it."""
LONG = [[40000, 3000, 9000], [12000] * 4, [20000, 20000, 9000], [65000]]


def ask(lengths: Any, hosts: list[int], between: float, shape: HeadShape = BIG, inside: float = 362.0) -> PlanInput:
    tick = Layout.from_rank_lengths(lengths).tick()
    return PlanInput(tick, shape, with_links(H200, inside, between), tolerance=0.02, hosts=np.array(hosts))


@settings(max_examples=80)
@given(problems(), st.sampled_from([1e-13, 1e-10, 1e-8, 1e-6]), st.sampled_from([1.0, 10.0, 1000.0]))
def test_never_later_than_nothing(problem: PlanInput, inside: float, ratio: float) -> None:
    cost = dataclasses.replace(problem.cost, byte_inside=inside, byte_between=inside * ratio)
    problem = dataclasses.replace(problem, cost=cost)
    plan = make_plan(problem)
    check_plan(problem, plan)
    # As if rows stayed at home, but for those of ranks that run nothing.
    nothing = solve(problem, Aim(UNBOUNDED))
    assert plan.finish.max() <= finish_times(problem, nothing.work, nothing.flows).max() * (1 + 1e-12)
    speed = problem.speeds
    mean = np.average(plan.load, weights=speed)
    even = np.abs(plan.load[speed > 0] - mean).max() <= problem.tolerance * mean
    assert even or plan.notes or problem.base_load is not None


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 0, 0, 1], [0, 1, 0, 1], [0, 1, 2, 3], [0, 0, 1, 2], [5, -3, 5, 5]])
def test_less_travels_between_hosts_the_slower_the_link(hosts: list[int]) -> None:
    plans = [make_plan(ask(LONG, hosts, speed)) for speed in (300.0, 10.0, 5.0, 1.0, 0.01)]
    travelled = [plan.between_bytes for plan in plans]
    # Plans are found step by step: a little more at a slower link is chance, and between 50 and 20 GB/s, where
    # hardly anything is waited for, so is twice as much.
    assert all(slow <= 1.05 * fast for fast, slow in zip(travelled, travelled[1:], strict=False)), travelled
    assert travelled[-1] == 0 < travelled[0]
    assert all(plan.notes for plan in plans[2:])
    ends = [plan.finish.max() for plan in plans]
    assert all(slow >= 0.99 * fast for fast, slow in zip(ends, ends[1:], strict=False)), ends


def test_slow_links_inside_the_only_host_are_minded_too() -> None:
    plans = [make_plan(ask(LONG, [0] * 4, 1.0, inside=speed)) for speed in (300.0, 5.0, 0.01)]
    sent = [int(plan.sent_bytes.sum()) for plan in plans]
    assert sent[0] > sent[1] > sent[2] == 0
    assert not plans[0].notes and plans[1].notes[0].startswith("the slowest rank comes down ")
    (note,) = make_plan(ask(LONG, [0, 0, 0, 1], 50.0)).notes
    assert note.startswith("the slowest host comes down 100% of the way to the mean"), "as far as it can"
    assert plans[2].notes == ("nothing is moved: on these links it would take longer than it saves",)
