"""Layers: what of them is timed, what all trainers learn of it, and what plans make of that."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from deepspeed_cad.ahead.crew import Crew, Servers
from deepspeed_cad.ahead.documents import Announcement
from deepspeed_cad.ahead.plan import SETTLED, Learned, Plans
from deepspeed_cad.attention.microbatch import PlanKey
from deepspeed_cad.config import CADConfig
from deepspeed_cad.exchange.waits import Waits
from deepspeed_cad.feedback.layer_times import MOST, LayerTimes, Measured, Stretches, StretchTimes, _Stretch, middle
from deepspeed_cad.layout import segments_from_cumulative
from deepspeed_cad.planner import HeadShape
from deepspeed_cad.planner.cut import PlanLayers, choose_interleaved_cut
from deepspeed_cad.profiles.profile import Profile, ShapeCost
from deepspeed_cad.session import Session

SHAPE = HeadShape(8, 2, 64, 64, 2)
KEY = PlanKey(None, SHAPE)


def test_a_stretch_lies_between_the_attentions_of_two_neighbouring_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=5.0)
    for room in ("exchange.waits", "feedback.layer_times"):
        monkeypatch.setattr(f"deepspeed_cad.{room}.time", SimpleNamespace(perf_counter=lambda: clock.now))
    times, waits = StretchTimes(), Waits()
    here = Stretches(times, torch.device("cpu"), 10, waits)

    def attend(layer: int, backward: bool, seconds: float, load: float = 1.0) -> None:
        here.end(layer, backward)
        clock.now += seconds
        with waits.timed(torch.device("cpu")):
            clock.now += 0.3
        here.begin(layer, backward, load)

    attend(0, False, 0.5)  # before the first layer lies the embedding
    with waits.timed(torch.device("cpu")):  # of no attention
        clock.now += 0.02
    attend(1, False, 0.7)
    clock.now += 1.0
    attend(1, True, 1.1, 0.25)  # behind the loss
    clock.now += 0.05
    attend(0, True, 1.1, 0.25)
    attend(2, True, 9.0, load=0.0)  # of which nothing was planned
    assert times.take() == pytest.approx((0.002, 0.005, 0.0, 0.5, 1.0 / (0.6 + 4.4))) and not any(times.take())


def test_a_lap_has_what_was_waited_for_since_the_one_before() -> None:
    """On a GPU, read in any order and when all is over."""
    waits, over, late_is_over = Waits(), SimpleNamespace(query=lambda: True), False
    late = SimpleNamespace(query=lambda: late_is_over)
    waits._expect(over, lambda: 3.0)
    first = waits.lap(over)
    waits._expect(over, lambda: 4.0)
    second = waits.lap(late)
    assert first() == 3.0 and waits.seconds() == 7.0 and second() == 0.0, "that stream is behind"
    late_is_over = True
    assert second() == 4.0 and first() == 3.0 and waits.lap(1.0)() == 0.0


@pytest.mark.parametrize("late", [False, True])
def test_a_gpu_that_waits_for_its_host_is_told(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    times = StretchTimes()
    here = Stretches(times, torch.device("cpu"), 10, Waits())
    monkeypatch.setattr(here, "_now", lambda: SimpleNamespace(query=lambda: late, elapsed_time=lambda end: 20.0))
    for layer in range(2):
        here.begin(layer, False)
        here.end(layer + 1, False)
    assert times.take() == (0.002, 0.0, late, 0.0, 0.0)


def test_what_is_not_over_waits_for_the_next_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event(SimpleNamespace):
        cuda_event, query, elapsed_time = None, lambda self: self.over, lambda self, end: 20.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    times, begin, end = StretchTimes(), Event(over=True), Event(over=False)
    times.add(_Stretch(begin, end, False, 10, waited=True))
    assert not any(times.take())
    end.over = True
    assert times.take() == (0.002, 0.0, 1.0, 0.0, 0.0)
    for _ in range(MOST + 1):
        times.add(_Stretch(begin, end, False, 10))
    assert len(times._stretches) == MOST, "where nobody reads them, memory does not grow"


def test_layers_that_compile_do_not_count_and_those_with_windows_hardly() -> None:
    assert middle([(value, 1.0) for value in (6.0, 1.0, 1e3, 4.0, 0.0, 1e4, 0.0, 1.0, 5.0)]) == pytest.approx(17 / 5)
    assert middle([(1.0, 3.0), (9.0, 1.0)]) == 3.0 and middle([]) == 0.0


def _learners(measured: list[list[float]], pauses: Sequence[bool] = (False,) * 4) -> list[LayerTimes]:
    each = zip(measured, pauses)
    return [LayerTimes(len(measured), lambda model, one=one: Measured(*one), lambda no=no: no) for one, no in each]


def _meet(everyone: list[LayerTimes]) -> None:
    reports = np.stack([one.report(0) for one in everyone])
    for one in everyone:
        one.hear(0, reports)


def test_all_trainers_learn_each_ones_own_figure() -> None:
    everyone = _learners([[1e-6, 2e-6], [3e-6, 5e-6, 0.2], []])
    assert everyone[0].seconds(0) is None
    _meet(everyone)
    for one in everyone:  # a trainer without tokens is taken for the mean
        assert one.seconds(0) == pytest.approx([3e-6, 8e-6, 5.5e-6])
        assert one.seconds(0, backward=False) == pytest.approx([1e-6, 3e-6, 2e-6])
        assert one.seconds(1) is None  # another model


def test_speeds_are_learned_from_those_who_attend() -> None:
    """Each report counts 0.8 of the next, and by how much was attended; a tenth is never believed."""
    fast, slow, idle = [1.0, 1.0, 0.0, 6.0, 1.0], [1.0, 1.0, 0.0, 6.0, 0.5], [0.0, 0.0, 0.0, 1e-12, 1e9]
    everyone, nobody = _learners([fast, slow, idle, [*fast[:4], 0.0]]), _learners([idle] * 4)
    _meet(nobody)
    assert everyone[0].speeds(0).tolist() == nobody[0].speeds(0).tolist() == [1.0] * 4
    for share in (0.0, 1 / 1.25, 1.8 / 2.0, 2.44 / 2.6):
        _meet(everyone)
        found = np.array([1.0, 1 / (1 + share), 1.0, 1.0])
        assert all(one.speeds(0) == pytest.approx(0.9 * found + 0.1 * found.mean()) for one in everyone)
    assert everyone[0].speeds(1).tolist() == [1.0] * 4, "another model"
    slow[3] = 0.6
    _meet(everyone)
    found[1] = (0.8 * 6 * 2.6 + 0.6) / (0.8 * 6 * (2.6 + 2.44) + 1.2)  # little attention tells little
    assert everyone[0].speeds(0) == pytest.approx(0.9 * found + 0.1 * found.mean())
    slow[2] = 1.0
    _meet(everyone)
    assert everyone[0].speeds(0) is None, "where hosts set the pace"


def test_half_of_a_difference_is_made_up_for_at_once() -> None:
    measured = [0.0, 2e-6]
    everyone = _learners([measured] * 2)
    for measured[0], found in ((1e-6, 3e-6), (3e-6, 4e-6), (3e-6, 4.5e-6), (0.0, 4.5e-6)):
        _meet(everyone)
        assert everyone[0].seconds(0) == pytest.approx([found] * 2)


def test_where_gpus_wait_for_their_hosts_all_trainers_count_as_equally_fast() -> None:
    """Until they hardly have for some steps, or not at all for one in which anything ran: hosts differ by chance."""
    measured = [1e-6, 2e-6, 0.0]
    everyone = _learners([measured, [3e-6, 5e-6]])
    equal, own = [5.5e-6] * 2, [3e-6, 8e-6]
    for waits, found in ((10, equal), (1, equal), (1, own), (10, equal), (0, own), (5, equal), (None, equal)):
        measured[:] = [0.0] * 3 if waits is None else [1e-6, 2e-6, waits / 10]
        _meet(everyone)
        assert all(one.seconds(0) == pytest.approx(found) for one in everyone)


@pytest.fixture
def plans() -> Iterator[Plans]:
    """Of two trainers, who hear of each other's layers what the test tells them; attention costs pairs at first."""
    with closing(Session(CADConfig.from_dict({"granularity": 64}), torch.device("cpu"))) as session:
        session.plans.gatherer.agree = lambda value, subject: None  # type: ignore[method-assign]
        session.plans.crew = Crew(2, None, None, None)
        session.plans.learned = Learned(layer_times=LayerTimes(2, lambda model: Measured(), lambda: False))
        yield session.plans


