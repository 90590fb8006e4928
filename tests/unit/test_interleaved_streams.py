"""Two nano-batches in turn beside a server: what plans take for hidden is what the simulator's rounds hide, and these
hide what the code that trainers and servers run hides, on streams with a clock."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gpu_clock import Clock
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_cad.ahead.crew import Crew, Servers
from deepspeed_cad.ahead.plan import Gathered
from deepspeed_cad.attention.microbatch import PlanKey
from deepspeed_cad.attention.overlap import run_tasks
from deepspeed_cad.attention.setup import WavesOut
from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADError
from deepspeed_cad.forecast.attention import Part, alternating_seconds
from deepspeed_cad.layout import Layout
from deepspeed_cad.planner import HeadShape
from deepspeed_cad.planner.constants import WAVES_IN_TURN
from deepspeed_cad.planner.finish import Routes, Trip, alternate, end_of_pass
from deepspeed_cad.planner.plan import Alternation
from deepspeed_cad.profiles.profile import Profile, ShapeCost
from deepspeed_cad.server.loop import ServedPass
from deepspeed_cad.session import Session

LAYERS = 12
Call = tuple[int, int]
"""Part and layer."""


@dataclass(frozen=True)
class Seconds:
    """Of one layer of each of two equal parts."""

    linear: float
    own: float
    served: float
    out: float
    back: float
    waves: int = 1


class Transport:
    """Exchanges of a trainer and a server, as streams see them.

    Each way has a stream of its own on each rank. "messages": ranks meet on it. "copies": who has nothing to send is
    done at once, and whoever waits for an exchange waits for both ranks to have come to it, itself included.
    """

    two_ways = True

    def __init__(self, clock: Clock, kind: str, rank: str, one: Seconds) -> None:
        self.clock, self.kind, self.rank, self.one = clock, kind, rank, one

    def start(self, way: str, call: Call, wave: int) -> Any:
        """Begin an exchange behind what the current stream has to do; gives what waits for it."""
        clock, before = self.clock, self.clock.mark()
        seconds = (self.one.out if way == "out" else self.one.back) / self.one.waves
        key = (way, *call, wave)
        stream, sent, expected = (self.rank, way), ("meet", key), [key]
        if self.kind == "copies":
            sent, expected = ("send", (key, self.rank)), [(key, rank) for rank in ("trainer", "server")]
            seconds *= self.rank == ("trainer" if way == "out" else "server")
        clock.add(stream, "await", before)
        clock.add(stream, *sent, seconds)

        def wait() -> list[int]:
            for moment in expected:
                clock.add(clock.current, "await", moment)
            return [wave]

        return SimpleNamespace(wait=wait)


def make_setup(transport: Transport, call: Call, serves: bool) -> Any:
    shares = transport.one.waves + 1
    return SimpleNamespace(
        span=lambda *_, **__: nullcontext(), label=f"part {call[0]}, layer {call[1]}", turn=0, aside=None, gain=None,
        device=None, counts=SimpleNamespace(waits=SimpleNamespace(timed=lambda *_: nullcontext())),
        modes=SimpleNamespace(local_first=True), transport=transport,
        give_back=lambda wave, fields, backward=False: transport.start("back", call, wave),
        schedule=SimpleNamespace(
            local=((transport.one.own / shares,),) * shares, all_local=(transport.one.own,), serves=serves
        ),
    )  # fmt: skip


def make_out(transport: Transport, call: Call) -> WavesOut:
    return WavesOut(transport.one.waves, lambda wave: transport.start("out", call, wave), [])


class Trainer:
    """Queues layers of both parts; tells the order of exchanges, which is what a server is told."""

    def __init__(self, clock: Clock, kind: str, one: Seconds, serves: bool) -> None:
        self.clock, self.one, self.serves = clock, one, serves
        self.transport = Transport(clock, kind, "trainer", one)
        self.orders: list[tuple[str, Call, int]] = []
        start = self.transport.start

        def told(way: str, call: Call, wave: int) -> Any:
            self.orders.append((way, call, wave))
            return start(way, call, wave)

        self.transport.start = told  # type: ignore[method-assign]
        self._out: dict[Call, WavesOut] = {}
        self._back: dict[Call, tuple[Any, Any]] = {}

    def linear(self, share: float) -> None:
        self.clock.add("trainer", "work", "trainer", share * self.one.linear)

    def dispatch(self, call: Call) -> None:
        self._out[call] = make_out(self.transport, call)
        self._out[call].begin()

    def attend(self, call: Call) -> None:
        setup = make_setup(self.transport, call, self.serves)

        def run(batches: tuple[float, ...]) -> None:
            self.clock.add("trainer", "work", "trainer", sum(batches))

        def serve(wave: int, arrived: list[Any]) -> tuple[None, Any]:
            return None, setup.give_back(wave, [])

        self._back[call] = run_tasks(setup, self._out.pop(call), run, serve)[1], setup

    def collect(self, call: Call) -> None:
        back, setup = self._back.pop(call)
        back.finish(setup)

    def train(self, backward: bool) -> None:
        """All layers of one pass, as nano-batches hand over (docs/interleave.md)."""
        self.clock.current = "trainer"
        order = (1, 0) if backward else (0, 1)
        for part in order:
            self.linear(0.5)
            self.dispatch((part, 0))
            if backward:
                self.attend((part, 0))
        for layer in range(LAYERS):
            for part in order:
                if not backward:
                    self.attend((part, layer))
                self.collect((part, layer))
                last = layer == LAYERS - 1
                self.linear(0.5 if last else 1.0)
                if not last:
                    self.dispatch((part, layer + 1))
                    if backward:
                        self.attend((part, layer + 1))


def serve_all(clock: Clock, kind: str, one: Seconds, orders: list[tuple[str, Call, int]]) -> None:
    """A server's side: a stream for each part, on which it follows orders."""
    transport, passes = Transport(clock, kind, "server", one), dict[Call, ServedPass]()

    def serve(wave: int, arrived: list[Any]) -> list[Any]:
        clock.add(clock.current, "work", "server", one.served / one.waves)
        return []

    for way, call, wave in orders:
        clock.current = ("server", call[0])
        if call not in passes:
            passes[call] = ServedPass(make_setup(transport, call, True), False, make_out(transport, call), serve)
        (passes[call].dispatch if way == "out" else passes[call].give_back)(wave)


