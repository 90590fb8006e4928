"""Linear layers beside servers: what is timed, what all trainers learn of it, and what plans make of that."""

from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deepspeed_cad.ahead.crew import Crew, Servers
from deepspeed_cad.ahead.documents import Announcement
from deepspeed_cad.ahead.plan import SETTLED, Learned
from deepspeed_cad.attention.microbatch import PlanKey
from deepspeed_cad.config import CADConfig
from deepspeed_cad.feedback.non_attention import NonAttention, Stretches, StretchTimes, middle
from deepspeed_cad.layout import segments_from_cumulative
from deepspeed_cad.planner import HeadShape
from deepspeed_cad.planner.cut import PlanLayers, choose_interleaved_cut
from deepspeed_cad.profiles.profile import Profile, ShapeCost
from deepspeed_cad.session import Session

SHAPE = HeadShape(8, 2, 64, 64, 2)
KEY = PlanKey(None, SHAPE)


def test_a_stretch_lies_between_the_attentions_of_two_neighbouring_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=5.0)
    monkeypatch.setattr("deepspeed_cad.feedback.non_attention.time", SimpleNamespace(perf_counter=lambda: clock.now))
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
    forward, backward, waited = times.take()
    assert (forward, backward) == (pytest.approx([0.002]), pytest.approx([0.005])) and waited == [False, False]
    assert times.take() == ([], [], [])


