"""Transports that pack: rows travel as one message per peer, and are put into place on arrival.

For ranks without access to each other's memory, and for CPUs. A `PackedTransport` leaves to its subclasses what moves
the packed rows, and with them the numbers of exchanges (failure/identity.py): here collectives of torch.distributed,
the transport `c10d`; in nccl.py messages. Buffers of every exchange come from torch's allocator.
"""

import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist

from deepspeed_cad.errors import CADError
from deepspeed_cad.exchange.failure.board import Liveness
from deepspeed_cad.exchange.failure.identity import RING, Comparison, Identity, Moment, compare
from deepspeed_cad.exchange.failure.watchdog import Alarm, Watchdog
from deepspeed_cad.exchange.group import Group, OwnGroup, abort, processes_of, rank_of, size_of
from deepspeed_cad.exchange.native_calls import Table
from deepspeed_cad.exchange.placement import KindRows, place, take
from deepspeed_cad.exchange.transport import UNNAMED, Dispatched, Outgoing, Returned, Returning, Transport, UnderWay
from deepspeed_cad.schedule import KEY, QUERY, Schedule

Counts = list[tuple[Table, Table]]
"""Of each field, its rows to every peer and from it."""


class PackedTransport(Transport):
    def __init__(self, group: Group, device: torch.device, alarm: Alarm) -> None:
        super().__init__(group, device, alarm)
        self._kinds: WeakKeyDictionary[Schedule, tuple[KindRows, ...]] = WeakKeyDictionary()

    def dispatch(
        self, schedule: Schedule, fields: list[Outgoing], nano_batch: int, moment: Moment = UNNAMED
    ) -> Dispatched:
        kinds = self._begin(schedule)
        packed = [take(f.home, kinds[f.kind].home) for f in fields]
        counts = [(kinds[f.kind].sent, kinds[f.kind].received) for f in fields]
        parcel = self._start(packed, counts, self._next(schedule, nano_batch, moment, False), False)
        return UnderWay(parcel, partial(self._arrange, schedule, fields, kinds))

    def give_back(
        self, schedule: Schedule, fields: list[Returning], nano_batch: int, moment: Moment = UNNAMED
    ) -> Returned:
        kinds = self._begin(schedule)
        packed = [f.served.index_select(0, kinds[f.kind].received_row) for f in fields]
        counts = [(kinds[f.kind].received, kinds[f.kind].sent) for f in fields]
        parcel = self._start(packed, counts, self._next(schedule, nano_batch, moment, True), True)
        return UnderWay(parcel, partial(self._place, fields, kinds))

    @abstractmethod
    def _send(self, packed: list[torch.Tensor], counts: Counts, identity: Identity, is_return: bool) -> Any:
        """Begin to move an exchange: [rows, width] of every field, ordered by peer. Gives what the others take."""

    @abstractmethod
    def _receive(self, parcel: Any) -> list[torch.Tensor]:
        """What arrived, [rows, width] of every field, complete for work queued after this call."""

    def _release(self, parcel: Any) -> None:
        """What arrived has been read, by work queued before this call."""

    def _begin(self, schedule: Schedule) -> tuple[KindRows, ...]:
        self.alarm.check()
        if schedule not in self._kinds:
            self._kinds[schedule] = tuple(KindRows.of(schedule, kind, self.device) for kind in (QUERY, KEY))
        return self._kinds[schedule]

    def _start(self, packed: list[torch.Tensor], counts: Counts, identity: Identity, is_return: bool) -> Any:
        self.bytes_sent += int(sum(sent.sum() * _row_bytes(rows) for rows, (sent, _) in zip(packed, counts)))
        return self._send(packed, counts, identity, is_return)

    def _arrange(
        self, schedule: Schedule, fields: list[Outgoing], kinds: tuple[KindRows, ...], parcel: Any
    ) -> list[torch.Tensor]:
        buffers = [kinds[f.kind].group_major(schedule, f, rows) for f, rows in zip(fields, self._receive(parcel))]
        self._release(parcel)
        return buffers

    def _place(self, fields: list[Returning], kinds: tuple[KindRows, ...], parcel: Any) -> None:
        for f, rows in zip(fields, self._receive(parcel)):
            place(kinds[f.kind].placement, rows, f.served, f.home, f.add)
        self._release(parcel)


def _row_bytes(rows: torch.Tensor) -> int:
    return rows.shape[1] * rows.element_size()


@dataclass(eq=False)
class GroupTransfer:
    identity: Identity
    packed: list[torch.Tensor]
    arrived: list[torch.Tensor]
    data: list[dist.Work]
    numbers: dist.Work | None = None
    """None where they were compared before."""


class GroupTransport(PackedTransport):
    """Collectives of torch on CAD's process group: one gathers the numbers, then one for each field moves its rows.
    Both ways share one queue of collectives, so nothing comes back before all is out; and where one starts on a CPU,
    the host waits for the numbers of all ranks."""

    name = "c10d"

    def _move(self, packed: list[torch.Tensor], counts: Counts, identity: Identity) -> GroupTransfer:
        """Begin to move the rows of all fields, as bytes: not every backend knows every type."""
        arrived = [rows.new_empty(int(into.sum()), rows.shape[1]) for rows, (_, into) in zip(packed, counts)]
        data = [
            dist.all_to_all_single(
                into.view(torch.uint8), rows.view(torch.uint8), received.tolist(), sent.tolist(),
                group=processes_of(self.group), async_op=True,
            )
            for into, rows, (sent, received) in zip(arrived, packed, counts, strict=True)
        ]  # fmt: skip
        return GroupTransfer(identity, packed, arrived, data)