IN_SECONDS = Profile("test", "test", (ShapeCost(SHAPE, pair=1e-12),), unit="seconds")


@pytest.mark.parametrize(("waited", "pace", "moves"), [(0, 1e-6, True), (1000, 1e-6, False), (1000, 1e-9, True)])
def test_hosts_that_set_the_pace(waited: int, pace: float, moves: bool, plans: Plans, caplog: Any) -> None:
    """There only uneven layers are made even. Of 6000 tokens; attention takes 36 and 18 microseconds."""
    caplog.set_level("INFO", "deepspeed_cad")
    learned = plans.learned.layer_times
    learned.hear(0, np.array([[0, pace * 5e11, pace * 5e11, waited, 0, 0]] * 2, np.int64))
    announced = [Announcement(segments_from_cumulative(cut, 6000)) for cut in ([0, 6000], [0, 3000, 6000])]
    plans.open(announced, {KEY: 1})
    assert not caplog.text, "pairs cannot be compared with seconds"
    plans.cost = IN_SECONDS
    known = plans.open(announced, {KEY: 1})
    one = SimpleNamespace(step=SimpleNamespace(length=[9]), of=[0], begin=np.zeros(1), end=np.full(1, 9))
    assert plans.step_costs(one, {KEY: 3}, 0).each == pytest.approx([3 * pace] * 2), "of both passes"
    learned.hear(0, np.array([[0, 1e6, 1e6, waited, 0, 0], [0, 2e7, 2e7, waited, 0, 0]], np.int64))
    for plans.turn, said in ((SETTLED - 1, 0), (SETTLED, not waited), (SETTLED, not waited)):
        plans.open(announced, {KEY: 1})
        assert caplog.text.count("rank 1 takes far longer than most outside attention") == said
    plan = known.planned[KEY, 0].plan
    assert ("GPUs wait for their hosts" in caplog.text) == bool(waited)
    assert plan.load_before == pytest.approx([3.6e-5, 1.8e-5], rel=1e-3)
    assert plan.load == pytest.approx([2.7e-5] * 2 if moves else plan.load_before, rel=0.06)


