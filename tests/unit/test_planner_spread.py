"""Documents on many ranks dealt out by head groups: what moves, against arithmetic, and when that start is taken."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from plan_checks import check_tasks
from test_planner_search import BIG, H200

from deepspeed_cad.layout import Layout
from deepspeed_cad.planner import HeadShape, PlanInput, answer, make_plan
from deepspeed_cad.planner.answer import landing
from deepspeed_cad.planner.core import Aim, Solution, solve
from deepspeed_cad.planner.plan import O_RECEIVED, O_SENT, QKV_RECEIVED, QKV_SENT
from deepspeed_cad.planner.question import with_links

MILLION = 1 << 20
MHA = HeadShape(query_heads=32, groups=32, head_dim=128, value_dim=128, bytes_per_element=2)
TOLERANCE = 0.02


def ask(lengths: list[int], ranks: int, tokens: int, shape: HeadShape = BIG, **fields: Any) -> PlanInput:
    """A stream cut into ranks, at the costs of an H200."""
    tick = Layout.from_stream(lengths, ranks, tokens).tick()
    return PlanInput(tick, shape, fields.pop("cost", H200), tolerance=TOLERANCE, **fields)


@pytest.mark.parametrize(("ranks", "shape"), [(4, BIG), (8, BIG), (4, MHA), (16, MHA)])
def test_one_document_moves_what_ulysses_moves(ranks: int, shape: HeadShape) -> None:
    """(n - 1) / n of Q, K and V in, and of O back, on every rank, forward."""
    problem = ask([MILLION], ranks, MILLION // ranks, shape)
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
    answer.best_start(ask([MILLION], ranks, MILLION // 128))
    assert (len(asked), min(asked), max(asked)) == (plans, finest * TOLERANCE, TOLERANCE)


@pytest.mark.parametrize("between", [1.0, 10.0, 50.0, 400.0])
def test_over_hosts_only_where_it_pays(between: float, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = ask([MILLION], 8, MILLION // 8, hosts=np.arange(8) // 4, cost=with_links(H200, 362.0, between))
    plan = make_plan(problem)
    monkeypatch.setattr(answer, "solve", lambda asked, aim: solve(asked, dataclasses.replace(aim, kept=-1)))
    assert plan.finish.max() <= make_plan(problem).finish.max() * (1 + 0.5 * TOLERANCE)


@pytest.mark.parametrize(
    "lengths, ranks", [([MILLION], 2), ([MILLION], 4), ([8_000] * 31 + [16_000], 4), ([20_000] * 13, 2)]
)
def test_the_plan_is_chosen_by_time_and_bytes(lengths: list[int], ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = dataclasses.replace(ask(lengths, ranks, sum(lengths) // ranks), tolerance=0.05)
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
