"""The transports `nvlink` and `mixed`: peer copies by copy engines into landing areas that all ranks of a host map.

`nvlink` is for ranks of one host; `mixed` is the same inside each host, and messages between hosts bring what is
missing into the same areas (nccl.py, `Strangers`).

One C++ call per exchange queues strided copies of every slice straight from the producer's tensors on one stream, and
behind each peer's copies writes of the exchange's identity and of its number to that peer's flag. Consumers wait for
their own flags on their own stream: no kernel, no packing, no host synchronisation. Beside reserved servers each way
has a copy stream and flags of its own: on one stream a rank's word that it has come to an exchange would wait behind
what it sends the other way. Why memory is never overwritten too early is told in landing.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from deepspeed_cad.errors import CADError
from deepspeed_cad.exchange import copies
from deepspeed_cad.exchange.copies import PushTable, dispatch_pushes, near_part, return_pushes
from deepspeed_cad.exchange.failure.identity import RING, Comparison, Flags, Identity, Moment
from deepspeed_cad.exchange.failure.roll_call import RollCall
from deepspeed_cad.exchange.failure.watchdog import Alarm, Watchdog
from deepspeed_cad.exchange.group import Group, OwnGroup, find_peers, has_ways_apart, open_store, size_of
from deepspeed_cad.exchange.landing import LandingArea, Lanes, make_buffers
from deepspeed_cad.exchange.native_calls import CudaCalls, Table
from deepspeed_cad.exchange.nccl import Messenger, Strangers
from deepspeed_cad.exchange.placement import Placement, check_home, find_placement, place
from deepspeed_cad.exchange.transport import UNNAMED, Outgoing, Returning, Transport, UnderWay, leave_to_streams
from deepspeed_cad.schedule import KEY, QUERY, Schedule
from deepspeed_cad.schedule.waves import Room

FLAG_BYTES, NAME_BYTES = 4, 8
PAGE = 4096
"""Bytes: names lie behind the flags, from a multiple on."""
RESCUE_STREAMS = 9
POISON = 1 << 30
"""Added to an exchange's number to let its waits end after a failure."""
LONG_AGO = 1 << 29
"""Exchanges. Flags come round after 2^32 and are compared by the nearer way: what is half a round behind seems ahead. A
lane may rest that long; who waits for what was longer ago than this waits for this, where all have been."""

_Shape = tuple[int, int, torch.dtype]
"""Kind, width in elements and type of one field."""
_Prepared = tuple[Table, list[torch.Tensor]]
"""See copies.address_fields, its sources filled in for every exchange; and where fields land here."""


class _Way(NamedTuple):
    """Out or back: where copies are queued, and who has come how far."""

    stream: torch.cuda.Stream
    flag_of_rank: Table
    """Where this rank's number is written at each rank."""
    own_flags: Table
    """Where those of all ranks are here."""


@dataclass(frozen=True, eq=False)
class _Tables:
    dispatch: PushTable
    give_back: PushTable
    placements: tuple[Placement, ...]
    prepared: dict[tuple[str, tuple[_Shape, ...]], _Prepared]
    """Made once per landing area and shapes of fields: all layers use it."""


