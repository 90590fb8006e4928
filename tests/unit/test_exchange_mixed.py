"""The mixed transport on the CPU: which slice goes which way, and whole exchanges of all ranks in one process.

Peer copies run in C++ over the stand-in driver; messages are delivered as NCCL pairs them, the n-th send from one rank
to another with the n-th receive there.
"""

from __future__ import annotations

import ctypes
import gc
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import test_streams
import torch
import torch.distributed as dist
from check_transports import LANES, Round, make_schedules
from test_exchange_tables import calls  # noqa: F401
from test_roll_call import on_ranks
from test_streams import Stream

from deepspeed_cad.errors import CADError, CADPeerError
from deepspeed_cad.exchange import landed, landing, nccl, packed
from deepspeed_cad.exchange.failure import watchdog
from deepspeed_cad.exchange.failure.identity import Identity
from deepspeed_cad.exchange.failure.watchdog import Alarm
from deepspeed_cad.exchange.group import OwnGroup, PeerGroup, make_group
from deepspeed_cad.exchange.landed import LandingTransport
from deepspeed_cad.exchange.native_calls import CudaCalls, Table
from deepspeed_cad.exchange.nccl import NcclTransport
from deepspeed_cad.exchange.packed import Collectives, GroupTransport
from deepspeed_cad.exchange.placement import take
from deepspeed_cad.exchange.transport import Transport
from deepspeed_cad.exchange.waits import Transfers
from deepspeed_cad.schedule.waves import Room

CPU = torch.device("cpu")


class Event(test_streams.Event):
    def elapsed_time(self, other: test_streams.Event) -> float:
        return 2.0 + super().elapsed_time(other)


class Network:
    """Messages under way between all ranks, and the memory that neighbours share."""

    def __init__(self) -> None:
        self.sends: dict[tuple[int, int], list[Table]] = defaultdict(list)
        self.receives: dict[tuple[int, int], list[Table]] = defaultdict(list)
        self.memory: dict[tuple[object, int], list[torch.Tensor]] = {}
        self.made: dict[tuple[object, int], int] = defaultdict(int)
        self.delivered = 0
        self.joined: list[Messages] = []
        self.asked: dict[int, list[object]] = defaultdict(list)
        """Streams that the allocator was told of, by address."""

    def deliver(self) -> None:
        assert self.sends.keys() == self.receives.keys()
        for pair, sends in self.sends.items():
            for (_, _, source, size), (_, _, target, room) in zip(sends, self.receives[pair], strict=True):
                assert size == room
                ctypes.memmove(int(target), int(source), int(size))
                self.delivered += int(size)
        self.sends.clear()
        self.receives.clear()


@dataclass
class Messages:
    network: Network
    rank: int
    left: bool = False

    def __post_init__(self) -> None:
        self.network.joined.append(self)

    def exchange(self, stream: int, table: Table) -> None:
        assert table.dtype == np.int64 and table.flags.c_contiguous and not self.left
        for message in table:
            peer = int(message[1])
            if message[0]:
                self.network.sends[self.rank, peer].append(message)
            else:
                self.network.receives[peer, self.rank].append(message)

    def leave(self) -> None:
        self.left = True


