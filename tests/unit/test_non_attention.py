"""Linear layers beside servers: what is timed, what all trainers learn of it, and what plans make of that."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deepspeed_cad.ahead.crew import Crew, Servers
from deepspeed_cad.ahead.documents import Announcement
from deepspeed_cad.ahead.plan import Learned
from deepspeed_cad.attention.microbatch import PlanKey
from deepspeed_cad.attention.non_attention import Stretches, StretchTimes
from deepspeed_cad.config import CADConfig
from deepspeed_cad.feedback.non_attention import NonAttention, middle
from deepspeed_cad.layout import segments_from_cumulative
from deepspeed_cad.planner import HeadShape
from deepspeed_cad.planner.constants import FORWARD_SHARE
from deepspeed_cad.planner.cut import PlanLayers, choose_interleaved_cut
from deepspeed_cad.profiles.profile import Profile, ShapeCost
from deepspeed_cad.session import Session

SHAPE = HeadShape(8, 2, 64, 64, 2)
KEY = PlanKey(None, SHAPE)


def test_a_stretch_lies_between_the_attentions_of_two_neighbouring_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=5.0)
    monkeypatch.setattr("deepspeed_cad.attention.non_attention.time", SimpleNamespace(perf_counter=lambda: clock.now))
    times = StretchTimes()
    here = Stretches(times, torch.device("cpu"), 10)
    here.end(0, False)  # before the first layer lies the embedding
    here.begin(0, False)
    clock.now += 0.02
    here.end(1, False)
    here.begin(1, False)
    clock.now += 1.0
    here.end(1, True)  # the loss
    here.begin(1, True)
    clock.now += 0.05
    here.end(0, True)
    here.begin(0, True)
    forward, backward = times.take()
    assert (forward, backward) == (pytest.approx([0.002]), pytest.approx([0.005]))
    assert times.take() == ([], [])


@pytest.mark.parametrize("late", [False, True])
def test_a_gpu_that_waits_for_its_host_is_not_timed(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models are launched more slowly than they run; ranks differ in that by chance."""
    times = StretchTimes()
    here = Stretches(times, torch.device("cpu"), 10)
    event = SimpleNamespace(query=lambda: late, elapsed_time=lambda end: 20.0)
    monkeypatch.setattr(here, "_now", lambda: event)
    here.begin(0, False)
    here.end(1, False)
    assert times.take() == ([] if late else [0.002], [])


def test_layers_that_compile_do_not_count() -> None:
    assert middle([1.0, 1.0, 3.0, 1000.0, 0.0]) == pytest.approx(5 / 3)
    assert middle([2.0]) == 2.0 and middle([]) == 0.0


def _linear(measured: list[tuple[list[float], list[float]]], pauses: list[bool] | None = None) -> list[NonAttention]:
    wants = pauses or [False] * len(measured)
    return [
        NonAttention(len(measured), lambda model, one=one: one, lambda no=no: no) for one, no in zip(measured, wants)
    ]


def _meet(everyone: list[NonAttention], model: int = 0) -> None:
    reports = np.stack([one.report(model) for one in everyone])
    for one in everyone:
        one.hear(model, reports)


def test_all_trainers_learn_each_ones_own_figure() -> None:
    everyone = _linear([([1e-6], [2e-6]), ([3e-6], [5e-6]), ([], [])])
    assert everyone[0].seconds(0) is None
    _meet(everyone)
    for one in everyone:  # a trainer without tokens is taken for the mean
        assert one.seconds(0) == pytest.approx([3e-6, 8e-6, 5.5e-6])
        assert one.seconds(1) is None  # another model


def test_what_is_learned_is_smoothed() -> None:
    (one,) = everyone = _linear([([1e-6], [1e-6])])
    _meet(everyone)
    one._take = lambda model: ([3e-6], [])
    _meet(everyone)
    assert one.seconds(0) == pytest.approx([3e-6])


def test_forward_alone_is_enough_for_forwards_alone() -> None:
    everyone = _linear([([1e-6], []), ([], [])])
    _meet(everyone)
    assert everyone[0].seconds(0) is None and everyone[0].seconds(0, backward=False) == pytest.approx([1e-6, 1e-6])


def test_deterministic_algorithms_on_any_trainer_mean_equal_shares() -> None:
    everyone = _linear([([1e-6], [2e-6]), ([3e-6], [5e-6])], [False, True])
    _meet(everyone)
    assert all(one.seconds(0) is None for one in everyone)


