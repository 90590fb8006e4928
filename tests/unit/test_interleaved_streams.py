"""Two nano-batches in turn beside a server, queued by the code that trainers and servers run, on streams with a clock:
whether the simulator, and so the plans, hide what really is hidden."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gpu_clock import Clock

from deepspeed_cad.attention.overlap import run_tasks
from deepspeed_cad.attention.setup import WavesOut
from deepspeed_cad.forecast.exchanges import Part, alternating_seconds
from deepspeed_cad.server.loop import ServedPass

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
    """What run_tasks and ServedPass ask of a call."""
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
    """Seconds of a pass."""
    clock = Clock()
    trainer = Trainer(clock, kind, one, serves)
    trainer.train(backward)
    serve_all(clock, kind, one, trainer.orders)
    return clock.run()


def simulated(one: Seconds, backward: bool) -> float:
    seconds = (np.full((2, 1), each) for each in (one.linear, one.own, one.served))
    part = Part(*seconds, (one.out, one.out), (one.back, one.back), one.waves)
    return alternating_seconds([part, part], LAYERS, 0.5, backward)


@pytest.fixture(autouse=True)
def waves_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepspeed_cad.forecast.exchanges.WAVE_SECONDS", 0.0)


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