@pytest.mark.parametrize("late", [False, True])
def test_a_gpu_that_waits_for_its_host_is_told(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    times = StretchTimes()
    here = Stretches(times, torch.device("cpu"), 10)
    monkeypatch.setattr(here, "_now", lambda: SimpleNamespace(query=lambda: late, elapsed_time=lambda end: 20.0))
    here.begin(0, False)
    here.end(1, False)
    assert times.take() == ([0.002], [], [late])


def test_layers_that_compile_do_not_count() -> None:
    assert middle([1.0, 1.0, 3.0, 1000.0, 0.0]) == pytest.approx(5 / 3)
    assert middle([2.0]) == 2.0 and middle([]) == 0.0


def _linear(
    measured: list[tuple[list[float], list[float], list[bool]]], pauses: list[bool] | None = None
) -> list[NonAttention]:
    wants = pauses or [False] * len(measured)
    return [
        NonAttention(len(measured), lambda model, one=one: one, lambda no=no: no) for one, no in zip(measured, wants)
    ]


def _meet(everyone: list[NonAttention], model: int = 0) -> None:
    reports = np.stack([one.report(model) for one in everyone])
    assert reports.shape[1] == NonAttention.columns
    for one in everyone:
        one.hear(model, reports)


def test_all_trainers_learn_each_ones_own_figure() -> None:
    everyone = _linear([([1e-6], [2e-6], [False]), ([3e-6], [5e-6], [True, *[False] * 4]), ([], [], [])])
    assert everyone[0].seconds(0) is None
    _meet(everyone)
    for one in everyone:  # a trainer without tokens is taken for the mean
        assert one.seconds(0) == pytest.approx([3e-6, 8e-6, 5.5e-6])
        assert one.seconds(1) is None  # another model


def test_half_of_a_difference_is_made_up_for_at_once() -> None:
    forward: list[float] = [0.0]
    everyone = _linear([(forward, [2e-6], [False])] * 2)
    for forward[0], found in ((1e-6, 3e-6), (3e-6, 4e-6), (3e-6, 4.5e-6)):
        _meet(everyone)
        assert everyone[0].seconds(0) == pytest.approx([found] * 2)


def test_where_gpus_wait_for_their_hosts_all_trainers_count_as_equally_fast() -> None:
    """Until they hardly have for some steps, or not at all for one. What a host takes to launch differs by chance."""
    waited = [False] * 10
    everyone = _linear([([1e-6], [2e-6], waited), ([3e-6], [5e-6], [False])])
    equal, own = [5.5e-6] * 2, [3e-6, 8e-6]
    for waits, found in ((10, equal), (1, equal), (1, own), (10, equal), (0, own), (4, own)):
        waited[:] = [True] * waits + [False] * (10 - waits)
        _meet(everyone)
        assert all(one.seconds(0) == pytest.approx(found) for one in everyone)


@pytest.mark.parametrize(("waited", "pace", "moves"), [(0, 1e-6, True), (1000, 1e-6, False), (1000, 1e-9, True)])
def test_where_hosts_set_the_pace_only_uneven_layers_are_made_even(
    waited: int, pace: float, moves: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 6000 tokens; attention takes 36 and 18 microseconds."""
    with closing(Session(CADConfig.from_dict({"granularity": 64}), torch.device("cpu"))) as session:
        caplog.set_level("INFO", "deepspeed_cad")
        plans, learned = session.plans, NonAttention(2, lambda model: ([], [], []), lambda: False)
        plans.gatherer.agree = lambda value, subject: None  # type: ignore[method-assign]
        plans.crew, plans.learned = Crew(2, None, None, None), Learned(non_attention=learned)
        learned.hear(0, np.array([[0, pace * 5e11, pace * 5e11, waited]] * 2, np.int64))
        announced = [Announcement(segments_from_cumulative(cut, 6000)) for cut in ([0, 6000], [0, 3000, 6000])]
        plans.open(announced, {KEY: 1})
        assert not caplog.text, "pairs cannot be compared with seconds"
        plans.cost = Profile("test", "test", (ShapeCost(SHAPE, pair=1e-12),), unit="seconds")
        known = plans.open(announced, {KEY: 1})
        one = SimpleNamespace(step=SimpleNamespace(length=[9]), of=[0], begin=np.zeros(1), end=np.full(1, 9))
        assert plans.step_costs(one, {KEY: 3}, 0).each == pytest.approx([3 * pace] * 2), "of both passes"
        learned.hear(0, np.array([[0, 1e6, 1e6, waited], [0, 2e7, 2e7, waited]], np.int64))
        for plans.turn, said in ((SETTLED - 1, 0), (SETTLED, not waited), (SETTLED, not waited)):
            plans.open(announced, {KEY: 1})
            assert caplog.text.count("rank 1 takes far longer than most outside attention") == said
    plan = known.planned[KEY, 0].plan
    assert ("GPUs wait for their hosts" in caplog.text) == bool(waited)
    assert plan.load_before == pytest.approx([3.6e-5, 1.8e-5], rel=1e-3)
    assert plan.load == pytest.approx([2.7e-5] * 2 if moves else plan.load_before, rel=0.06)


def test_deterministic_algorithms_on_any_trainer_mean_equal_shares() -> None:
    everyone = _linear([([1e-6], [2e-6], []), ([3e-6], [5e-6], [])], [False, True])
    _meet(everyone)
    assert all(one.seconds(0) is None for one in everyone)


@pytest.mark.parametrize("helpers", [0, 2])
@pytest.mark.parametrize("linear", [None, [3e-6, 2e-6]])
def test_the_cut_knows_servers_layers_and_the_slowest_trainer(linear: list[float] | None, helpers: int) -> None:
    """For 2 trainers and 1 server, a nanosecond per pair."""
    with closing(Session(CADConfig(), torch.device("cpu"))) as session:
        plans, speeds = session.plans, None if helpers else np.array([0.0, 0.0, 1.0])
        plans.config = CADConfig.from_dict({"granularity": 64, "servers": {"reserved": 1}})
        plans.cost = Profile("test", "test", (ShapeCost(SHAPE, pair=1e-9),), unit="seconds")
        plans.turn, compared = 7, list[int]()
        plans.gatherer.agree = lambda value, subject: compared.append(subject.index)  # type: ignore[method-assign]
        plans.crew, plans._speeds_at_start = Crew(2, None, None, speeds, Servers(1, 1, helpers)), speeds
        learned = NonAttention(2, lambda model: ([], [], []), lambda: False)
        learned.hear(0, np.array([[0, round(one * 1e12), one > 0, 0] for one in linear or [0, 0]], np.int64))
        plans.learned = Learned(non_attention=learned)
        known = plans.open([Announcement(segments_from_cumulative([0, 6000], 6000)) for _ in range(2)], {KEY: 1})
        kinds = [PlanLayers(plans.cost.cost_for(SHAPE), None, 2)]
    layout = known.layout
    assert layout.ranks == 3 and len(known.ticks) == 2 and compared == [7]
    expected = choose_interleaved_cut(layout, np.ones(3, np.int64), kinds, 1, linear and max(linear), helpers)
    assert expected is not None and known.ticks[0].query_tokens.tolist() == expected.tolist()
    for nano_batch in range(2):
        other = layout.tokens - known.ticks[nano_batch].query_tokens
        finish = known.planned[KEY, nano_batch].plan.load + np.array([*(linear or [0, 0]), 0.0]) * other
        if helpers == 0:
            assert known.planned[KEY, nano_batch].plan.load[:2].tolist() == [0.0, 0.0]
        else:
            assert finish.max() < 1.06 * finish.mean()
