"""What the session asks the planner for, and what ranks compare: each field of the question arrives."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deepspeed_cad.ahead.documents import Announcement
from deepspeed_cad.ahead.gather import Subject, What
from deepspeed_cad.ahead.plan import Reserved
from deepspeed_cad.ahead.traffic import Traffic
from deepspeed_cad.attention.microbatch import PlanKey
from deepspeed_cad.config import CADConfig
from deepspeed_cad.exchange.links import Links
from deepspeed_cad.exchange.transfers import Transfers
from deepspeed_cad.layout import Layout, LocalSegments, Tick
from deepspeed_cad.planner import HeadShape, PlanInput, make_plan
from deepspeed_cad.planner.plan import Plan
from deepspeed_cad.session import Session

SHAPE = HeadShape(8, 2, 64, 64, 2)
BLOCK = {"tolerance": 0.02, "granularity": 64}
TICK = Layout.from_rank_lengths([[30000], [20000, 64], [1024] * 4, []]).tick()


def none_late(tick: Tick, key: PlanKey) -> None:
    """All ranks begin together."""


@pytest.fixture
def session() -> Iterator[Session]:
    opened = Session(CADConfig.from_dict(BLOCK), torch.device("cpu"))
    yield opened
    opened.close()


@pytest.mark.parametrize("window", [None, 512])
def test_a_plan_is_that_of_the_layer_and_the_configuration(session: Session, window: int | None) -> None:
    """Planned without its window, the layer's long documents would seem to cost twenty times as much."""
    found = session.plans.plan_tick(TICK, PlanKey(window, SHAPE), none_late)
    asked = PlanInput(TICK, SHAPE, session.cost.cost_for(SHAPE), window, tolerance=0.02, granularity=64)
    assert found.fingerprint() == make_plan(asked).fingerprint()
    others = [
        PlanInput(TICK, SHAPE, asked.cost, 512 if window is None else None, 0.02, 64),
        PlanInput(TICK, SHAPE, asked.cost, window, 0.3, 64),
        PlanInput(TICK, SHAPE, asked.cost, window, 0.02, 1024),
    ]
    assert all(make_plan(other).fingerprint() != found.fingerprint() for other in others)