def on_streams(kind: str, one: Seconds, backward: bool, serves: bool = False) -> float:
    clock = Clock()
    trainer = Trainer(clock, kind, one, serves)
    trainer.train(backward)
    serve_all(clock, kind, one, trainer.orders)
    return clock.run()


def simulated(one: Seconds, backward: bool, layers: int = LAYERS) -> float:
    seconds = (np.full((2, 1), each) for each in (one.linear, one.own, one.served))
    part = Part(*seconds, (one.out, one.out), (one.back, one.back), one.waves)
    return alternating_seconds([part, part], layers, 0.5, backward)


@pytest.fixture(autouse=True)
def waves_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepspeed_cad.forecast.attention.WAVE_SECONDS", 0.0)


EVEN = Seconds(linear=0.6, own=0.4, served=1.0, out=0.0, back=0.0)
CASES = [
    EVEN,
    replace(EVEN, out=0.15, back=0.1),
    replace(EVEN, out=0.25, back=0.15, waves=2),
    # 0.7 out and back beside 0.4 of own tasks: what is not hidden shows in both.
    replace(EVEN, out=0.4, back=0.3),
    replace(EVEN, out=0.5, back=0.4, waves=2),
    Seconds(linear=0.2, own=0.6, served=1.5, out=0.1, back=0.1),
    Seconds(linear=1.0, own=0.5, served=0.7, out=0.3, back=0.2),
]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("one", CASES)
@pytest.mark.parametrize("kind", ["messages", "copies"])
def test_it_takes_what_is_foreseen(kind: str, one: Seconds, backward: bool) -> None:
    assert on_streams(kind, one, backward) == pytest.approx(simulated(one, backward), rel=0.02)


