"""The `mixed` transport: peer copies between ranks of one host, NCCL messages between hosts, in one exchange.

It is the `nvlink` transport of this rank's host, and beside it, for each way, a communicator of all ranks on a stream
of its own. What travels between hosts is received straight into the landing areas, between the rows that neighbours
copy there; so what arrived is one buffer, and what came back is placed by one launch, in the same order as by any other
transport.
A rank whose host has no other rank, or whose GPUs do not reach each other, has no neighbours and uses messages alone.

Why messages are never received too early. Every exchange makes the message stream wait for what was queued on the
current stream before, whether it has messages or not. The areas take turns as nvlink.py says, so what landed in an
area before has been used by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch

from deepspeed_cad.errors import CADError
from deepspeed_cad.exchange.failure.board import Liveness
from deepspeed_cad.exchange.failure.identity import Moment
from deepspeed_cad.exchange.failure.roll_call import RollCall
from deepspeed_cad.exchange.failure.watchdog import Alarm
from deepspeed_cad.exchange.group import Group, rank_of, size_of
from deepspeed_cad.exchange.landing import NoRoomError
from deepspeed_cad.exchange.messages import Messenger, TwoWays
from deepspeed_cad.exchange.native_calls import Table
from deepspeed_cad.exchange.nvlink import NvlinkTransport, _Dispatched, _Returned, _UnderWay
from deepspeed_cad.exchange.peers import host_group, open_store
from deepspeed_cad.exchange.placement import upload
from deepspeed_cad.exchange.rows import take
from deepspeed_cad.exchange.split import FarPart, far_part, list_messages
from deepspeed_cad.exchange.transport import UNNAMED, Outgoing, Returning
from deepspeed_cad.schedule import KEY, QUERY, Schedule
from deepspeed_cad.schedule.room import BACK, OUT, Room, lane_bytes


@dataclass(frozen=True, eq=False)
class _Far:
    """A FarPart and, on the device, what packs its rows."""

    part: FarPart
    home: torch.Tensor


class MixedTransport(NvlinkTransport):
    """Exchange by peer copies where there is access to the peer's memory, by NCCL elsewhere."""

    name = "mixed"
    most_waves = 8

    def __init__(
        self,
        group: Group,
        device: torch.device,
        near: list[int],
        liveness: Liveness | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        """Collective: every rank of the group makes one at the same time.

        Args:
            near: one number for every rank; ranks with the same number exchange by peer copies.
        """
        if len(near) != size_of(group):
            raise CADError(f"{len(near)} numbers of neighbourhoods for a group of {size_of(group)} ranks")
        alarm = Alarm(rank_of(group), liveness, timeout_s)
        # First what all ranks take part in: making landing areas can fail on one host alone.
        self.messages = TwoWays(group, device, alarm, apart=True)
        try:
            super().__init__(group, device, liveness, timeout_s, host_group(group, near), alarm)
        except BaseException:
            self.messages.leave()
            raise
        self.stream = None
        self._near = np.array(near)
        self._room: dict[tuple[int, ...], int] = {}
        """Bytes that landing areas of every host were made for, the same on all ranks; see `_growing`."""
        self._hosts_roll_call = RollCall(open_store(group, "room"), np.arange(len(near)), rank_of(group), alarm)
        self._far: WeakKeyDictionary[Schedule, tuple[_Far, _Far]] = WeakKeyDictionary()

    def dispatch(
        self, schedule: Schedule, fields: list[Outgoing], nano_batch: int, moment: Moment = UNNAMED
    ) -> _Dispatched:
        """See NvlinkTransport.dispatch."""
        out = super().dispatch(schedule, fields, nano_batch, moment)
        far = self._look_up(schedule)
        packed = [take(f.home, far[f.kind].home) for f in fields]
        table = []
        for f, rows, landed in zip(fields, packed, out.landed):
            width = landed.shape[1] * landed.element_size()
            table.append(list_messages(True, far[f.kind].part.packed, rows.data_ptr(), width))
            table.append(list_messages(False, far[f.kind].part.served, landed.data_ptr(), width))
        self._exchange(self.messages.out, out.under_way, table, packed)
        return out

    def give_back(
        self, schedule: Schedule, fields: list[Returning], nano_batch: int, moment: Moment = UNNAMED
    ) -> _Returned:
        """See NvlinkTransport.give_back."""
        back = super().give_back(schedule, fields, nano_batch, moment)
        far = self._look_up(schedule)
        table = []
        for f, landed in zip(fields, back.landed):
            width = landed.shape[1] * landed.element_size()
            table.append(list_messages(True, far[f.kind].part.served, f.served.data_ptr(), width))
            table.append(list_messages(False, far[f.kind].part.landed, landed.data_ptr(), width))
        self._exchange(self.messages.back, back.under_way, table, [])
        return back

    def make_room(self, schedules: Sequence[Schedule], room: Room, nano_batch: int) -> None:
        """See NvlinkTransport.make_room. Each host grows by itself; where any does, all hosts hear whether it could."""
        growing, problem = self._growing(schedules, room, nano_batch), ""
        try:
            super().make_room(schedules, room, nano_batch)
        except NoRoomError as error:
            problem = str(error)
        if not growing:
            if problem:
                raise CADError(problem)
            return
        told = [word for word in self._hosts_roll_call.call("memory on all hosts", problem) if word]
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

    def close(self) -> None:
        """Release the landing areas and leave the communicator."""
        try:
            super().close()
        finally:
            self.messages.leave()

    def _exchange(self, way: Messenger, under_way: _UnderWay, table: list[Table], packed: list[torch.Tensor]) -> None:
        """Queue the messages of an exchange whose peer copies are queued; waiting for it waits for both.

        The watchdog looks after messages apart from the wait of whoever uses what arrives: growing a landing area waits
        for the whole device before.
        """
        messages = np.ascontiguousarray(np.concatenate([np.zeros((0, 4), np.int64), *table]))
        under_way.readers.append(way.stream)
        under_way.sources.extend(packed)
        done = way.exchange(
            under_way.identity, messages, self._comparison, self._watchdog, self.transfers
        )  # fmt: skip
        if done is not None:
            under_way.done.append(done)
            self.bytes_sent += int(messages[messages[:, 0] == 1, 3].sum())

    def _look_up(self, schedule: Schedule) -> tuple[_Far, _Far]:
        found = self._far.get(schedule)
        if found is None:
            found = self._far[schedule] = (self._build(schedule, QUERY), self._build(schedule, KEY))
        return found

    def _build(self, schedule: Schedule, kind: int) -> _Far:
        part = far_part(schedule, self.peers.members, kind)
        return _Far(part, upload(part.home_index, self.device))

    def _give_up(self) -> None:
        """See NvlinkTransport: first the waits for neighbours end, so that messages behind them can be stopped."""
        try:
            super()._give_up()
        finally:
            self.messages.leave()
