"""The `nccl` transport: grouped sends and receives on a communicator and a stream of its own.

For ranks without access to each other's memory, across nodes too. Slices are packed by one index operation per field,
travel as one message per peer and field, and are put into place by one more. Between hosts, and
beside reserved servers, what comes back has a communicator and a stream of its own: it crosses what is on its way out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch

from deepspeed_cad.exchange.arrival import wait_for
from deepspeed_cad.exchange.failure.board import Liveness
from deepspeed_cad.exchange.failure.identity import RING, Comparison, Identity, Moment, Register
from deepspeed_cad.exchange.failure.watchdog import Alarm, Watchdog
from deepspeed_cad.exchange.group import Group, OwnGroup, has_ways_apart, rank_of, size_of
from deepspeed_cad.exchange.messages import Messenger, TwoWays
from deepspeed_cad.exchange.native_calls import Table
from deepspeed_cad.exchange.placement import place
from deepspeed_cad.exchange.rows import KindRows, rows_of_kinds, take
from deepspeed_cad.exchange.split import list_messages
from deepspeed_cad.exchange.streams import leave_to_streams
from deepspeed_cad.exchange.transfers import Transfers
from deepspeed_cad.exchange.transport import UNNAMED, Outgoing, Returning
from deepspeed_cad.schedule import Schedule
from deepspeed_cad.schedule.room import Room
from deepspeed_cad.threads import start_daemon


class NcclTransport:
    """Exchange through an NCCL communicator of its own."""

    name = "nccl"
    most_waves = 8
    landing_bytes = 0

    def __init__(
        self,
        group: Group,
        device: torch.device,
        liveness: Liveness | None = None,
        timeout_s: float = 300.0,
        several_hosts: bool = False,
    ) -> None:
        """Collective: every rank of the group makes one at the same time, `several_hosts` alike.

        Each way has a communicator of its own between hosts, and beside reserved servers, whose results come home while
        the next nano-batch goes out.
        """
        self.group, self.device = group, device
        self.rank, self.ranks = rank_of(group), size_of(group)
        self.exchanges = 0
        self.bytes_sent = 0
        self.transfers: Transfers | None = None
        self.register = Register()
        self._alarm = Alarm(self.rank, liveness, timeout_s)
        self._two_ways = has_ways_apart(group, self._alarm.liveness.may_change)
        self.messages = TwoWays(group, device, self._alarm, several_hosts or self._two_ways)
        self.stream: torch.cuda.Stream | None = None
        """Where the messages of the newest exchange end: for timelines."""
        ring = torch.zeros(RING, self.ranks, dtype=torch.int64, device=device)
        # Message streams write the numbers: not before they are zeros.
        for one in (self.messages.out, self.messages.back):
            one.stream.wait_stream(torch.cuda.current_stream(device))
        self._comparison = Comparison(ring, self.rank)
        self._watchdog = Watchdog(self._alarm, self.messages.leave, device, self._comparison)
        self._kinds: WeakKeyDictionary[Schedule, tuple[KindRows, KindRows]] = WeakKeyDictionary()
        self._unfinished: set[_UnderWay] = set()
        """Where training goes on without a server that is lost: what NCCL may still read and write."""

    @property
    def two_ways(self) -> bool:
        """See Transport.two_ways."""
        return self._two_ways

    def dispatch(
        self, schedule: Schedule, fields: list[Outgoing], nano_batch: int, moment: Moment = UNNAMED
    ) -> _Dispatched:
        """See Transport.dispatch; nano-batches need no care here, every exchange has buffers of its own."""
        self._alarm.check()
        kinds = self._look_up(schedule)
        packed = [take(f.home, kinds[f.kind].home) for f in fields]
        counts = [(kinds[f.kind].sent, kinds[f.kind].received) for f in fields]
        identity = self._next(moment, nano_batch, False, schedule)
        return _Dispatched(self, schedule, fields, kinds, self._start(self.messages.out, identity, packed, counts))

    def give_back(
        self, schedule: Schedule, fields: list[Returning], nano_batch: int, moment: Moment = UNNAMED
    ) -> _Returned:
        """See Transport.give_back."""
        self._alarm.check()
        kinds = self._look_up(schedule)
        packed = [f.served.index_select(0, kinds[f.kind].received_row) for f in fields]
        counts = [(kinds[f.kind].received, kinds[f.kind].sent) for f in fields]
        identity = self._next(moment, nano_batch, True, schedule)
        return _Returned(self, fields, kinds, self._start(self.messages.back, identity, packed, counts))

    def make_room(self, schedules: Sequence[Schedule], room: Room, nano_batch: int) -> None:
        """Nothing is kept between exchanges: each takes its buffers from torch's allocator, and gives them back."""

    def close(self) -> None:
        """Leave the communicator."""
        if not self._alarm.sounded:
            torch.cuda.synchronize(self.device)  # the watchdog ends what a dead peer never will
        try:
            self._watchdog.close()
        finally:
            self.messages.leave()

    def abandon(self) -> Callable[[], None]:
        """See Transport.abandon."""
        assert isinstance(self.group, OwnGroup)
        self._watchdog.abandon()
        self.group.abandon()
        held = [self._unfinished]
        self._unfinished = set()

        def leave() -> None:
            # Not on the thread that changes servers: to leave may wait for the whole GPU, and another stream of it for
            # a trainer that waits for this one. Buffers stay until no kernel of NCCL can touch them.
            try:
                self.messages.leave()
            finally:
                for way in (self.messages.out, self.messages.back):
                    way.stream.synchronize()
                held.clear()

        start_daemon("leaves NCCL", leave, self.device)
        return lambda: None

    def finish(self, under_way: _UnderWay) -> None:
        """Queue on the current stream: until the exchange is over."""
        self._alarm.check()
        if self._alarm.goes_on and under_way.done is not None:
            wait_for(
                under_way.done.query, self._alarm, self._watchdog, under_way.identity, under_way.identity.index
            )  # fmt: skip
        current = torch.cuda.current_stream(self.device)
        before, after = torch.cuda.Event(), torch.cuda.Event()
        before.record(current)
        if under_way.done is not None:
            current.wait_event(under_way.done)
        after.record(current)
        if under_way.done is not None and current != under_way.producer:
            under_way.producer.wait_event(under_way.done)
        under_way.packed.clear()
        self._watchdog.track(before, after, under_way.identity)

    def release(self, under_way: _UnderWay) -> None:
        """What arrived has been read by work queued on the current stream; its memory goes back to its producer's."""
        current = torch.cuda.current_stream(self.device)
        if current != under_way.producer:
            under_way.producer.wait_event(current.record_event())
        under_way.arrived = []

    def _next(self, moment: Moment, nano_batch: int, is_return: bool, schedule: Schedule) -> Identity:
        self.exchanges += 1
        self._comparison.newest = self.exchanges
        return self.register.next(self.exchanges, moment, nano_batch, is_return, schedule)

    def _start(
        self, way: Messenger, identity: Identity, packed: list[torch.Tensor], counts: list[tuple[Table, Table]]
    ) -> _UnderWay:
        arrived = [rows.new_empty(int(received.sum()), rows.shape[1]) for rows, (_, received) in zip(packed, counts)]
        messages = [np.zeros((0, 4), np.int64)]
        for out, into, (sent, received) in zip(packed, arrived, counts):
            width = out.shape[1] * out.element_size()
            for is_send, tensor, rows in ((True, out, sent), (False, into, received)):
                runs = np.stack([np.arange(self.ranks), np.cumsum(rows) - rows, rows], axis=1)[rows > 0]
                messages.append(list_messages(is_send, runs, tensor.data_ptr(), width))
            self.bytes_sent += int(sent.sum()) * width
        under_way = _UnderWay(identity, None, packed, arrived, torch.cuda.current_stream(self.device), way.stream)
        if self._alarm.goes_on:
            going = {one for one in self._unfinished if one.done is None or not one.done.query()}
            self._unfinished = {under_way, *going}
        under_way.done = way.exchange(
            identity, np.ascontiguousarray(np.concatenate(messages)), self._comparison, self._watchdog, self.transfers
        )
        self.stream = way.stream
        return under_way

    def _look_up(self, schedule: Schedule) -> tuple[KindRows, KindRows]:
        found = self._kinds.get(schedule)
        if found is None:
            found = self._kinds[schedule] = rows_of_kinds(schedule, self.device)
        return found


