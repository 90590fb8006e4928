"""Landing areas are never written before they were read: whole ticks in waves on GPUs whose streams run in any order.

Streams here are queues. Ranks queue what the `nvlink` transport and attention/overlap.py make of a tick; then heads of
queues run in random order, each as soon as what it waits for happened. What came home says whether all was in time.
"""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import cases
import numpy as np
import pytest
import torch
from test_exchange_mixed import CPU, Network, landing_transport, network  # noqa: F401
from test_exchange_tables import calls  # noqa: F401

from deepspeed_cad.attention.overlap import run_tasks
from deepspeed_cad.attention.setup import WavesOut
from deepspeed_cad.errors import CADError
from deepspeed_cad.exchange import landed
from deepspeed_cad.exchange.failure.identity import Moment
from deepspeed_cad.exchange.landed import LandingTransport
from deepspeed_cad.exchange.placement import place
from deepspeed_cad.exchange.transport import Outgoing, Returning
from deepspeed_cad.layout import Layout, Tick
from deepspeed_cad.schedule import KEY, QUERY, Schedule
from deepspeed_cad.schedule.waves import OUT, Cut, Room, schedule_waves
from deepspeed_cad.server.loop import ServedPass

GROUPS = 3


class Gpus:
    """Queues of all streams of all ranks; one stream is current."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.current = Stream(self)

    def run(self, seed: int) -> None:
        """Run everything, in some order."""
        rng = random.Random(seed)
        # Some streams are much slower than others: that is where memory is overwritten too early.
        speed = {id(one): rng.choice((1, 30)) for one in self.streams}
        while any(one.queue for one in self.streams):
            ready = [one for one in self.streams if one.queue and one.queue[0][0]()]
            assert ready, "every stream waits for another one"
            one = rng.choices(ready, [speed[id(x)] for x in ready])[0]
            one.queue.popleft()[1]()


class Stream:
    def __init__(self, gpus: Gpus) -> None:
        self.queue, self.cuda_stream = deque[tuple[Callable[[], bool], Callable[[], None]]](), len(gpus.streams)
        gpus.streams.append(self)

    def add(self, do: Callable[[], None], ready: Callable[[], bool] = lambda: True) -> None:
        self.queue.append((ready, do))

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        number = event.recorded
        self.add(lambda: None, lambda: event.over >= number)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        assert not self.queue


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.recorded = self.over = 0

    def record(self, stream: Stream) -> None:
        self.recorded += 1
        number = self.recorded

        def happen() -> None:
            self.over = number

        stream.add(happen)


class Calls:
    def __init__(self, gpus: Gpus) -> None:
        self.gpus = gpus

    def push(self, stream: int, peers: Any, begin: Any, slices: Any, fields: Any, flags: Any, value: int, *name: Any):
        own = self.gpus.streams[stream]
        fields = fields.copy()  # as the C++ call reads it when it is queued

        def copy(row: Any, field: Any, peer: int) -> None:
            kind, source, row_stride, group_stride, width = field[:5].tolist()
            if kind == row[0]:
                for n in range(row[4]):
                    at = source + (row[1] + n) * row_stride + row[2] * group_stride
                    ctypes.memmove(int(field[5 + peer]) + int(row[3] + n) * width, int(at), width)

        for step, peer in enumerate(peers.tolist()):
            for row in slices[begin[step] : begin[step + 1]].tolist():
                for field in fields:
                    own.add(lambda row=row, field=field, peer=peer: copy(row, field, peer))
            at = ctypes.c_uint32.from_address(int(flags[peer]))
            own.add(lambda at=at: setattr(at, "value", value))

    def wait(self, stream: int, flags: Any, value: int) -> None:
        at = [ctypes.c_uint32.from_address(int(flag)) for flag in flags]
        # As cuStreamWaitValue32 does: by the nearer way round.
        self.gpus.streams[stream].add(
            lambda: None, lambda: all((one.value - value) % (1 << 32) < 1 << 31 for one in at)
        )


@pytest.fixture()
def gpus(network: Network, monkeypatch: pytest.MonkeyPatch) -> Gpus:  # noqa: F811
    found = Gpus()

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, found.current = found.current, stream
        yield
        found.current = before

    def placing(*given: Any) -> None:
        found.current.add(lambda: place(*given))

    for name, value in (
        ("Stream", lambda *_, **__: Stream(found)), ("Event", Event), ("current_stream", lambda *_: found.current),
        ("stream", on),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(landed, "CudaCalls", lambda: Calls(found))
    monkeypatch.setattr(landed, "place", placing)
    return found


Serve = Callable[[int, list[torch.Tensor]], list[Returning]]


def as_trainer(setup: Any, out: WavesOut, serve: Serve) -> Iterator[None]:
    """A rank that has tasks of its own and leads; in three steps, between which another nano-batch may run."""
    out.begin()
    yield
    _, back = run_tasks(
        setup, out, lambda batches: None, lambda wave, arrived: (None, setup.give_back(wave, serve(wave, arrived)))
    )
    yield
    back.finish(setup)


def as_server(setup: Any, out: WavesOut, serve: Serve) -> Iterator[None]:
    """A reserved one, which is told of each exchange, in the same steps."""
    one = ServedPass(setup, False, out, serve)
    for wave in range(min(out.count, OUT)):
        one.dispatch(wave)
    yield
    for wave in range(out.count):
        one.give_back(wave)
        if out.started < out.count:
            one.dispatch(out.started)
    yield


def queue_tick(
    gpus: Gpus, transport: LandingTransport, parts: tuple[Schedule, ...], aside: Stream | None, turn: int, seed: int,
    play: Callable[..., Iterator[None]], nano_batch: int = 0,
) -> tuple[Iterator[None], Callable[[], None]]:  # fmt: skip
    """A tick of one rank: servers send back twice what arrived. Gives the steps that queue it, and a check for the
    end."""
    rng = torch.Generator().manual_seed(seed * 100 + transport.rank)
    schedule = parts[0]
    q = torch.randn(schedule.query_tokens, GROUPS, 4, generator=rng)
    k = torch.randn(schedule.key_tokens, GROUPS, 2, generator=rng)
    target, sums = torch.zeros_like(q), torch.zeros_like(k)
    moved = [torch.zeros_like(x, dtype=torch.int64) for x in (q, k)]
    for part in parts:
        for kind, count in zip((QUERY, KEY), moved, strict=True):
            index = torch.from_numpy(part.home_index(np.concatenate([part.sends, part.own]), kind))
            rows = count.view(-1, count.shape[2])
            rows.index_add_(0, index, torch.ones_like(rows[index]))
    sent = [Outgoing(QUERY, q), Outgoing(KEY, k)]
    out = WavesOut(
        len(parts), lambda wave: transport.dispatch(parts[wave], sent, nano_batch, Moment(turn, wave=wave)), sent
    )

    def serve(wave: int, arrived: list[torch.Tensor]) -> list[Returning]:
        made = [torch.full_like(x, float("nan")) for x in arrived]
        for x, y in zip(arrived, made, strict=True):
            gpus.current.add(lambda x=x, y=y: y.copy_(2 * x))
        return [Returning(QUERY, made[0], target), Returning(KEY, made[1], sums, add=True)]

    def give_back(wave: int, fields: list[Returning], backward: bool = False) -> Any:
        return transport.give_back(parts[wave], fields, nano_batch, Moment(turn, wave=wave))

    waits = SimpleNamespace(timed=lambda *_: nullcontext(), beside=lambda *_: None)
    setup: Any = SimpleNamespace(
        aside=aside, device=CPU, gain=None, transport=transport,
        schedule=SimpleNamespace(
            local=[()] * (len(parts) + 1), all_local=(),
            serves=any(part.served_rows[transport.rank].any() for part in parts),
        ),
        span=lambda *_, **__: nullcontext(), counts=SimpleNamespace(waits=waits),
        modes=SimpleNamespace(local_first=bool(seed % 2)), give_back=give_back, label="a layer", turn=turn,
    )  # fmt: skip

    def check() -> None:
        assert torch.equal(target, torch.where(moved[0] > 0, 2 * q, 0.0)), f"rank {transport.rank}, tick {turn}"
        torch.testing.assert_close(sums, 2 * k * moved[1], rtol=1e-5, atol=1e-5)

    return play(setup, out, serve), check


def _tasks(tick: Tick, rng: np.random.Generator, servers: int, turn: int) -> np.ndarray:
    """Of any ranks; beside servers, in two ticks of three, of servers alone, so that trainers serve nothing."""
    tasks = cases.random_tasks(tick, GROUPS, rng)
    if servers and turn % 3:
        tasks[:, 5] = 3 - servers + rng.integers(servers, size=len(tasks))
    return tasks


def finish_first(gpus: Gpus, under_way: deque[tuple[Stream, Iterator[None]]]) -> None:
    gpus.current, steps = under_way.popleft()
    deque(steps, maxlen=0)


def run_ticks(
    gpus: Gpus, waves: list[int], two_streams: bool, seed: int, servers: int = 0,
    transports: list[LandingTransport] | None = None, nano_batches: int = 1,
) -> None:  # fmt: skip
    """`servers`: of the three ranks, the last ones, which have a stream for each nano-batch. `transports`: those of
    earlier ticks. `nano_batches`: how many are under way at a time."""
    tick = Layout.from_rank_lengths([[40, 9], [17, 8, 3], [30]][: 3 - servers] + [[]] * servers).tick()
    transports = transports or [landing_transport(rank, 3) for rank in range(3)]
    rng, checks = np.random.default_rng(seed), []
    tasks = [_tasks(tick, rng, servers, turn) for turn in range(len(waves))]
    for rank, transport in enumerate(transports):
        serves = rank >= 3 - servers
        streams, aside = [Stream(gpus) for _ in range(nano_batches if serves else 1)], Stream(gpus)
        cuts = [Cut(count, 2 * (seed % 2), 4) for count in waves]
        plans = [schedule_waves(tick, one, rank, GROUPS, None, cut) for one, cut in zip(tasks, cuts)]
        for turn, parts in enumerate(plans):
            transport.make_room(parts, Room(0, (16, 8), (16, 8)), turn % nano_batches)
        under_way = deque[tuple[Stream, Iterator[None]]]()
        for turn, parts in enumerate(plans):
            # A part goes on when the other one is on its way.
            if len(under_way) == nano_batches:
                finish_first(gpus, under_way)
            gpus.current = streams[turn % len(streams)]
            steps, check = queue_tick(
                gpus, transport, parts, aside if two_streams else None, turn, seed,
                as_server if serves else as_trainer, turn % nano_batches,
            )  # fmt: skip
            next(steps)
            under_way.append((gpus.current, steps))
            checks.append(check)
        while under_way:
            finish_first(gpus, under_way)
    gpus.run(seed)
    for check in checks:
        check()


WAVES = [6, 1, 2, 4, 3, 1, 7]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("two_streams, servers, nano_batches, apart", [
    (True, 0, 1, False), (False, 0, 1, False), (False, 1, 1, True), (False, 2, 1, True), (False, 0, 2, False),
    (False, 1, 2, False), (False, 0, 2, True), (False, 1, 2, True), (False, 2, 2, True),
])  # fmt: skip
def test_nothing_lands_on_what_is_still_read(
    gpus: Gpus, two_streams: bool, servers: int, nano_batches: int, apart: bool, seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Ticks of one wave, of few and of many follow each other on the same memory. `apart`: each way has a stream and
    flags of its own, as beside reserved servers."""
    monkeypatch.setattr(landed, "has_ways_apart", lambda *_: apart)
    run_ticks(gpus, WAVES, two_streams, seed, servers, nano_batches=nano_batches)


