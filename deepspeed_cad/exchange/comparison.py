"""Compares the numbers of exchanges that came from other ranks with this rank's own, on the host and behind the GPU.

Numbers arrive in a ring in device memory, [RING, ranks], row n % RING for exchange n: peers write them just before
their flag, or they are received ahead of messages. Once the stream has passed that point, the watchdog's thread copies
the ring to the host on a stream of its own and compares. So no stream and no kernel ever waits for a comparison, and
one costs no more than a few KB copied a few times per second.

Why not let the stream wait until the numbers are equal. It could (two waits per peer), and nothing wrong would then be
computed at all; but a wait that can never end is the one thing from which a GPU must be rescued, and a rank that is
merely far behind would look like one that differs. Instead what was computed in between is lost with the run: all
ranks end with an error within a second, landing areas become NaN, no exchange can start any more, and `finish` looks
once more before a transport is closed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import torch

from deepspeed_cad.exchange.identity import Identity, compare

RING = 256
"""Exchanges whose numbers are kept."""
AHEAD = 128
"""No rank can be that many exchanges ahead of another: each waits for the others' last dispatch (nvlink.py)."""


class Comparison:
    """The numbers that reach one transport of one rank."""

    def __init__(self, ring: torch.Tensor, rank: int) -> None:
        """`ring`: int64 [RING, ranks], where the numbers arrive."""
        self.ring, self.rank = ring, rank
        self.newest = 0
        """Index of the last exchange that this rank has started."""
        self._arrived: deque[tuple[Identity, Sequence[int]]] = deque()
        self._reading: list[tuple[Identity, Sequence[int]]] = []
        # Made here and not by the thread that compares: pinning memory may wait for a GPU that hangs.
        self._host = torch.empty(ring.shape, dtype=torch.int64, pin_memory=ring.is_cuda)
        self._stream = torch.cuda.Stream(ring.device)
        self._copied: torch.cuda.Event | None = None

    def arrived(self, identity: Identity, peers: Sequence[int]) -> None:
        """The numbers of these ranks for an exchange are in the ring by now."""
        if len(peers):
            self._arrived.append((identity, peers))

    def look(self) -> str:
        """What differs, or "". Never waits: it begins a copy of the ring, and a later call compares."""
        if self._copied is not None:
            if not self._copied.query():
                return ""
            self._copied = None
            return self._compare()
        if self._arrived:
            # First what is to be compared, then the copy: everything in the list lies in the ring when it is read.
            self._reading = [self._arrived.popleft() for _ in range(len(self._arrived))]
            self._begin_copy()
        return ""

    def finish(self, patience_s: float = 5.0) -> str:
        """The same for all that has arrived; waits for the copies."""
        deadline = time.monotonic() + patience_s
        while (self._copied is not None or self._arrived) and time.monotonic() < deadline:
            if found := self.look():
                return found
            time.sleep(0.001)
        return ""

    def _begin_copy(self) -> None:
        with torch.cuda.stream(self._stream):
            self._host.copy_(self.ring, non_blocking=True)
            self._copied = self._stream.record_event()

    def _compare(self) -> str:
        rows, started = self._host.tolist(), self.newest
        for identity, peers in self._reading:
            # The ring has come round since: a later number, whose hash covers this one, speaks for it.
            if started - identity.index > RING - AHEAD:
                continue
            row = rows[identity.index % RING]
            found = compare({self.rank: identity.number, **{int(peer): row[peer] for peer in peers}})
            if found:
                return found
        return ""
