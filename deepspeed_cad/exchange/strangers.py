"""What the `mixed` transport exchanges with ranks whose memory this one does not map: NCCL messages, in the same
exchange as peer copies between neighbours (landed.py).

What travels between hosts is received straight into the landing areas, between the rows that neighbours copy there; so
what arrived is one buffer, and what came back is placed by one launch, in the same order as by any other transport. A
rank whose host has no other rank, or whose GPUs do not reach each other, has no neighbours and uses messages alone.

Why messages are never received too early. Every exchange makes the message stream wait for what was queued on the
current stream before, whether it has messages or not. The areas take turns as landed.py says, so what landed in an
area before has been used by then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch

from deepspeed_cad.errors import CADError
from deepspeed_cad.exchange.copies import FarPart, far_part, list_messages
from deepspeed_cad.exchange.failure.roll_call import RollCall
from deepspeed_cad.exchange.failure.watchdog import Alarm
from deepspeed_cad.exchange.group import Group, open_store, rank_of, size_of
from deepspeed_cad.exchange.landing import NoRoomError
from deepspeed_cad.exchange.native_calls import Table
from deepspeed_cad.exchange.nccl import Messenger, TwoWays
from deepspeed_cad.exchange.placement import take, upload
from deepspeed_cad.exchange.transport import Outgoing, Returning
from deepspeed_cad.schedule import KEY, QUERY, Schedule
from deepspeed_cad.schedule.room import BACK, OUT, Room, lane_bytes


class Strangers:
    """See the top of this file."""

    def __init__(self, group: Group, device: torch.device, near: list[int], alarm: Alarm) -> None:
        """Collective: every rank of the group makes one at the same time. `near`: see LandingTransport."""
        if len(near) != size_of(group):
            raise CADError(f"{len(near)} numbers of neighbourhoods for a group of {size_of(group)} ranks")
        self.device = device
        self.messages = TwoWays(group, device, alarm, apart=True)
        self._near = np.array(near)
        self._members = np.flatnonzero(self._near == self._near[rank_of(group)])
        self._room: dict[tuple[int, ...], int] = {}
        """Bytes that landing areas of every host were made for, the same on all ranks; see `_growing`."""
        self._roll_call = RollCall(open_store(group, "room"), np.arange(len(near)), rank_of(group), alarm)
        self._far: WeakKeyDictionary[Schedule, list[tuple[FarPart, torch.Tensor]]] = WeakKeyDictionary()
        """Of query and of key rows; and on the device, what packs them."""

    def outgoing(
        self, schedule: Schedule, fields: list[Outgoing], landed: list[torch.Tensor]
    ) -> tuple[Messenger, Table, list[torch.Tensor]]:
        """The messages of a dispatch, by which way they go, and what they read; `landed`: where they arrive here."""
        far = self._look_up(schedule)
        packed = [take(f.home, far[f.kind][1]) for f in fields]
        runs = [(far[f.kind][0].packed, far[f.kind][0].served) for f in fields]
        return self.messages.out, list_messages(runs, packed, landed), packed

    def returning(
        self, schedule: Schedule, fields: list[Returning], landed: list[torch.Tensor]
    ) -> tuple[Messenger, Table, list[torch.Tensor]]:
        """The same of a return."""
        parts = [self._look_up(schedule)[f.kind][0] for f in fields]
        runs = [(part.served, part.landed) for part in parts]
        return self.messages.back, list_messages(runs, [f.served for f in fields], landed), []

    def make_room(self, grow: Callable[[], None], schedules: Sequence[Schedule], room: Room, nano_batch: int) -> None:
        """Each host grows by itself (`grow`); where any does, all hosts hear whether it could. See Transport."""
        growing, problem = self._growing(schedules, room, nano_batch), ""
        try:
            grow()
        except NoRoomError as error:
            problem = str(error)
        if not growing:
            if problem:
                raise CADError(problem)
            return
        told = [word for word in self._roll_call.call("memory on all hosts", problem) if word]
        if told:
            raise NoRoomError(" ".join(dict.fromkeys(told)))
        self._room.update(growing)

    def _growing(self, schedules: Sequence[Schedule], room: Room, nano_batch: int) -> dict[tuple[int, ...], int]:
        """What landing areas of any host need beyond what they have, as every rank can tell of all: bytes by host, by
        nano-batch, way and lane."""
        found: dict[tuple[int, ...], int] = {}
        for host in np.unique(self._near):
            members = np.flatnonzero(self._near == host)
            out = lane_bytes([one.served_rows[members] for one in schedules], room.out, OUT)
            back = lane_bytes([one.landed_rows[members] for one in schedules], room.back, BACK)
            for way, lanes in enumerate((out, back)):
                for number, sizes in enumerate(lanes):
                    key, most = (int(host), nano_batch, way, number), int(sizes.max(initial=0))
                    if most > self._room.get(key, -1):
                        found[key] = int(most * room.headroom)
        return found

    def leave(self) -> None:
        """Leave the communicators and stop what is under way; harmless when called again."""
        self.messages.leave()

    def _look_up(self, schedule: Schedule) -> list[tuple[FarPart, torch.Tensor]]:
        found = self._far.get(schedule)
        if found is None:
            parts = [far_part(schedule, self._members, kind) for kind in (QUERY, KEY)]
            found = self._far[schedule] = [(part, upload(part.home_index, self.device)) for part in parts]
        return found