def test_in_place_a_slow_rank_gets_less_attention(plans: Plans) -> None:
    """Ranks of equal documents, of which the second attends at half the speed."""
    learned = plans.learned.layer_times
    for _ in range(30):
        learned.hear(0, np.array([[0, 0, 0, 0, 9, 1e6], [0, 0, 0, 0, 9, 5e5]], np.int64))
    announced = [Announcement(segments_from_cumulative([0, 6000], 6000))] * 2
    assert plans.open(announced, {KEY: 1}).speeds is None, "pairs are no seconds"
    plans.cost = IN_SECONDS
    opened, speeds = plans.open(announced, {KEY: 1}), learned.speeds(0)
    step = SimpleNamespace(step=SimpleNamespace(length=[9]), of=[0], begin=np.zeros(1), end=np.full(1, 9))
    dealt = plans.step_costs(step, {}, 0).speed  # type: ignore[arg-type]
    assert opened.speeds.tolist() == speeds.tolist() == dealt.tolist()
    plans.crew = Crew(2, servers=Servers(1, 1))
    assert plans.learned_speeds(0) is None, "servers tell nobody how long they attend"
    assert speeds == pytest.approx([0.975, 0.525], rel=1e-2)
    assert opened.planned[KEY, 0].plan.load == pytest.approx([4.8e-5] * 2, rel=0.05)


def test_deterministic_algorithms_on_any_trainer_mean_equal_shares() -> None:
    everyone = _learners([[1e-6, 2e-6, 0.0, 6.0, 1.0], [3e-6, 5e-6, 0.0, 6.0, 0.5]], [False, True])
    _meet(everyone)
    assert all(one.seconds(0) is None is one.speeds(0) for one in everyone)


@pytest.mark.parametrize("speeds", [None, [1.0, 0.5, 2.0]])
@pytest.mark.parametrize("linear", [None, [3e-6, 2e-6]])
def test_the_cut_knows_servers_layers_and_the_slowest_trainer(linear: Any, speeds: Any, plans: Plans) -> None:
    """For 2 trainers and 1 server, a nanosecond per pair."""
    speed, compared, plans.turn = np.array(speeds or [1.0] * 3), list[int](), 7
    plans.config = CADConfig.from_dict({"granularity": 64, "servers": {"reserved": 1}})
    plans.cost = Profile("test", "test", (ShapeCost(SHAPE, pair=1e-9),), unit="seconds")
    plans.gatherer.agree = lambda value, subject: compared.append(subject.index)  # type: ignore[method-assign]
    plans._speeds_at_start = speed if speeds else None
    plans.crew = Crew(2, None, None, plans._speeds_at_start, Servers(1, 1))
    heard = [[0, round(one * 1e12), one > 0, 0, 0, 0] for one in linear or [0, 0]]
    plans.learned.layer_times.hear(0, np.array(heard, np.int64))
    known = plans.open([Announcement(segments_from_cumulative([0, 6000], 6000)) for _ in range(2)], {KEY: 1})
    kinds = [PlanLayers(plans.cost.cost_for(SHAPE), None, 2)]
    layout = known.layout
    assert layout.ranks == 3 and len(known.ticks) == 2 and compared == [7]
    slowest, helpers = linear and max(linear), speed[:2].sum()
    expected = choose_interleaved_cut(layout, np.ones(3, np.int64), kinds, speed[2], slowest, helpers)
    assert expected is not None and known.ticks[0].query_tokens.tolist() == expected.tolist()
    for nano_batch in range(2):
        other = layout.tokens - known.ticks[nano_batch].query_tokens
        finish = known.planned[KEY, nano_batch].plan.load + np.array([*(linear or [0, 0]), 0.0]) * other
        assert finish.max() < 1.06 * finish.mean()