def test_who_serves_nothing_waits_for_no_dispatch_before_its_tasks() -> None:
    """A trainer that serves others has to, with a share of its tasks between: these hide less of what comes home."""
    one = Seconds(linear=0.20, own=0.07, served=0.18, out=0.066, back=0.044, waves=2)
    assert on_streams("messages", one, True) == pytest.approx(simulated(one, True), rel=0.02)
    assert on_streams("messages", one, True, serves=True) > 1.05 * simulated(one, True)


SERVER = np.array([False, True])
SHAPE = HeadShape(8, 2, 64, 64, 2)


def end_of_tick(one: Seconds) -> float:
    """By the planner's model, beside a tick that is like it: when the last of a trainer and a server is done."""
    there, home = np.zeros((2, 2)), np.zeros((2, 2))
    there[0], home[0] = [one.out, 0.0], [one.back, 0.0]
    routes = Routes(np.array([0]), np.array([1]), np.array([0]), np.full(2, float(one.waves)))
    trips = (Trip(x, x[:, ::-1], np.array([True])) for x in (there, home))
    turns = Alternation(SERVER, max(one.linear + one.own, one.served) - one.linear)
    done = end_of_pass(
        routes, *trips, np.array([one.own, one.served]), np.array([0.0, one.served]), np.array([one.linear, 0.0]), turns
    )  # fmt: skip
    return float(done.max())


@settings(max_examples=80)
@given(*(st.floats(lowest, 2.0) for lowest in (0.1, 0.0, 0.1)), st.booleans(), st.sampled_from(WAVES_IN_TURN))
@pytest.mark.parametrize("trip", [(0.0, 0.0), (0.02, 0.01), (0.3, 0.2), (0.6, 0.9)])
def test_what_is_hidden_in_the_plan_is_hidden_in_the_round(
    trip: tuple[float, float], linear: float, own: float, served: float, backward: bool, waves: int
) -> None:
    """A tick that the planner takes to end with its work costs a round nothing more."""
    one, work = Seconds(linear, own, served, *trip, waves), max(linear + own, served)
    found = end_of_tick(one)
    took = (simulated(one, backward, 41) - simulated(one, backward, 40)) / 2
    # Where both have nearly as much to do, it takes more than 40 layers until the one with more is never idle.
    either = min(linear + own, served)
    assert took >= (either if (60 * (work - either) < linear + own + served + sum(trip)) else work) - 1e-9
    if found <= work + 1e-9:
        assert took <= work + 1e-9
    # Half a round takes no longer than the planner takes the tick for.
    assert took <= found + 1e-9


def test_how_late_results_may_come() -> None:
    # Of 3 of work a server does 2 while the trainer does 1 after 1 of linear layers: the other tick ends after 2.
    assert alternate(3.0, np.array([1.0, 0.0]), np.ones(2), SERVER).later == pytest.approx(1.0)
    # Trainers that attend nothing: what linear layers take is all of the other tick, those of the slowest at least.
    only_server = np.array([0.0, 0.0, 1.0]), np.array([False, False, True])
    assert alternate(1.0, np.array([4.0, 3.0, 0.0]), *only_server).later == 0.0
    assert alternate(6.0, np.array([4.0, 3.0, 0.0]), *only_server).later == 2.0


@pytest.fixture
def session() -> Iterator[Session]:
    """Planning for a trainer and a server on links of 1 GB/s, a nanosecond per pair."""
    opened = Session(CADConfig.from_dict({"granularity": 64}), torch.device("cpu"))
    opened.plans.cost = Profile("test", "test", (ShapeCost(SHAPE, pair=1e-9),), unit="seconds", inside=1e9, between=1e9)
    opened.plans.crew = Crew(1, None, None, None, Servers(1, 1))
    yield opened
    opened.close()