@pytest.fixture()
def network(monkeypatch: pytest.MonkeyPatch, calls: CudaCalls) -> Iterator[Network]:  # noqa: F811
    """No CUDA: streams that are never behind, memory shared inside the process."""
    gc.freeze()
    network, current = Network(), Stream()

    class Shared:
        """Stands in for SymmetricBuffer: the first member that makes it makes it for all."""

        def __init__(self, size: int, peers: PeerGroup) -> None:
            whose = tuple(peers.members)
            count = network.made[whose, peers.place]
            network.made[whose, peers.place] += 1
            if (whose, count) not in network.memory:
                network.memory[whose, count] = [torch.zeros(size, dtype=torch.uint8) for _ in whose]
            parts = network.memory[whose, count]
            assert len(parts[0]) == size, "members make memory of different sizes"
            self.tensor, self.addresses = parts[peers.place], np.array([part.data_ptr() for part in parts], np.int64)

    def group_of(group: SimpleNamespace, near: list[int]) -> PeerGroup:
        members = np.flatnonzero(np.array(near) == near[group.rank])
        return PeerGroup(members, int(np.searchsorted(members, group.rank)), "host")

    for name, value in (
        ("Stream", lambda *_, **__: Stream()), ("Event", Event), ("current_stream", lambda *_: current),
        ("device", lambda _: nullcontext()), ("stream", lambda _: nullcontext()), ("synchronize", lambda *_: None),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: network.asked[x.data_ptr()].append(stream))
    monkeypatch.setattr(dist, "get_world_size", lambda group: group.size)
    # Symmetric memory looks groups up by name; here all ranks of one are in this process.
    monkeypatch.setattr(dist.distributed_c10d, "_register_process_group", lambda *_: None)
    # No thread: events here are over before messages are delivered. What is compared, is when a transport closes.
    monkeypatch.setattr(watchdog, "start_daemon", lambda *_: SimpleNamespace(join=lambda timeout: None))
    for room in (landing, landed):
        monkeypatch.setattr(room, "make_buffers", lambda sizes, peers, *_: [Shared(size, peers) for size in sizes])
    monkeypatch.setattr(landed, "CudaCalls", lambda: calls)
    monkeypatch.setattr(landed, "find_peers", lambda group, alarm, near: group_of(group, near or [0] * group.size))
    monkeypatch.setattr(landed, "open_store", lambda group, what: None)
    monkeypatch.setattr(nccl, "join_ranks", lambda group, device, alarm: Messages(network, group.rank))
    monkeypatch.setattr(dist, "get_rank", lambda group: group.rank)
    yield network
    # What a test leaves under way tells the allocator of stand-ins: that has to be over while torch's own is away.
    gc.collect()
    gc.unfreeze()


def group(rank: int, size: int) -> dist.ProcessGroup:
    return SimpleNamespace(rank=rank, size=size)  # type: ignore[return-value]


def landing_transport(rank: int, ranks: int, near: Any = None, timeout_s: float = 300.0) -> LandingTransport:
    return LandingTransport(group(rank, ranks), CPU, Alarm(rank, None, timeout_s), near)


def collectives(ranks: int, kind: type[GroupTransport] = Collectives, timeout_s: float = 300.0) -> list[GroupTransport]:
    """Transports of all ranks, over gloo."""
    store, alarms = dist.HashStore(), [Alarm(rank, None, timeout_s) for rank in range(ranks)]
    groups = on_ranks(lambda rank: make_group(store, rank, ranks, CPU, "own", 60.0), ranks)
    return [kind(one, CPU, alarm) for one, alarm in zip(groups, alarms, strict=True)]


def run_rounds(transports: list[Transport], network: Network, rounds: int) -> list[int]:
    """Rounds as check_transports.check_transport has them, and the end; bytes sent by each rank."""
    ranks = len(transports)
    for step in range(rounds):
        plans = make_schedules(ranks, step, (100, 400, 200)[step % 3])
        both = [
            [Round(plans, rank, step + 100 * at, lane[0], CPU, lane[1]) for at, lane in enumerate(LANES)]
            for rank in range(ranks)
        ]
        for phase in ("start", "serve", "collect"):
            for rank, transport in enumerate(transports):
                for one in both[rank]:
                    getattr(one, phase)(*([] if phase == "collect" else [transport]))
            network.deliver()
        assert not sum(int(wrong) for several in both for one in several for wrong in one.wrong)
        for one in (one for several in both for one in several):
            assert ["the dispatch" in str(x.parcel.identity) for x in (one.out, one.back)] == [True, False]
    for transport in transports:
        transport.close()
    return [transport.bytes_sent for transport in transports]


