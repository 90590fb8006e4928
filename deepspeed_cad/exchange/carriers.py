"""What carries the bytes of the portable transport: collectives of torch.distributed, on the CPU or on a GPU.

In: one flat buffer, ordered by peer, and the bytes to and from each. Out: a buffer that fills. With it travel the
numbers of the exchanges (failure/identity.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from deepspeed_cad.exchange.failure.board import Liveness
from deepspeed_cad.exchange.failure.identity import RING, Comparison, Identity, compare
from deepspeed_cad.exchange.failure.watchdog import Alarm, Watchdog
from deepspeed_cad.exchange.group import Group, abort, processes_of, rank_of, size_of


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


class Carrier(Protocol):
    """Carries the bytes of exchanges."""

    def start(self, identity: Identity, outgoing: torch.Tensor, to_peers: list[int], from_peers: list[int]) -> UnderWay:
        """Begin a transfer: uint8 [sum of `to_peers`] from here, so many bytes to each peer, and as many from each."""

    def finish(self, under_way: UnderWay) -> torch.Tensor:
        """What arrived, complete for work queued after this call."""

    def close(self) -> None:
        """Nothing is under way any more."""


class ComparedFirst:
    """Collectives of gloo: one gathers the numbers, and once they are compared another moves the data.

    Where exchanges differ, so may the sizes of what they move, and gloo ends a process whose buffer is too small; so no
    data move before. The host waits for the numbers where an exchange starts: what is under way then is the data.
    """

    def __init__(self, group: Group, alarm: Alarm) -> None:
        self.group, self.alarm = processes_of(group), alarm

    def start(self, identity: Identity, outgoing: torch.Tensor, to_peers: list[int], from_peers: list[int]) -> UnderWay:
        """See Carrier."""
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

    def finish(self, under_way: UnderWay) -> torch.Tensor:
        """See Carrier."""
        self.alarm.check()
        with Liveness.watch(self.alarm.liveness, str(under_way.identity), with_servers=True):
            self._wait(under_way.data, under_way.identity)
        return under_way.incoming

    def close(self) -> None:
        """See Carrier."""

    def _wait(self, work: dist.Work, identity: Identity) -> None:
        self.alarm.liveness.patiently(work.is_completed, str(identity), identity.index, with_servers=True)
        work.wait()


class Collectives:
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

    def start(self, identity: Identity, outgoing: torch.Tensor, to_peers: list[int], from_peers: list[int]) -> UnderWay:
        """See Carrier."""
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

    def finish(self, under_way: UnderWay) -> torch.Tensor:
        """See Carrier."""
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
        """See Carrier."""
        self._watchdog.close()
