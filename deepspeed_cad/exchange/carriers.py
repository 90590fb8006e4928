"""Carriers: what moves packed rows between all ranks of a group (packed.py). Here those of torch.distributed; nccl.py
has the one with a communicator of its own.

In: of each field its rows, packed by peer, and how many go to each peer and come from it. Out: the rows that arrive,
in the order of the schedule's tables. With them travel the numbers of the exchanges (failure/identity.py).

Collectives move one buffer of bytes, ordered by peer and then by field.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from deepspeed_cad.errors import CADError
from deepspeed_cad.exchange.failure.board import Liveness
from deepspeed_cad.exchange.failure.identity import RING, Comparison, Identity, compare
from deepspeed_cad.exchange.failure.watchdog import Alarm, Watchdog
from deepspeed_cad.exchange.group import Group, OwnGroup, abort, processes_of, rank_of, size_of
from deepspeed_cad.exchange.native_calls import Table
from deepspeed_cad.exchange.transfers import Transfers


@dataclass(eq=False)
class UnderWay:
    """One transfer."""

    identity: Identity
    outgoing: torch.Tensor
    """Held until the transfer is over."""
    incoming: torch.Tensor
    data: dist.Work
    numbers: dist.Work | None = None
    """Is over when the numbers are there; None where they were compared before."""


@dataclass(frozen=True, eq=False)
class Load:
    """What an exchange moves."""

    identity: Identity
    packed: list[torch.Tensor]
    """[rows, width] of every field, ordered by peer."""
    counts: list[tuple[Table, Table]]
    """Of each, its rows to every peer and from it."""
    is_return: bool
    transfers: Transfers | None
    """Notes how long it took, where the carrier can tell."""


class Carrier(Protocol):
    """Moves packed rows."""

    name: str
    """Of the transport."""
    alarm: Alarm
    most_waves: int
    two_ways: bool
    """These two as a Transport has them."""
    stream: torch.cuda.Stream | None
    """Where the newest transfer ends, if that is one stream: for timelines."""

    def start(self, load: Load) -> Any:
        """Begin to move an exchange; gives what the other methods take."""

    def finish(self, parcel: Any) -> list[torch.Tensor]:
        """What arrived, [rows, width] of every field, complete for work queued after this call.

        A dead peer is a CADPeerError that names it.
        """

    def release(self, parcel: Any) -> None:
        """What arrived has been read, by work queued before this call."""

    def close(self) -> None:
        """Nothing is under way any more."""

    def abandon(self) -> Callable[[], None]:
        """See Transport.abandon."""


@dataclass(eq=False)
class Parcel:
    """One exchange as bytes."""

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


class ByteCarrier(ABC):
    """Packs all fields into one buffer of bytes."""

    name = "c10d"
    alarm: Alarm
    stream: torch.cuda.Stream | None = None
    two_ways = False
    most_waves = 1
    """Both ways share one queue of collectives, so nothing comes back before all is out; and where one starts on a CPU,
    the host waits for the numbers of all ranks."""

    def start(self, load: Load) -> Parcel:
        """See Carrier. Transfers are noted on CPUs alone, where ranks have met when data starts to move."""
        packed, counts, transfers = load.packed, load.counts, load.transfers
        peers = range(len(counts[0][0]))
        widths = [rows.shape[1] * rows.element_size() for rows in packed]
        chunks = [torch.split(rows.contiguous().view(torch.uint8).reshape(-1), (sent * width).tolist())
                  for rows, (sent, _), width in zip(packed, counts, widths, strict=True)]  # fmt: skip
        outgoing = torch.cat([field[peer] for peer in peers for field in chunks])
        to_peers, from_peers = (
            [sum(int(each[way][p]) * width for each, width in zip(counts, widths, strict=True)) for p in peers]
            for way in (0, 1)
        )
        begun = time.perf_counter()
        under_way = self.begin(load.identity, outgoing, to_peers, from_peers)
        if transfers is not None and outgoing.device.type == "cpu":
            size = transfers.size(to_peers, from_peers)
            if size is not None:
                # Noted when the end comes, not when somebody waits for it.
                ended = under_way.data.get_future()
                ended.add_done_callback(lambda _: transfers.note(size, time.perf_counter() - begun))
        return Parcel(under_way, [received for _, received in counts], widths, [rows.dtype for rows in packed])

    def finish(self, parcel: Parcel) -> list[torch.Tensor]:
        return parcel.split(self.end(parcel.under_way))

    def release(self, parcel: Parcel) -> None:  # noqa: B027
        """See Carrier."""

    @abstractmethod
    def begin(self, identity: Identity, outgoing: torch.Tensor, to_peers: list[int], from_peers: list[int]) -> UnderWay:
        """Begin a transfer: uint8 [sum of `to_peers`] from here, so many bytes to each peer, and as many from each."""

    @abstractmethod
    def end(self, under_way: UnderWay) -> torch.Tensor:
        """What arrived, complete for work queued after this call."""


class ComparedFirst(ByteCarrier):
    """Collectives of gloo: one gathers the numbers, and once they are compared another moves the data.

    Where exchanges differ, so may the sizes of what they move, and gloo ends a process whose buffer is too small; so no
    data move before. The host waits for the numbers where an exchange starts: what is under way then is the data.
    """

    def __init__(self, group: Group, alarm: Alarm) -> None:
        self.group, self.alarm = processes_of(group), alarm
        self._owner: Group = group

    def begin(self, identity: Identity, outgoing: torch.Tensor, to_peers: list[int], from_peers: list[int]) -> UnderWay:
        self.alarm.check()
        numbers = torch.zeros(len(to_peers), dtype=torch.int64)
        mine, incoming = torch.tensor([identity.number]), torch.empty(sum(from_peers), dtype=torch.uint8)
        with Liveness.watch(self.alarm.liveness, str(identity), with_servers=True):
            self._wait(dist.all_gather(list(numbers.split(1)), mine, group=self.group, async_op=True), identity)
            found = compare(dict(enumerate(numbers.tolist())))
            if found:
                self.alarm.stop(found)
                self.alarm.check()
            data = dist.all_to_all_single(
                incoming, outgoing, from_peers, to_peers, group=self.group, async_op=True
            )  # fmt: skip
        return UnderWay(identity, outgoing, incoming, data)

    def end(self, under_way: UnderWay) -> torch.Tensor:
        self.alarm.check()
        with Liveness.watch(self.alarm.liveness, str(under_way.identity), with_servers=True):
            self._wait(under_way.data, under_way.identity)
        return under_way.incoming

    def close(self) -> None:
        """The process group belongs to the session."""

    def abandon(self) -> Callable[[], None]:
        assert isinstance(self._owner, OwnGroup)
        self._owner.abandon()
        del self.group, self._owner
        return lambda: None

    def _wait(self, work: dist.Work, identity: Identity) -> None:
        self.alarm.liveness.patiently(work.is_completed, str(identity), identity.index, with_servers=True)
        work.wait()


class Collectives(ByteCarrier):
    """Collectives of a backend for GPUs: one gathers the numbers, one moves the data.

    Where exchanges differ, so may the sizes of what they move, and the second may hang; the first is over by then, and
    the error is known. What hangs is aborted, and the group with it.
    """

    def __init__(self, group: Group, device: torch.device, alarm: Alarm) -> None:
        self.group, self.device, self.alarm = processes_of(group), device, alarm
        self.rank, self.ranks = rank_of(group), size_of(group)
        ring = torch.zeros(RING, self.ranks, dtype=torch.int64, device=device)
        self._comparison = Comparison(ring, self.rank)
        self._watchdog = Watchdog(alarm, partial(abort, group, device), device, self._comparison)

    def begin(self, identity: Identity, outgoing: torch.Tensor, to_peers: list[int], from_peers: list[int]) -> UnderWay:
        self.alarm.check()
        row = self._comparison.ring[identity.index % RING]
        self._comparison.newest = identity.index
        mine = torch.full((1,), identity.number, dtype=torch.int64, device=self.device)
        incoming = torch.empty(sum(from_peers), dtype=torch.uint8, device=self.device)
        with Liveness.watch(self.alarm.liveness, str(identity)), self._watchdog.inside(identity):
            numbers = dist.all_gather_into_tensor(row, mine, group=self.group, async_op=True)
            data = dist.all_to_all_single(
                incoming, outgoing, from_peers, to_peers, group=self.group, async_op=True
            )  # fmt: skip
        return UnderWay(identity, outgoing, incoming, data, numbers)

    def end(self, under_way: UnderWay) -> torch.Tensor:
        self.alarm.check()
        label, current = under_way.identity, torch.cuda.current_stream(self.device)
        before, known, after = (torch.cuda.Event() for _ in range(3))
        before.record(current)
        with Liveness.watch(self.alarm.liveness, str(label)):
            if under_way.numbers is not None:
                under_way.numbers.wait()
            known.record(current)
            under_way.data.wait()
            after.record(current)
        others = np.flatnonzero(np.arange(self.ranks) != self.rank).tolist()
        self._watchdog.track(before, known, label, partial(self._comparison.arrived, under_way.identity, others))
        self._watchdog.track(known, after, label)
        return under_way.incoming

    def close(self) -> None:
        self._watchdog.close()

    def abandon(self) -> Callable[[], None]:
        """Raise CADError: of collectives on GPUs nothing can be given up while a server is waited for, and no session
        that may lose one takes them (server/surviving/members.py)."""
        raise CADError("transport c10d cannot be given up on GPUs")
