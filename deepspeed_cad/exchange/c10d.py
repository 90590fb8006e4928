"""The portable transport: torch.distributed's own collectives, any backend (gloo, NCCL).

Slices are packed into one byte buffer per exchange, ordered by peer and then by field, and unpacked on arrival.
Messages between two ranks hold the slices in table order, which both ends know.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from deepspeed_cad.exchange.carriers import Carrier, Collectives, ComparedFirst, UnderWay
from deepspeed_cad.exchange.failure.board import Liveness
from deepspeed_cad.exchange.failure.identity import Moment, Register
from deepspeed_cad.exchange.failure.watchdog import Alarm
from deepspeed_cad.exchange.group import Group, OwnGroup, rank_of
from deepspeed_cad.exchange.native_calls import Table
from deepspeed_cad.exchange.placement import place
from deepspeed_cad.exchange.rows import KindRows, rows_of_kinds, take
from deepspeed_cad.exchange.transfers import Transfers
from deepspeed_cad.exchange.transport import UNNAMED, Outgoing, Returning
from deepspeed_cad.schedule import Schedule
from deepspeed_cad.schedule.room import Room


class C10dTransport:
    """Exchange through a torch.distributed process group of its own."""

    name = "c10d"
    landing_bytes = 0
    two_ways = False
    most_waves = 1
    """Both ways share one queue of collectives, so nothing comes back before all is out; and where one starts on a CPU,
    the host waits for the numbers of all ranks."""

    def __init__(
        self,
        group: Group,
        device: torch.device,
        liveness: Liveness | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        self.group, self.device = group, device
        self.exchanges = 0
        self.bytes_sent = 0
        self.transfers: Transfers | None = None
        """Only on CPUs, where ranks have met when the data starts to move."""
        self.register = Register()
        self._alarm = Alarm(rank_of(group), liveness, timeout_s)
        self._carrier: Carrier = (
            ComparedFirst(group, self._alarm)
            if device.type == "cpu"
            else Collectives(group, device, self._alarm)
        )  # fmt: skip
        self._kinds: WeakKeyDictionary[Schedule, tuple[KindRows, KindRows]] = WeakKeyDictionary()

    def dispatch(
        self, schedule: Schedule, fields: list[Outgoing], nano_batch: int, moment: Moment = UNNAMED
    ) -> _Dispatched:
        """See Transport.dispatch; nano-batches need no care here, every exchange has buffers of its own."""
        kinds = self._look_up(schedule)
        packed = [take(field.home, kinds[field.kind].home) for field in fields]
        counts = [(kinds[field.kind].sent, kinds[field.kind].received) for field in fields]
        arrival = self._start(moment, nano_batch, False, schedule, packed, counts)
        return _Dispatched(self, schedule, fields, kinds, arrival)

    def give_back(
        self, schedule: Schedule, fields: list[Returning], nano_batch: int, moment: Moment = UNNAMED
    ) -> _Returned:
        """See Transport.give_back."""
        kinds = self._look_up(schedule)
        packed = [field.served.index_select(0, kinds[field.kind].received_row) for field in fields]
        counts = [(kinds[field.kind].received, kinds[field.kind].sent) for field in fields]
        arrival = self._start(moment, nano_batch, True, schedule, packed, counts)
        return _Returned(self, fields, kinds, arrival)

    def make_room(self, schedules: Sequence[Schedule], room: Room, nano_batch: int) -> None:
        """Nothing is kept between exchanges: each takes its buffers from torch's allocator, and gives them back."""

    def close(self) -> None:
        """The process group belongs to the session."""
        self._carrier.close()

    def abandon(self) -> Callable[[], None]:
        """See Transport.abandon. On the CPU only."""
        assert isinstance(self._carrier, ComparedFirst) and isinstance(self.group, OwnGroup)
        self.group.abandon()
        del self.group, self._carrier
        return lambda: None

    def finish(self, arrival: _Arrival) -> list[torch.Tensor]:
        """Wait for a transfer: one [rows, width] tensor per field. A dead peer is a CADPeerError that names it."""
        return arrival.split(self._carrier.finish(arrival.under_way))

    def _start(
        self,
        moment: Moment,
        nano_batch: int,
        is_return: bool,
        schedule: Schedule,
        packed: list[torch.Tensor],
        counts: list[tuple[Table, Table]],
    ) -> _Arrival:
        widths = [rows.shape[1] * rows.element_size() for rows in packed]
        dtypes = [rows.dtype for rows in packed]
        peers = range(schedule.ranks)
        chunks = [torch.split(rows.contiguous().view(torch.uint8).reshape(-1), (sent * width).tolist())
                  for rows, (sent, _), width in zip(packed, counts, widths, strict=True)]  # fmt: skip
        outgoing = torch.cat([field[peer] for peer in peers for field in chunks])
        to_peers, from_peers = (
            [sum(int(each[way][p]) * width for each, width in zip(counts, widths, strict=True)) for p in peers]
            for way in (0, 1)
        )
        self.exchanges += 1
        self.bytes_sent += outgoing.numel()
        identity = self.register.next(self.exchanges, moment, nano_batch, is_return, schedule)
        under_way = self._carrier.start(identity, outgoing, to_peers, from_peers)
        self._note(under_way, to_peers, from_peers)
        return _Arrival(under_way, [received for _, received in counts], widths, dtypes)

    def _note(self, under_way: UnderWay, to_peers: list[int], from_peers: list[int]) -> None:
        """Have the end of a transfer noted when it comes, not when somebody waits for it."""
        transfers, begun = self.transfers, time.perf_counter()
        if transfers is None or self.device.type != "cpu":
            return
        size = transfers.size(to_peers, from_peers)
        if size is not None:
            ended = under_way.data.get_future()
            ended.add_done_callback(lambda _: transfers.note(size, time.perf_counter() - begun))

    def _look_up(self, schedule: Schedule) -> tuple[KindRows, KindRows]:
        found = self._kinds.get(schedule)
        if found is None:
            found = self._kinds[schedule] = rows_of_kinds(schedule, self.device)
        return found