class ComparedFirst(GroupTransport):
    """Collectives of gloo: once the numbers are compared, others move the data. Where exchanges differ, so may the
    sizes of what they move, and gloo ends a process whose buffer is too small; so no data move before. The host waits
    for the numbers where an exchange starts: what is under way then is the data."""

    def _send(self, packed: list[torch.Tensor], counts: Counts, identity: Identity, is_return: bool) -> GroupTransfer:
        """Ranks have met when data starts to move, so a transfer lasts from then on."""
        group = processes_of(self.group)
        numbers, mine = torch.zeros(group.size(), dtype=torch.int64), torch.tensor([identity.number])
        with Liveness.watch(self.alarm.liveness, str(identity), with_servers=True):
            self._wait([dist.all_gather(list(numbers.split(1)), mine, group=group, async_op=True)], identity)
            if found := compare({self.alarm.in_job(at): one for at, one in enumerate(numbers.tolist())}):
                self.alarm.stop(found)
                self.alarm.check()
            begun, under_way = time.perf_counter(), self._move(packed, counts, identity)
        transfers = self.transfers
        if transfers is not None and under_way.data:
            sent, received = (
                sum(rows[way] * _row_bytes(x) for rows, x in zip(counts, packed, strict=True)) for way in (0, 1)
            )
            if (size := transfers.size(sent, received)) is not None:
                # Noted when the end comes, not when somebody waits for it.
                ended = torch.futures.collect_all([work.get_future() for work in under_way.data])
                ended.add_done_callback(lambda _: transfers.note(size, time.perf_counter() - begun))
        return under_way

    def _receive(self, parcel: GroupTransfer) -> list[torch.Tensor]:
        self.alarm.check()
        with Liveness.watch(self.alarm.liveness, str(parcel.identity), with_servers=True):
            self._wait(parcel.data, parcel.identity)
        return parcel.arrived

    def close(self) -> None:
        """The process group belongs to the session."""

    def abandon(self) -> Callable[[], None]:
        assert isinstance(self.group, OwnGroup)
        self.group.abandon()
        del self.group
        return lambda: None

    def _wait(self, works: list[dist.Work], identity: Identity) -> None:
        for work in works:
            # Not is_completed: under a profiler gloo ends a work with its mutex held, and wants the GIL for hooks.
            self.alarm.liveness.patiently(work.get_future().done, str(identity), identity.index, with_servers=True)
            work.wait()


class Collectives(GroupTransport):
    """Collectives of a backend for GPUs. Where exchanges differ, so may the sizes of what they move, and these may
    hang; the numbers are there by then, and the error is known. What hangs is aborted, and the group with it."""

    def __init__(self, group: Group, device: torch.device, alarm: Alarm) -> None:
        super().__init__(group, device, alarm)
        ring = torch.zeros(RING, size_of(group), dtype=torch.int64, device=device)
        self._comparison = Comparison(ring, rank_of(group), alarm.in_job)
        self._watchdog = Watchdog(alarm, partial(abort, group, device), device, self._comparison)

    def _send(self, packed: list[torch.Tensor], counts: Counts, identity: Identity, is_return: bool) -> GroupTransfer:
        row = self._comparison.ring[identity.index % RING]
        self._comparison.newest = identity.index
        mine = torch.full((1,), identity.number, device=self.device)
        with Liveness.watch(self.alarm.liveness, str(identity)), self._watchdog.inside(identity):
            numbers = dist.all_gather_into_tensor(row, mine, group=processes_of(self.group), async_op=True)
            under_way = self._move(packed, counts, identity)
        under_way.numbers = numbers
        return under_way

    def _receive(self, parcel: GroupTransfer) -> list[torch.Tensor]:
        self.alarm.check()
        label, current = parcel.identity, torch.cuda.current_stream(self.device)
        before, known, after = (torch.cuda.Event() for _ in range(3))
        before.record(current)
        with Liveness.watch(self.alarm.liveness, str(label)):
            if parcel.numbers is not None:
                parcel.numbers.wait()
            known.record(current)
            for work in parcel.data:
                work.wait()
            after.record(current)
        others = np.delete(np.arange(size_of(self.group)), rank_of(self.group)).tolist()
        self._watchdog.track(before, known, label, partial(self._comparison.arrived, label, others))
        self._watchdog.track(known, after, label)
        return parcel.arrived

    def close(self) -> None:
        self._watchdog.close()

    def abandon(self) -> Callable[[], None]:
        # No session that may lose a server takes these (server/meeting.py).
        raise CADError("transport c10d cannot be given up on GPUs")


def c10d_transport(group: Group, device: torch.device, alarm: Alarm) -> GroupTransport:
    return ComparedFirst(group, device, alarm) if device.type == "cpu" else Collectives(group, device, alarm)