@pytest.mark.parametrize(("waves", "chosen"), [("auto", 2), (1, 1), (4, 4)])
def test_plans_beside_servers_choose_waves(session: Session, waves: str | int, chosen: int) -> None:
    plans = session.plans
    plans.config = replace(plans.config, waves=waves, overlap="interleave")
    transport: Any = SimpleNamespace(most_waves=8, two_ways=True, close=lambda: None, bytes_sent=0, landing_bytes=0)
    crew = plans.crew = replace(plans.crew, transport=transport)
    gathered = Gathered(0, Layout.from_rank_lengths([[8192]]), np.array([4864]), np.array([1e-6]), None)
    for tick in crew.widen(gathered.layout).cut(np.array([4864, 0])):
        assert plans.plan_tick(gathered, crew, tick, PlanKey(None, SHAPE)).waves == chosen
        # Without another tick nobody knows how late results may come.
        alone = replace(gathered, cut=None)
        assert plans.plan_tick(alone, crew, tick, PlanKey(None, SHAPE)).waves == (1 if waves == "auto" else waves)


class Logged:
    two_ways = False

    def __init__(self, waves: int) -> None:
        self.one, self.events = replace(EVEN, waves=waves), list[tuple[str, int]]()

    def start(self, way: str, call: Call, wave: int) -> Any:
        starts, ends = ("dispatch", "arrived") if way == "out" else ("return", "placed")
        self.events.append((starts, wave))
        return SimpleNamespace(wait=lambda: self.events.append((ends, wave)) or [wave])  # type: ignore[func-returns-value]


def trainer_events(waves: int) -> list[tuple[str, int]]:
    transport: Any = Logged(waves)
    setup, under_way = make_setup(transport, (0, 3), True), make_out(transport, (0, 3))
    under_way.begin()

    def serve(wave: int, arrived: list) -> Any:
        transport.events.append(("served", wave))
        return None, setup.give_back(wave, [])

    run_tasks(setup, under_way, lambda batches: None, serve)[1].finish(setup)
    return transport.events


def server(transport: Any) -> ServedPass:
    def serve(wave: int, arrived: list) -> list:
        assert arrived == [wave]
        transport.events.append(("served", wave))
        return []

    return ServedPass(make_setup(transport, (0, 3), True), False, make_out(transport, (0, 3)), serve)


@pytest.mark.parametrize("waves", [1, 2, 3, 7])
def test_a_server_does_as_trainers_do(waves: int) -> None:
    """Trainers' exchanges are its orders; between them it serves and waits where they do."""
    expected, transport = trainer_events(waves), Logged(waves)
    one = server(transport)
    for what, wave in expected:
        assert not one.is_over or what == "placed"
        if what == "dispatch":
            one.dispatch(wave)
        elif what == "return":
            one.give_back(wave)
    assert one.is_over and transport.events == expected


@pytest.mark.parametrize("orders, says", [
    ([("dispatch", 1)], "to dispatch wave 1, where wave 0 of 4"),
    ([("dispatch", 0), ("dispatch", 0)], "to dispatch wave 0, where wave 1 of 4"),
    ([("dispatch", 0), ("give_back", 0)], "to return wave 0 before it was served"),
    ([("dispatch", 0), ("dispatch", 1), ("give_back", 1)], "to return wave 1, where wave 0 of 4"),
    ([("dispatch", 0), ("dispatch", 1), ("give_back", 0), ("give_back", 1)], "to return wave 1 before it was"),
    ([("dispatch", wave) for wave in range(5)], "to dispatch wave 2 before wave 0 was returned"),
])  # fmt: skip
def test_orders_in_another_order(orders: list[tuple[str, int]], says: str) -> None:
    one = server(Logged(4))
    with pytest.raises(CADError, match=f"the forward of part 0, layer 3 in micro-batch 0.*{says}"):
        for what, wave in orders:
            getattr(one, what)(wave)
