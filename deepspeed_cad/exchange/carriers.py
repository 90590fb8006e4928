"""What carries the bytes of the portable transport: messages between pairs on the CPU, collectives on a GPU.

In: one flat buffer, ordered by peer, and the bytes to and from each. Out: a buffer that fills. With it travel the
numbers of the exchanges (identity.py).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from deepspeed_cad.exchange.alarm import Alarm
from deepspeed_cad.exchange.comparison import RING, Comparison
from deepspeed_cad.exchange.identity import Identity, compare
from deepspeed_cad.exchange.liveness import Liveness
from deepspeed_cad.exchange.watchdog import Watchdog

_DATA_TAG = 1 << 30
KEPT = 16
"""Transfers that nobody waited for and whose memory is kept, for peers that may still write to it."""


@dataclass(eq=False)
class UnderWay:
    """One transfer."""

    identity: Identity
    outgoing: torch.Tensor
    """Held until the transfer is over."""
    incoming: torch.Tensor
    works: list[dist.Work]
    numbers: torch.Tensor
    """[ranks]: the numbers of the exchange on all ranks."""
    gathered: dist.Work
    """Is over when the numbers are there."""


class Carrier(Protocol):
    """Carries the bytes of exchanges."""

    def start(self, identity: Identity, outgoing: torch.Tensor, to_peers: list[int], from_peers: list[int]) -> UnderWay:
        """Begin a transfer: uint8 [sum of `to_peers`] from here, so many bytes to each peer, and as many from each."""

    def finish(self, under_way: UnderWay) -> torch.Tensor:
        """What arrived, complete for work queued after this call."""

    def close(self) -> None:
        """Nothing is under way any more."""


class PairMessages:
    """Messages of gloo to those peers for which there are data, and a gathering of everyone's number beside them.

    The data have the number as their tag, so what belongs to another exchange is never received: its size would be
    another, and gloo ends a process whose buffer is too small. The numbers, whose size never changes, show it. Nobody
    waits for numbers to send data.
    """

    def __init__(self, group: dist.ProcessGroup, alarm: Alarm) -> None:
        self.group, self.alarm = group, alarm
        self.rank = dist.get_rank(group)
        self._open: deque[UnderWay] = deque()

    def start(self, identity: Identity, outgoing: torch.Tensor, to_peers: list[int], from_peers: list[int]) -> UnderWay:
        """See Carrier."""
        self.alarm.check()
        incoming = torch.empty(sum(from_peers), dtype=torch.uint8)
        numbers = torch.zeros(len(to_peers), dtype=torch.int64)
        out, into = torch.split(outgoing, to_peers), torch.split(incoming, from_peers)
        tag = _DATA_TAG | identity.number & (_DATA_TAG - 1)
        with Liveness.watch(self.alarm.liveness, str(identity)):
            gathered = dist.all_gather(
                list(numbers.split(1)), torch.tensor([identity.number]), group=self.group, async_op=True
            )
            works = [self.group.recv([into[peer]], peer, tag) for peer, size in enumerate(from_peers) if size]
            works += [self.group.send([out[peer]], peer, tag) for peer, size in enumerate(to_peers) if size]
        made = UnderWay(identity, outgoing, incoming, works, numbers, gathered)
        self._open.append(made)
        if len(self._open) > KEPT:
            self.finish(self._open[0])
        return made

    def finish(self, under_way: UnderWay) -> torch.Tensor:
        """See Carrier. Numbers first: where they differ, the data may never come."""
        self.alarm.check()
        with Liveness.watch(self.alarm.liveness, str(under_way.identity)):
            if self.alarm.liveness is not None:
                self.alarm.liveness.patiently(under_way.gathered, str(under_way.identity))
            under_way.gathered.wait()
            found = compare(dict(enumerate(under_way.numbers.tolist())))
            if found:
                self.alarm.stop(found)
                self.alarm.check()
            for work in under_way.works:
                work.wait()
        if under_way in self._open:
            self._open.remove(under_way)
        return under_way.incoming

    def close(self) -> None:
        """See Carrier."""


class Collectives:
    """Collectives of a backend for GPUs: one gathers the numbers, one moves the data.

    Where exchanges differ, so may the sizes of what they move, and the second may hang until torch's own watchdog
    ends it; the first is over by then, and the error is known.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, alarm: Alarm) -> None:
        self.group, self.device, self.alarm = group, device, alarm
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        ring = torch.zeros(RING, self.ranks, dtype=torch.int64, device=device)
        self._comparison = Comparison(ring, self.rank)
        self._watchdog = Watchdog(alarm, lambda: None, device, self._comparison)

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
        return UnderWay(identity, outgoing, incoming, [data], mine, numbers)

    def finish(self, under_way: UnderWay) -> torch.Tensor:
        """See Carrier."""
        self.alarm.check()
        label, current = under_way.identity, torch.cuda.current_stream(self.device)
        before, known, after = (torch.cuda.Event() for _ in range(3))
        before.record(current)
        with Liveness.watch(self.alarm.liveness, str(label)):
            under_way.gathered.wait()
            known.record(current)
            under_way.works[0].wait()
            after.record(current)
        others = np.flatnonzero(np.arange(self.ranks) != self.rank).tolist()
        self._watchdog.track(before, known, label, partial(self._comparison.arrived, under_way.identity, others))
        self._watchdog.track(known, after, label)
        return under_way.incoming

    def close(self) -> None:
        """See Carrier."""
        self._watchdog.close()