class LandingTransport(Transport):
    def __init__(self, group: Group, device: torch.device, alarm: Alarm, near: list[int] | None = None) -> None:
        """Collective. `near`: one number for every rank; ranks with the same number copy, all others get messages.
        None: all copy."""
        self.name = "nvlink" if near is None else "mixed"
        # Copies inside a host take less time than starting more of them.
        self.most_waves = 1 if near is None else 8
        super().__init__(group, device, alarm)
        self._pushed = 0
        """Exchanges of this transport alone: what flags count begins at 0 also where servers changed."""
        # First what all ranks take part in: making landing areas can fail on one host alone.
        self.strangers = None if near is None else Strangers(group, device, near, alarm)
        with ExitStack() as on_error:
            if self.strangers is not None:
                on_error.callback(self.strangers.messages.leave)
            peers = self.peers = find_peers(group, alarm, near)
            self.rank, self.place, self.ranks = int(peers.members[peers.place]), peers.place, len(peers.members)
            roll_call = RollCall(open_store(group, "landing"), size_of(group), alarm)
            with torch.cuda.device(device):
                torch.cuda.current_stream(device).synchronize()
                self.calls = CudaCalls()
                ways = 1 + has_ways_apart(group, alarm.liveness.may_change)
                streams = [torch.cuda.Stream(device) for _ in range(ways)]
                self._rescue = [torch.cuda.Stream(device, priority=-1) for _ in range(RESCUE_STREAMS)]
                # The kernel that spoils what landed is loaded now: a first launch may need the GPU to be idle.
                torch.empty(PAGE, dtype=torch.uint8, device=device).fill_(255)
            whole, flags = size_of(group), FLAG_BYTES * self.ranks
            ahead = -(-ways * flags // PAGE) * PAGE
            size = ahead + RING * whole * NAME_BYTES
            self._flags = make_buffers([size], peers, device, roll_call, "making flags for exchanges")[0]
            # Of exchanges: a ring, [RING, ranks of the group].
            names = self._flags.tensor[ahead:size].view(torch.int64).view(RING, whole)
            with torch.cuda.device(device):
                self._comparison = Comparison(names, self.rank, alarm.in_job)
            on_error.pop_all()
        self.stream = streams[0] if near is None else None
        everywhere = self._flags.addresses
        here = everywhere[self.place] + FLAG_BYTES * np.arange(self.ranks, dtype=np.int64)
        ways_there = [
            _Way(stream, everywhere + FLAG_BYTES * self.place + number * flags, here + number * flags)
            for number, stream in enumerate(streams)
        ]
        self._out, self._back = ways_there[0], ways_there[-1]
        self.two_ways = ways > 1
        self._name_of_rank: Table = everywhere + ahead + NAME_BYTES * self.rank
        """Where this rank's names are written at each rank: in the first row of the ring."""
        self._name_row = NAME_BYTES * whole
        self._neighbours = [int(rank) for rank in peers.members if rank != self.rank]
        self._lanes = Lanes(peers, device, roll_call)
        self._tables: WeakKeyDictionary[Schedule, _Tables] = WeakKeyDictionary()
        self._watchdog = Watchdog(alarm, self._give_up, device, self._comparison)
        self._seen: Flags | None = None
        """Where the host looks at them."""

    def dispatch(
        self, schedule: Schedule, fields: list[Outgoing], nano_batch: int, moment: Moment = UNNAMED
    ) -> UnderWay[list[torch.Tensor]]:
        """See Transport.dispatch. What arrives is valid until its return, or the next dispatch on the same lane."""
        tables = self._begin(schedule, nano_batch, moment.wave)
        lane = self._lanes.out(nano_batch, moment.wave)
        guard, area = (self._back if lane.give_back else self._out, lane.guard), lane.next_area()
        shapes = tuple((f.kind, int(f.home.shape[2]), f.home.dtype) for f in fields)
        addresses, landed = self._prepare(tables, area, schedule.served_rows, shapes)
        for row, f in zip(addresses, fields):
            check_home(f.home, schedule, int(tables.dispatch.source_rows[f.kind]))
            size = f.home.element_size()
            row[1:4] = f.home.data_ptr(), f.home.stride(0) * size, f.home.stride(1) * size
        under_way = self._start(self._out, [f.home for f in fields], moment, nano_batch, False, schedule)
        self._push(under_way, tables.dispatch, addresses, area, guard)
        lane.dispatch, lane.give_back = self.exchanges, 0
        if self.strangers is not None:
            self._join(under_way, *self.strangers.outgoing(schedule, fields, landed))
        return UnderWay(under_way, partial(self._wait, landed))

    def give_back(
        self, schedule: Schedule, fields: list[Returning], nano_batch: int, moment: Moment = UNNAMED
    ) -> UnderWay[None]:
        """See Transport.give_back. It must be waited for before the next exchange on the same lane."""
        tables = self._begin(schedule, nano_batch, moment.wave)
        lane, back = self._lanes.out(nano_batch, moment.wave), self._lanes.back(nano_batch, moment.wave)
        if lane.give_back:
            raise CADError(f"rank {self.rank}: two returns on nano-batch {nano_batch} without a dispatch between them")
        shapes = tuple((f.kind, int(f.served.shape[1]), f.served.dtype) for f in fields)
        addresses, landed = self._prepare(tables, back, schedule.landed_rows, shapes)
        for row, f in zip(addresses, fields):
            if len(f.served) != schedule.served_rows[self.rank, f.kind] or not f.served.is_contiguous():
                raise CADError(f"rank {self.rank}: a served tensor of shape {tuple(f.served.shape)} cannot be returned")
            row[1:4] = f.served.data_ptr(), row[4], row[4]
        under_way = self._start(self._back, [f.served for f in fields], moment, nano_batch, True, schedule)
        self._push(under_way, tables.give_back, addresses, back, (self._out, lane.dispatch))
        lane.give_back = self.exchanges
        back.unfinished = UnderWay(under_way, partial(self._place, tables.placements, fields, landed))
        if self.strangers is not None:
            self._join(under_way, *self.strangers.returning(schedule, fields, landed))
        return back.unfinished

    def make_room(self, schedules: Sequence[Schedule], room: Room, nano_batch: int) -> None:
        self.alarm.check()
        if self._lanes.make_room(schedules, room, nano_batch):
            self._forget_views()

    @property
    def landing_bytes(self) -> int:
        return sum(area.capacity for area in self._lanes.areas())

    def close(self) -> None:
        """Release the landing areas; the next transport on this group makes its own."""
        torch.cuda.synchronize(self.device)  # the watchdog ends what a dead peer never will
        try:
            self._watchdog.close()
        finally:
            self._lanes.release()
            self._tables.clear()
            self.peers.forget()
            if self.strangers is not None:
                self.strangers.messages.leave()

    def abandon(self) -> Callable[[], None]:
        """See Transport.abandon. What other ranks still copy into memory of this one lies in their mappings too, and
        stays until they let go of them; so does the memory of a process that died, into which this rank copies."""
        assert isinstance(self.group, OwnGroup)
        self._watchdog.abandon()
        self.group.abandon()
        copied = [way.stream.record_event() for way in (self._out, self._back)]

        def release() -> None:
            for one in copied:
                one.synchronize()
            self._tables.clear()
            self._lanes.release()
            self.peers.forget()

        return release

    def _place(
        self, placements: tuple[Placement, ...], fields: list[Returning], landed: list[torch.Tensor],
        under_way: _Pushed,
    ) -> None:  # fmt: skip
        for f, rows in zip(fields, self._wait(landed, under_way)):
            place(placements[f.kind], rows, f.served, f.home, f.add)

    def _wait(self, landed: list[torch.Tensor], under_way: _Pushed) -> list[torch.Tensor]:
        self.alarm.check()
        current = torch.cuda.current_stream(self.device)
        before, after = torch.cuda.Event(), torch.cuda.Event()
        before.record(current)
        self._wait_for_flags(current, under_way.way, under_way.identity.index, under_way.identity)
        for done in under_way.done:
            current.wait_event(done)
            if current != under_way.producer:
                under_way.producer.wait_event(done)
        after.record(current)
        under_way.sources.clear()
        identity = under_way.identity
        self._watchdog.track(before, after, identity, partial(self._comparison.arrived, identity, self._neighbours))
        return landed

    def _wait_for_flags(self, stream: torch.cuda.Stream, way: _Way, number: int, waited_for: Identity) -> None:
        """What is queued on a stream from now on begins when all ranks have come to an exchange of a way."""
        flag = max(number - self.exchanges, -LONG_AGO) + self._pushed
        if not self.alarm.goes_on:
            self.calls.wait(stream.cuda_stream, way.own_flags, flag)
            return
        # The host sees the flags of one way. See has_ways_apart.
        assert not self.two_ways
        if self._seen is None:
            self._seen = Flags(self._flags.tensor[: FLAG_BYTES * self.ranks].view(torch.int32))
        self._watchdog.wait_for(partial(self._seen.reached, flag), waited_for)

    def _begin(self, schedule: Schedule, nano_batch: int, wave: int) -> _Tables:
        self.alarm.check()
        self._lanes.begin(nano_batch, wave)
        tables = self._tables.get(schedule)
        if tables is None:
            near = near_part(schedule, self.peers.members)
            placements = tuple(find_placement(schedule, kind, self.device) for kind in (QUERY, KEY))
            tables = self._tables[schedule] = _Tables(dispatch_pushes(near), return_pushes(near), placements, {})
        return tables

    def _forget_views(self) -> None:
        for tables in self._tables.values():
            tables.prepared.clear()  # they hold views of memory that was replaced

    def _prepare(self, tables: _Tables, area: LandingArea, rows: Table, shapes: tuple[_Shape, ...]) -> _Prepared:
        """`rows` ([ranks, 2]) land at every rank; the same numbers everywhere, so all grow the area together."""
        found = tables.prepared.get((area.label, shapes))
        if found is not None:
            return found
        kinds, widths = [kind for kind, _, _ in shapes], [width * dtype.itemsize for _, width, dtype in shapes]
        begin, needed = copies.plan_landing(rows, kinds, widths)
        if self._lanes.grow([(area, needed)]):
            self._forget_views()
        sources = [(kind, 0, 0, 0, width) for kind, width in zip(kinds, widths)]
        landed = [
            area.field(int(at), int(rows[self.rank, kind]), width, dtype)
            for at, (kind, width, dtype) in zip(begin[:, self.rank], shapes)
        ]
        addresses = copies.address_fields(sources, area.buffer.addresses + begin[:, self.peers.members])
        made = tables.prepared[area.label, shapes] = addresses, landed
        return made

    def _start(
        self, way: _Way, sources: list[torch.Tensor], moment: Moment, nano_batch: int, is_return: bool,
        schedule: Schedule,
    ) -> _Pushed:  # fmt: skip
        identity = self._next(schedule, nano_batch, moment, is_return)
        self._pushed += 1
        self._comparison.newest = self.exchanges
        return _Pushed(way, identity, [], sources, torch.cuda.current_stream(self.device), [way.stream])

    def _push(
        self, under_way: _Pushed, table: PushTable, fields: Table, area: LandingArea, guard: tuple[_Way, int]
    ) -> None:
        """`guard`: the exchange that peers must have come to, and of which way it is."""
        way, identity, stream = under_way.way, under_way.identity, under_way.way.stream
        self.stream = None if self.stream is None else stream
        stream.wait_stream(torch.cuda.current_stream(self.device))
        if area.last_operation:
            self._wait_for_flags(stream, *guard, identity)
        area.last_operation = self.exchanges
        names = self._name_of_rank + self._name_row * (identity.index % RING)
        self.calls.push(
            stream.cuda_stream, table.peers, table.begin, table.slices, fields,
            way.flag_of_rank, self._pushed, names, identity.number,
        )  # fmt: skip
        self.bytes_sent += int((table.rows_sent[fields[:, 0]] * fields[:, 4]).sum())
        under_way.done.append(stream.record_event())

    def _join(self, under_way: _Pushed, way: Messenger, messages: Table, packed: list[torch.Tensor]) -> None:
        """Queue the messages of an exchange whose peer copies are queued; waiting for it waits for both. The watchdog
        looks after messages apart from the wait of whoever uses what arrives: growing a landing area waits for the
        whole device before."""
        under_way.readers.append(way.stream)
        under_way.sources.extend(packed)
        done = way.exchange(under_way.identity, messages, self._comparison, self._watchdog, self.transfers)
        if done is not None:
            under_way.done.append(done)
            self.bytes_sent += int(messages[messages[:, 0] == 1, 3].sum())

    def _give_up(self) -> None:
        """Called by the watchdog: end the waits of this rank; what landed becomes NaN, the next call raises."""
        everyone, no_slices = np.arange(self.ranks, dtype=np.int64), np.zeros((0, 5), np.int64)
        nothing, no_fields = np.zeros(self.ranks + 1, np.int64), np.zeros((0, 5 + self.ranks), np.int64)
        try:
            # A stream that shares a queue of the GPU with the stuck one waits behind it: one of several gets through.
            # In inference mode, because memory that grew there can be written nowhere else.
            for stream in self._rescue:
                with torch.cuda.device(self.device), torch.cuda.stream(stream), torch.inference_mode():
                    for area in self._lanes.areas():
                        if area.capacity:
                            area.buffer.tensor.fill_(255)
                    for way in (self._out, self._back):
                        self.calls.push(
                            stream.cuda_stream, everyone, nothing, no_slices, no_fields, way.own_flags,
                            self._pushed + POISON,
                        )  # fmt: skip
        finally:
            if self.strangers is not None:
                self.strangers.messages.leave()  # after the waits for neighbours: what is behind them can stop then


@dataclass(eq=False)
class _Pushed:
    way: _Way
    identity: Identity
    done: list[torch.cuda.Event]
    """On the copy stream, behind this rank's own pushes; and on streams of other parts of the exchange."""
    sources: list[torch.Tensor]
    """Held until the copies that read them are ordered before whatever reuses their memory."""
    producer: torch.cuda.Stream
    readers: list[torch.cuda.Stream]

    def __del__(self) -> None:
        # An error fell before `wait`.
        leave_to_streams(self.sources, self.readers)