@pytest.mark.parametrize("near", [[0, 0, 2, 2], [0, 1, 0, 1], [0, 1, 1, 3, 3], [0, 0]], ids=str)
def test_whole_exchanges_of_all_ranks(near: list[int], network: Network) -> None:
    """`near`: equal numbers are ranks that reach each other's memory."""
    ranks = len(near)
    transports = [landing_transport(rank, ranks, near=near) for rank in range(ranks)]
    for rank, transport in enumerate(transports):
        transport.transfers = Transfers(rank, near, 1e6, 1e-6)
    sent = run_rounds(transports, network, 3)
    noted = np.array([transport.transfers.take() for transport in transports if transport.transfers])
    assert not noted[:, :2].any(), "peer copies are not timed"
    assert network.delivered / ranks <= noted[:, 3].sum() <= 2 * network.delivered
    assert bool(noted[:, 2].any()) == bool(network.delivered) and (noted[:, 2] % 2_000_000 == 0).all()
    assert all(transport.exchanges == 6 * len(LANES) for transport in transports)
    assert bool(network.delivered) == (len(set(near)) > 1)
    assert all(one.left for one in network.joined) and not any(one.landing_bytes for one in transports)
    plain = [landing_transport(rank, ranks) for rank in range(ranks)]
    messages = [NcclTransport(group(rank, ranks), CPU, Alarm(rank, None, 300.0)) for rank in range(ranks)]
    for others in plain, messages, collectives(ranks):
        assert run_rounds(others, network, 3) == sent, "the same bytes, whatever carries them"
    waves = [one.most_waves for one in (plain[0], transports[0], NcclTransport, GroupTransport)]
    assert waves == [1, 8, 8, 1], "copies inside a host take less time than starting more of them"


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_read_stays_where_an_error_falls(network: Network, monkeypatch: Any, fails: bool) -> None:
    """Peers get what was sent, though nobody here waits for it: the allocator is told of the streams that read it."""
    transport = landing_transport(1, 3, near=[0, 0, 2])
    one = Round(make_schedules(3, 1, 300), 1, 0, 0, CPU)
    homes, copies, messages = one.homes[1], transport._out.stream, transport.strangers.messages.out.stream
    taken: list[torch.Tensor] = []
    gc.collect()  # what other tests left
    network.asked.clear()
    monkeypatch.setattr(nccl, "take", lambda *given: taken.append(take(*given)) or taken[-1])
    if fails:
        monkeypatch.setattr(transport.strangers.messages.out, "_queue", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            one.start(transport)
    else:
        one.start(transport)
        assert not network.asked
    del one, transport
    gc.collect()
    for x in (*homes, *taken):
        if x.numel():
            assert {copies, messages} == set(network.asked[x.data_ptr()])
    assert sum(x.numel() for x in taken) > 0


def test_memory_is_as_large_on_all_hosts(network: Network) -> None:
    """So all ranks make it together, and hear where one lacks some."""
    transports = [landing_transport(rank, 4, near=[0, 0, 2, 2]) for rank in range(4)]
    for schedule, transport in zip(make_schedules(4, 5, 900), transports, strict=True):  # seed 5 serves all on rank 1
        views, few = transport._begin(schedule, 0, 0).prepared, Room(0, (1, 1), (1, 1))
        for room, kept in (few, False), (few, True), (Room(0, (4 << 10, 192), (516, 192)), False):
            views["a return", ()] = np.zeros(0), []
            transport.make_room([schedule], room, 0)
            assert bool(views) == kept, "they look at memory that was replaced"
    assert len({transport.landing_bytes for transport in transports}) == 1 and transports[2].landing_bytes > 1 << 24


@pytest.mark.parametrize("kind", ["nccl", "mixed"])
def test_a_group_that_is_given_up_is_left(kind: str, network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    own, left, alarm = OwnGroup(1, 2, "own", mock.Mock(), mock.Mock()), list[object](), Alarm(1, None, 9.0)
    monkeypatch.setattr(OwnGroup, "abandon", lambda group: left.append(group))
    monkeypatch.setattr(nccl, "start_daemon", lambda name, run, device: run())
    transport: Any = NcclTransport(own, CPU, alarm) if kind == "nccl" else LandingTransport(own, CPU, alarm, [0, 0])
    transport.peers = mock.Mock()
    transport.make_room(make_schedules(2, 1, 300)[1:], Room(0, (1, 1), (1, 1)), 0)
    assert bool(transport.landing_bytes) == (kind == "mixed")
    release = transport.abandon()
    assert left == [own] and transport._watchdog._stop.is_set()
    release()
    assert not transport.landing_bytes
    assert all(one.left for one in network.joined) if kind == "nccl" else transport.peers.forget.called


def test_memory_goes_back_behind_what_reads_it(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the allocator of the stream that made it, which may give it to its next tensor at once."""
    transport, near = NcclTransport(group(0, 2), CPU, Alarm(0, None, 9.0)), landing_transport(0, 2)
    reader, producer = (mock.Mock(cuda_stream=0, clock={}) for _ in range(2))
    done, sent, identity = mock.Mock(), [torch.ones(1)], Identity(0, 0)
    parcel = nccl.Parcel(identity, sent, [torch.zeros(1)], producer, transport.messages.out.stream, done)
    pushed, waits = landed._Pushed(near._out, identity, [done], [], producer, []), mock.Mock()
    monkeypatch.setattr(transport._watchdog, "wait_for", waits)
    for current, behind in (reader, [done, reader.record_event.return_value, done]), (producer, [done, done]):
        producer.reset_mock()
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_, current=current: current)
        assert len(transport._receive(parcel)) == (current is reader) and not sent
        transport._release(parcel)
        near._wait([], pushed)
        assert producer.wait_event.mock_calls == [mock.call(one) for one in behind]
    assert reader.wait_event.mock_calls == [mock.call(done)] * 2 and not waits.called
    transport.alarm.liveness.losses = mock.Mock()
    transport._receive(parcel)
    assert waits.call_args.args[0]() is done.query.return_value and waits.call_args.args[1] is identity


@pytest.mark.parametrize("over, stands", [(0, False), (1, True), (2, True), (3, False)])
def test_a_collective_that_hangs_is_named_and_aborted(over: int, stands: bool, network: Any, monkeypatch: Any) -> None:
    """A GPU that has not come so far waits for nobody; then it waits for numbers, and for rows."""
    aborted, recorded = list[object](), list[Event]()
    monkeypatch.setattr(packed, "abort", lambda *given: aborted.append(given))
    transports = collectives(2)
    rounds = [Round(make_schedules(2, 1, 300), rank, 0, 0, CPU) for rank in range(2)]
    for one, transport in zip(rounds, transports, strict=True):
        one.start(transport)
    monkeypatch.setattr(Event, "record", lambda event, stream: recorded.append(event))
    monkeypatch.setattr(Event, "query", lambda event: recorded.index(event) < over)
    dog, parcel, waits = transports[0]._watchdog, rounds[0].out.parcel, list[int]()
    assert all(work.wait() for work in (parcel.numbers, *parcel.data))
    parcel.numbers, *parcel.data = [SimpleNamespace(wait=lambda: waits.append(len(recorded)))] * 2
    rounds[0].out.wait()
    for now in 0.0, 1000.0:
        dog._pop()
        dog._look(now)
    wait(dog._freeing)
    assert (dog.alarm.sounded, aborted, waits) == (stands, [(transports[0].group, CPU)] * stands, [1, 2])
    for again in (rounds[0].start, lambda one: one._receive(rounds[0].out.parcel)) if stands else ():
        with pytest.raises(CADPeerError, match="rank 0 waited for core-attention exchange 1: the dispatch"):
            again(transports[0])


def test_giving_up_ends_copies_and_messages(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    transports = [landing_transport(rank, 3, near=[0, 0, 2], timeout_s=0.1) for rank in range(3)]
    plans = make_schedules(3, 1, 300)
    with torch.inference_mode():  # memory that grew in an evaluation
        for rank, transport in enumerate(transports):
            Round(plans, rank, 0, 0, CPU).start(transport)
    messages = NcclTransport(group(0, 2), CPU, Alarm(0, None, 9.0))
    messages.alarm.time_out("exchange 1")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: pytest.fail("waits for a GPU that may stand"))
    messages.close()
    transport, dog = transports[1], transports[1]._watchdog
    transport.group._get_backend = ended = mock.Mock()
    with transport.watched("a collective"):
        assert dog._host[0] == "a collective" and not dog.end_messages()
    assert dog._waits[-1].before.query() and dog._waits[-1].after.query() and dog._waits[-1].label == "a collective"
    assert ended.mock_calls == [mock.call(CPU), mock.call().abort()]
    transport.alarm.time_out("exchange 1")
    with pytest.raises(CADPeerError, match="rank 1 waited for exchange 1"), transport.watched("a collective"):
        pytest.fail("begun after an alarm")
    transport._give_up()
    assert transport.strangers.messages.out.calls.left and transport.strangers.messages.back.calls.left
    assert (transport._lanes.out(0, 0).areas[0].buffer.tensor == 255).all()
    transport.calls.wait(0, transport._out.own_flags, transport._pushed)  # which fails where it would last
    with pytest.raises(CADPeerError, match="rank 1 waited for exchange 1: no sign of it within 0.1 s"):
        Round(plans, 1, 0, 0, CPU).start(transport)


def test_what_cannot_start_leaves_the_communicator(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landed, "make_buffers", mock.Mock(side_effect=RuntimeError("no symmetric memory")))
    with pytest.raises(RuntimeError, match="no symmetric memory"):
        landing_transport(0, 2, near=[0, 0])
    assert [one.left for one in network.joined] == [True, True]
    with pytest.raises(CADError, match="3 numbers of neighbourhoods for a group of 2 ranks"):
        landing_transport(0, 2, near=[0, 0, 1])