def test_hosts_reach_the_planner(session: Session) -> None:
    tick = Layout.from_rank_lengths([[30000], [], [], [], [30000], [], [], []]).tick()
    session.gatherer.ranks, session.plans.hosts = 8, np.arange(8) // 4
    plan = session.plans.plan_tick(tick, PlanKey(None, SHAPE), none_late)
    asked = PlanInput(tick, SHAPE, session.cost.cost_for(SHAPE), None, 0.02, 64, hosts=np.arange(8) // 4)
    assert plan.fingerprint() == make_plan(asked).fingerprint()


@pytest.mark.parametrize(("backward", "keep"), [("auto", False), ("resend", False), ("keep", True)])
def test_the_planner_knows_whether_servers_keep_what_they_received(
    backward: str, keep: bool, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[PlanInput] = []
    monkeypatch.setattr(
        "deepspeed_cad.ahead.plan.make_plan", lambda problem: asked.append(problem) or make_plan(problem)
    )
    session.plans.config = dataclasses.replace(session.config, backward=backward)
    session.plans.plan_tick(TICK, PlanKey(None, SHAPE), none_late)
    assert [problem.keep for problem in asked] == [keep]


@pytest.mark.parametrize(
    ("config", "hosts", "most", "expected"),
    [
        ({}, [0, 0, 1, 1], 8, (1, 2, 4, 8)),
        ({}, [0, 0, 1, 1], 2, (1, 2)),
        ({}, [0, 0, 0, 0], 8, (1,)),
        ({"waves": 3}, [0, 0, 0, 0], 1, (3,)),
        ({"overlap": "none"}, [0, 0, 1, 1], 8, (1,)),
    ],
)
def test_waves_where_links_between_hosts_carry_them(
    config: dict, hosts: list[int], most: int, expected: tuple[int, ...], session: Session, monkeypatch
) -> None:
    asked: list[PlanInput] = []
    monkeypatch.setattr(
        "deepspeed_cad.ahead.plan.make_plan", lambda problem: asked.append(problem) or make_plan(problem)
    )
    plans = session.plans
    plans.hosts, plans.transport = np.array(hosts), lambda: SimpleNamespace(most_waves=most, two_ways=True)  # type: ignore[assignment]
    plans.config = dataclasses.replace(session.config, **config)
    plans.plan_tick(TICK, PlanKey(None, SHAPE), none_late)
    plans.reserved = Reserved(0, None, 0, lambda model: None)
    plans.plan_tick(TICK, PlanKey(None, SHAPE), none_late)
    # Beside reserved servers only a number counts where linear layers have no times.
    assert [problem.waves for problem in asked] == [expected, (config.get("waves", 1),)]


def test_plans_are_compared_under_the_number_of_their_micro_batch(session: Session, monkeypatch) -> None:
    asked: list[tuple[int, Subject]] = []
    monkeypatch.setattr(session.plans.gatherer, "agree", lambda value, subject: asked.append((value, subject)))
    session.plans._agree(7, 1234, "plan")
    assert asked == [(1234, Subject(What.PLAN, index=7))]


def test_late_ranks_get_less_and_loads_speak_of_attention(session: Session) -> None:
    session.pace.most, session.gatherer.ranks = 0.1, 4
    key = PlanKey(None, SHAPE)
    mean = session.plans.plan_tick(TICK, key, none_late).load.mean()
    late = np.array([0.0, 0.0, 0.05 * mean, 0.0])
    plan = session.plans.plan_tick(TICK, key, partial(session.plans._starts, late, None))
    assert 0.93 < plan.load[2] / plan.load[[0, 1, 3]].mean() < 0.97
    assert plan.load.sum() == pytest.approx(4 * mean) and plan.load_before.sum() == pytest.approx(4 * mean)


def test_a_plan_knows_who_waits_for_keys_of_a_late_rank(session: Session) -> None:
    """Rows behind the late rank read its keys: nobody is relieved, and all that the others wait is known."""
    tick = Layout.from_stream([40000], 2, 20000).tick()
    session.pace.most, session.gatherer.ranks = 0.1, 2
    key, plans = PlanKey(None, SHAPE), session.plans
    mean = plans.plan_tick(tick, key, none_late).load.mean()
    plan = plans.plan_tick(tick, key, partial(plans._starts, np.array([0.05 * mean, 0.0]), None))
    assert plan.load == pytest.approx([mean, mean], rel=0.02)
    starts = plans._starts(np.array([0.05 * mean, 0.0]), None, tick, key)
    assert starts is not None and starts.held_up == pytest.approx([0.0, 0.05 * mean])
    plan = plans.plan_tick(tick, key, partial(plans._starts, np.array([0.0, 0.05 * mean]), None))
    assert 0.93 < plan.load[1] / plan.load[0] < 0.97, "earlier rows read no later ones"


@pytest.mark.parametrize(
    ("name", "device", "noted", "known"),
    [("nccl", "cuda", True, True), ("nccl", "cuda", False, False), ("nvlink", "cuda", True, True),
     ("nvlink", "cuda", False, False), ("c10d", "cuda", True, False), ("c10d", "cpu", True, True)],
)  # fmt: skip
def test_what_exchanges_can_take_is_known_where_links_are_corrected(
    session: Session, monkeypatch: pytest.MonkeyPatch, name: str, device: str, noted: bool, known: bool
) -> None:
    """Given figures say what a user thinks of links: a wait that is longer must not pass for that of a late rank."""
    links, hosts = Links(1e11, 1e10), [0, 1]
    transfers = Transfers(0, hosts, 1e11, 1e10) if noted else None
    plans = session.plans
    plans.traffic = Traffic(links, links, transfers, session.counts.waits, ["a", "b"], lambda: False)
    plans.device, plans.transport = torch.device(device), lambda: SimpleNamespace(name=name)  # type: ignore[assignment]
    small, large = np.array([10**6, 0]), np.array([10**9, 0])
    plan = Plan(np.zeros((0, 6), np.int64), np.zeros(2), np.zeros(2), large, large, between_bytes=1)
    assert plans._longest()(plan) == (links.longest(10**9, crosses=True) if known else math.inf)
    inside = dataclasses.replace(plan, between_bytes=0)
    assert plans._longest()(inside) == (links.longest(10**9, crosses=False) if known else math.inf)
    # What nobody times may take any time; copy engines take what they take.
    few = dataclasses.replace(plan, sent_bytes=small, received_bytes=small)
    assert plans._longest()(few) == (links.longest(10**6, crosses=True) if known and name == "nvlink" else math.inf)


def test_a_micro_batch_knows_what_its_exchanges_can_take(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    known = lambda plan: 7.0  # noqa: E731
    monkeypatch.setattr(session.plans, "_longest", lambda: known)
    local = LocalSegments(np.array([0]), np.array([64]), np.array([0]), 64)
    assert session.plans.open([Announcement(local)], {}).longest is known


def test_ranks_compare_costs_and_configuration(session: Session) -> None:
    """What "auto" finds differs between machines though their configurations are equal."""
    assert session.cost.figures in session.gatherer.settings
    other = Session(CADConfig.from_dict(BLOCK | {"granularity": 128}), torch.device("cpu"))
    try:
        assert other.cost.figures == session.cost.figures and other.gatherer.settings != session.gatherer.settings
    finally:
        other.close()