@pytest.fixture
def session() -> Iterator[Session]:
    """Planning for 2 trainers and 1 server, a nanosecond per pair."""
    opened = Session(CADConfig(), torch.device("cpu"))
    opened.plans.config = CADConfig.from_dict({"granularity": 64, "servers": {"reserved": 1}})
    opened.plans.cost = Profile("test", "test", (ShapeCost(SHAPE, pair=1e-9),), unit="seconds")
    opened.plans.gatherer.agree = lambda value, subject: None  # type: ignore[method-assign]
    yield opened
    opened.close()


def _reserve(session: Session, seconds: list[float] | None, helpers: int = 2, speed: float = 1.0) -> None:
    """One server of this speed."""
    speeds = None if helpers and speed == 1.0 else np.array([helpers / 2, helpers / 2, speed])
    session.plans.crew = Crew(2, None, None, speeds, Servers(1, 1, helpers))
    session.plans._speeds_at_start = speeds
    session.plans.learned = _learned(seconds or [0, 0])


def _learned(forward: list[float], backward: int = 1) -> Learned:
    known = NonAttention(2, lambda model: ([], []), lambda: False)
    known.hear(0, np.array([[0, round(one * 1e12), backward * (one > 0)] for one in forward], np.int64))
    return Learned(non_attention=known)


def _announced(*lengths: int) -> list[Announcement]:
    return [Announcement(segments_from_cumulative([0, length], length)) for length in lengths]


@pytest.mark.parametrize("helpers", [0, 2])
@pytest.mark.parametrize("linear", [None, [3e-6, 2e-6]])
def test_the_cut_knows_servers_layers_and_the_slowest_trainer(
    session: Session, linear: list[float] | None, helpers: int
) -> None:
    _reserve(session, linear, helpers)
    known = session.plans.open(_announced(6000, 6000), {KEY: 1})
    layout = known.layout
    assert layout.ranks == 3 and len(known.ticks) == 2
    unit, kinds = np.ones(3, np.int64), [PlanLayers(session.plans.cost.cost_for(SHAPE), None, 2)]
    expected = choose_interleaved_cut(layout, unit, kinds, 1, linear and max(linear), helpers)
    assert expected is not None and known.ticks[0].query_tokens.tolist() == expected.tolist()
    for nano_batch in range(2):
        other = layout.tokens - known.ticks[nano_batch].query_tokens
        finish = known.planned[KEY, nano_batch].plan.load + np.array([*(linear or [0, 0]), 0.0]) * other
        if helpers == 0:
            assert known.planned[KEY, nano_batch].plan.load[:2].tolist() == [0.0, 0.0]
        else:
            assert finish.max() < 1.06 * finish.mean()


def test_forwards_alone_make_whole_layers_even(session: Session) -> None:
    """Who has fewer tokens attends more, by what a forward takes alone."""
    forward, tokens = 1e-6, np.array([6000, 5000])
    session.plans.crew, session.plans.learned = Crew(2, None, None), _learned([forward] * 2, 0)
    session.plans.config = CADConfig.from_dict({"granularity": 64, "tolerance": 0.02})
    plan = session.plans.open(_announced(*tokens), {KEY: 1}, backward=False).planned[KEY, 0].plan
    finish = plan.load + forward * tokens
    assert finish.max() < 1.01 * finish.mean() and plan.load[0] < 0.9 * plan.load[1]
    assert plan.load.sum() == pytest.approx(FORWARD_SHARE * 2e-9 * sum(n * (n + 1) / 2 for n in tokens))


@pytest.mark.parametrize("speed", [0.5, 2.0])
def test_plans_and_cuts_know_speeds(session: Session, speed: float) -> None:
    """A server of half the speed gets half as much beside the same trainers; linear layers are in seconds already."""
    means = []
    for of_server in (1.0, speed):
        _reserve(session, [3e-6, 3e-6], speed=of_server)
        found = session.plans.open(_announced(6000, 6000), {KEY: 1})
        base = 3e-6 * (found.layout.tokens - found.ticks[0].query_tokens) * np.array([1, 1, 0])
        finish = found.planned[KEY, 0].plan.load + base
        means.append(finish.mean())
        assert finish.max() < 1.03 * finish.mean() or of_server == 1.0
    assert (means[1] > means[0]) == (speed < 1)
