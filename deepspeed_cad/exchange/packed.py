"""The transports `nccl` and `c10d`: rows are packed, travel as one message per peer, and are put into place on arrival.

For ranks without access to each other's memory, and for CPUs. In: schedules and tensors. Out: the same as by any other
transport. What moves the packed rows is a `Carrier` (carriers.py, nccl.py). Every exchange takes its buffers from
torch's allocator and gives them back, so nano-batches and waves need no memory of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from deepspeed_cad.exchange.carriers import Carrier, Collectives, ComparedFirst, Load
from deepspeed_cad.exchange.failure.identity import Moment, Register
from deepspeed_cad.exchange.failure.watchdog import Alarm
from deepspeed_cad.exchange.group import Group
from deepspeed_cad.exchange.native_calls import Table
from deepspeed_cad.exchange.nccl import NcclCarrier
from deepspeed_cad.exchange.placement import place
from deepspeed_cad.exchange.rows import KindRows, rows_of_kinds, take
from deepspeed_cad.exchange.transfers import Transfers
from deepspeed_cad.exchange.transport import UNNAMED, Dispatched, Outgoing, Returned, Returning, UnderWay
from deepspeed_cad.schedule import Schedule
from deepspeed_cad.schedule.room import Room


def c10d_transport(group: Group, device: torch.device, alarm: Alarm) -> PackedTransport:
    """The `c10d` transport: torch.distributed's own collectives on a process group of CAD's own."""
    carrier = ComparedFirst(group, alarm) if device.type == "cpu" else Collectives(group, device, alarm)
    return PackedTransport(carrier, device)


def nccl_transport(group: Group, device: torch.device, alarm: Alarm, several_hosts: bool = False) -> PackedTransport:
    """The `nccl` transport. Collective: every rank of the group opens it at the same time, `several_hosts` alike."""
    return PackedTransport(NcclCarrier(group, device, alarm, several_hosts), device)


class PackedTransport:
    """See the top of this file, and Transport."""

    landing_bytes = 0

    def __init__(self, carrier: Carrier, device: torch.device) -> None:
        self.carrier, self.device = carrier, device
        self.name, self.most_waves = carrier.name, carrier.most_waves
        self.exchanges = 0
        self.bytes_sent = 0
        self.transfers: Transfers | None = None
        self.register = Register()
        self._kinds: WeakKeyDictionary[Schedule, tuple[KindRows, KindRows]] = WeakKeyDictionary()

    @property
    def two_ways(self) -> bool:
        return self.carrier.two_ways

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """Where the messages of the newest exchange end, if that is known: for timelines."""
        return self.carrier.stream

    def dispatch(
        self, schedule: Schedule, fields: list[Outgoing], nano_batch: int, moment: Moment = UNNAMED
    ) -> Dispatched:
        self.carrier.alarm.check()
        kinds = self._look_up(schedule)
        packed = [take(f.home, kinds[f.kind].home) for f in fields]
        counts = [(kinds[f.kind].sent, kinds[f.kind].received) for f in fields]
        parcel = self._start(packed, counts, schedule, nano_batch, moment, is_return=False)
        return UnderWay(parcel, partial(self._arrange, schedule, fields, kinds))

    def give_back(
        self, schedule: Schedule, fields: list[Returning], nano_batch: int, moment: Moment = UNNAMED
    ) -> Returned:
        self.carrier.alarm.check()
        kinds = self._look_up(schedule)
        packed = [f.served.index_select(0, kinds[f.kind].received_row) for f in fields]
        counts = [(kinds[f.kind].received, kinds[f.kind].sent) for f in fields]
        parcel = self._start(packed, counts, schedule, nano_batch, moment, is_return=True)
        return UnderWay(parcel, partial(self._place, fields, kinds))

    def make_room(self, schedules: Sequence[Schedule], room: Room, nano_batch: int) -> None:
        """Nothing is kept between exchanges."""

    def close(self) -> None:
        self.carrier.close()

    def abandon(self) -> Callable[[], None]:
        return self.carrier.abandon()

    def _start(
        self,
        packed: list[torch.Tensor],
        counts: list[tuple[Table, Table]],
        schedule: Schedule,
        nano_batch: int,
        moment: Moment,
        is_return: bool,
    ) -> Any:
        self.exchanges += 1
        identity = self.register.next(self.exchanges, moment, nano_batch, is_return, schedule)
        self.bytes_sent += sum(
            int(sent.sum()) * rows.shape[1] * rows.element_size() for rows, (sent, _) in zip(packed, counts)
        )
        return self.carrier.start(Load(identity, packed, counts, is_return, self.transfers))

    def _arrange(
        self, schedule: Schedule, fields: list[Outgoing], kinds: tuple[KindRows, KindRows], parcel: Any
    ) -> list[torch.Tensor]:
        arrived = self.carrier.finish(parcel)
        buffers = [kinds[f.kind].group_major(schedule, f, rows) for f, rows in zip(fields, arrived)]
        self.carrier.release(parcel)
        return buffers

    def _place(self, fields: list[Returning], kinds: tuple[KindRows, KindRows], parcel: Any) -> None:
        for f, rows in zip(fields, self.carrier.finish(parcel)):
            place(kinds[f.kind].placement, rows, f.served, f.home, f.add)
        self.carrier.release(parcel)

    def _look_up(self, schedule: Schedule) -> tuple[KindRows, KindRows]:
        found = self._kinds.get(schedule)
        if found is None:
            found = self._kinds[schedule] = rows_of_kinds(schedule, self.device)
        return found
