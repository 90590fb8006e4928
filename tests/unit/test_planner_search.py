"""How much is moved over slow links: never more than pays, close to the best, and less the slower they are; and
documents on many ranks dealt out by head groups: what moves, against arithmetic, and when that start is taken."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_checks import check_plan, check_tasks
from test_planner import problems

from deepspeed_cad.cost import CostModel
from deepspeed_cad.layout import Layout
from deepspeed_cad.planner import HeadShape, PlanInput, answer, make_plan
from deepspeed_cad.planner.answer import landing
from deepspeed_cad.planner.constants import UNBOUNDED
from deepspeed_cad.planner.core import Aim, Solution, solve
from deepspeed_cad.planner.finish import finish_times
from deepspeed_cad.planner.plan import O_RECEIVED, O_SENT, QKV_RECEIVED, QKV_SENT
from deepspeed_cad.planner.question import with_links

MILLION, TOLERANCE = 1 << 20, 0.02
BIG = HeadShape(query_heads=32, groups=8, head_dim=128, value_dim=128, bytes_per_element=2)
MHA = dataclasses.replace(BIG, groups=32)
H200 = CostModel("H200", "seconds", pair=1.122e-11, row=6.495e-9, key=2.376e-9)
"""As the shipped profile has it."""
LONG = [[40000, 3000, 9000], [12000] * 4, [20000, 20000, 9000], [65000]]


def ask(lengths: Any, hosts: list[int], between: float, shape: HeadShape = BIG, inside: float = 362.0) -> PlanInput:
    tick = Layout.from_rank_lengths(lengths).tick()
    return PlanInput(tick, shape, with_links(H200, inside, between), tolerance=TOLERANCE, hosts=np.array(hosts))


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


def of_stream(lengths: list[int], ranks: int, tokens: int, shape: HeadShape = BIG, **fields: Any) -> PlanInput:
    """A stream cut into ranks, at the costs of an H200."""
    tick = Layout.from_stream(lengths, ranks, tokens).tick()
    return PlanInput(tick, shape, fields.pop("cost", H200), tolerance=TOLERANCE, **fields)


@pytest.mark.parametrize(("ranks", "shape"), [(4, BIG), (8, BIG), (4, MHA), (16, MHA)])
def test_one_document_moves_what_ulysses_moves(ranks: int, shape: HeadShape) -> None:
    """(n - 1) / n of Q, K and V in, and of O back, on every rank, forward."""
    problem = of_stream([MILLION], ranks, MILLION // ranks, shape)
    found = solve(problem, Aim(problem.tolerance, kept=0))
    check_tasks(problem, found.tasks)
    away = (ranks - 1) / ranks * (MILLION // ranks) * shape.groups
    qkv, o = shape.query_bytes + shape.key_value_bytes, shape.output_bytes
    for what, size in ((QKV_SENT, qkv), (QKV_RECEIVED, qkv), (O_SENT, o), (O_RECEIVED, o)):
        assert found.flows.bytes[what].sum(0).tolist() == [away * size] * ranks
    assert np.ptp(found.work) <= 1e-9 * found.work.max()
    out, back = landing(problem, found.flows)
    rows = MILLION * shape.groups // ranks
    assert out.tolist() == [rows * (qkv + o)] * ranks and back.tolist() == [away * qkv] * ranks


@pytest.mark.parametrize(("ranks", "plans", "finest"), [(128, 9, 0.05), (129, 6, 0.2)])
def test_with_many_ranks_fewer_plans_are_made(
    ranks: int, plans: int, finest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is to be less even than was asked for."""
    asked: list[float] = []
    monkeypatch.setattr(answer, "solve", lambda problem, aim: asked.append(aim.tolerance) or solve(problem, aim))
    answer.best_start(of_stream([MILLION], ranks, MILLION // 128))
    assert (len(asked), min(asked), max(asked)) == (plans, finest * TOLERANCE, TOLERANCE)


@pytest.mark.parametrize("between", [1.0, 10.0, 50.0, 400.0])
def test_over_hosts_only_where_it_pays(between: float, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = of_stream([MILLION], 8, MILLION // 8, hosts=np.arange(8) // 4, cost=with_links(H200, 362.0, between))
    plan = make_plan(problem)
    monkeypatch.setattr(answer, "solve", lambda asked, aim: solve(asked, dataclasses.replace(aim, kept=-1)))
    assert plan.finish.max() <= make_plan(problem).finish.max() * (1 + 0.5 * TOLERANCE)


@pytest.mark.parametrize(
    "lengths, ranks", [([MILLION], 2), ([MILLION], 4), ([8_000] * 31 + [16_000], 4), ([20_000] * 13, 2)]
)
def test_the_plan_is_chosen_by_time_and_bytes(lengths: list[int], ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = dataclasses.replace(of_stream(lengths, ranks, sum(lengths) // ranks), tolerance=0.05)
    starts = (-1, 1, 0) if ranks > 2 else (-1,)
    plans = [solve(problem, Aim(share * 0.05, kept=start)) for start in starts for share in (1.0, 0.2, 0.05)]

    def look(plan: Solution) -> tuple[float, float]:
        return answer.slowest(problem, plan), answer.burden(problem, plan.flows)

    ends, burdens = zip(*map(look, plans))
    end, moved = look(answer.best_start(problem))
    assert end < 1.01 * min(ends) and not any(one < end and other < moved for one, other in zip(ends, burdens))
    monkeypatch.setattr(answer.constants, "WORTH", 0.0)
    assert look(answer.best_start(problem))[0] == min(ends)
    monkeypatch.setattr(answer.constants, "WORTH", 1e9)
    end, moved = look(answer.best_start(problem))
    assert end * moved == min(one * other for one, other in zip(ends, burdens))