@dataclass(eq=False)
class _UnderWay:
    identity: Identity
    done: torch.cuda.Event | None
    """None: nothing moves."""
    packed: list[torch.Tensor]
    """Held until the transfer is over."""
    arrived: list[torch.Tensor]
    producer: torch.cuda.Stream
    messages: torch.cuda.Stream
    """Where NCCL reads what is packed and writes what arrives."""

    def __del__(self) -> None:
        # An error fell before `finish` or `release`.
        leave_to_streams([*self.packed, *self.arrived], [self.messages])


@dataclass(eq=False)
class _Dispatched:
    transport: NcclTransport
    schedule: Schedule
    fields: list[Outgoing]
    kinds: tuple[KindRows, KindRows]
    under_way: _UnderWay

    def wait(self) -> list[torch.Tensor]:
        """See exchange.transport.Dispatched."""
        self.transport.finish(self.under_way)
        buffers = [
            self.kinds[f.kind].group_major(self.schedule, f, arrived)
            for f, arrived in zip(self.fields, self.under_way.arrived)
        ]
        self.transport.release(self.under_way)
        self.fields = []
        return buffers


@dataclass(eq=False)
class _Returned:
    transport: NcclTransport
    fields: list[Returning]
    kinds: tuple[KindRows, KindRows]
    under_way: _UnderWay

    def wait(self) -> None:
        """See exchange.transport.Returned."""
        self.transport.finish(self.under_way)
        for f, arrived in zip(self.fields, self.under_way.arrived):
            place(self.kinds[f.kind].placement, arrived, f.served, f.home, f.add)
        self.transport.release(self.under_way)
        self.fields = []