@dataclass
class _Arrival:
    under_way: UnderWay
    rows: list[Table]
    """Of each field, from every peer."""
    widths: list[int]
    dtypes: list[torch.dtype]

    def split(self, incoming: torch.Tensor) -> list[torch.Tensor]:
        """One [rows, width] tensor per field, rows in table order."""
        peers = range(len(self.rows[0])) if self.rows else range(0)
        sizes = [int(counts[p]) * width for p in peers for counts, width in zip(self.rows, self.widths, strict=True)]
        parts = torch.split(incoming, sizes)
        fields = len(self.rows)
        return [
            torch.cat(list(parts[i::fields])).view(dtype).reshape(int(counts.sum()), -1)
            if counts.sum()
            else incoming.new_empty(0, dtype=dtype).reshape(0, width // dtype.itemsize)
            for i, (counts, width, dtype) in enumerate(zip(self.rows, self.widths, self.dtypes, strict=True))
        ]


@dataclass
class _Dispatched:
    transport: C10dTransport
    schedule: Schedule
    fields: list[Outgoing]
    kinds: tuple[KindRows, KindRows]
    arrival: _Arrival

    def wait(self) -> list[torch.Tensor]:
        """See exchange.transport.Dispatched."""
        return [
            self.kinds[field.kind].group_major(self.schedule, field, arrived)
            for field, arrived in zip(self.fields, self.transport.finish(self.arrival), strict=True)
        ]


@dataclass
class _Returned:
    transport: C10dTransport
    fields: list[Returning]
    kinds: tuple[KindRows, KindRows]
    arrival: _Arrival

    def wait(self) -> None:
        """See exchange.transport.Returned."""
        for field, arrived in zip(self.fields, self.transport.finish(self.arrival), strict=True):
            place(self.kinds[field.kind].placement, arrived, field.served, field.home, field.add)