def count_from(transports: list[LandingTransport], pushed: int, exchanges: int) -> None:
    """As after so many exchanges of these transports, and of all that there were; nothing is under way."""
    for transport in transports:
        transport._pushed, transport.exchanges = pushed, exchanges
        flags = transport._flags.tensor[: landed.FLAG_BYTES * transport.ranks].view(torch.int32)
        flags.fill_((pushed + (1 << 31)) % (1 << 32) - (1 << 31))


@pytest.mark.parametrize("pushed, exchanges", [
    ((1 << 31) - 9, (1 << 31) - 9), ((1 << 32) - 9, (1 << 32) - 9), (0, (1 << 31) + 9),
], ids=["half a round", "a round", "new flags where servers changed"])  # fmt: skip
def test_nor_when_flags_come_round(gpus: Gpus, pushed: int, exchanges: int) -> None:
    """Nor in a lane that rested for half a round: what landed there last lies so far behind that it seems ahead."""
    transports = [landing_transport(rank, 3) for rank in range(3)]
    count_from(transports, pushed, exchanges)
    run_ticks(gpus, WAVES, True, 1, transports=transports)
    assert transports[0].exchanges > exchanges + 40
    rested = transports[0].exchanges + (1 << 31)
    count_from(transports, rested, rested)
    run_ticks(gpus, [6, 1, 2], True, 2, transports=transports)


def test_a_return_that_nobody_waited_for_is_refused(gpus: Gpus) -> None:
    tick = Layout.from_rank_lengths([[8]]).tick()
    transport = landing_transport(0, 1)
    (plan,) = schedule_waves(tick, np.array([(0, 0, 8, 0, GROUPS, 0)]), 0, GROUPS, None, Cut())
    for wave in range(3):
        transport.dispatch(plan, [], 0, Moment(wave=wave))
        transport.give_back(plan, [], 0, Moment(wave=wave))
    with pytest.raises(CADError, match="starts before the return of exchange 2 on it was waited for"):
        transport.dispatch(plan, [], 0, Moment(wave=3))
