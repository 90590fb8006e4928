"""How long transfers take while training: seconds and bytes of those that ended, inside a host and between hosts.

In: transfers of a transport, with their bytes to and from every rank. Out: sums that links are corrected by. A transfer
that reaches another host is counted between hosts, with the bytes that cross: what stays inside is over before.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

INSIDE, BETWEEN = 0, 1
LEAST_S = 0.5e-3
"""A transfer that links should be done with sooner is not counted: it tells what starting one costs, not what the link
carries."""


class Size(NamedTuple):
    """What a transfer moves, of what counts."""

    kind: int
    """INSIDE or BETWEEN."""
    bytes: int
    """That leave or reach this rank, whichever are more."""


class Transfers:
    """Of one rank. Any thread may note and take."""

    def __init__(self, rank: int, hosts: Sequence[int], inside: float | None, between: float | None) -> None:
        """`hosts`: the number of every rank's host. `inside`, `between`: bytes per second as known at the start."""
        self._near = np.array([host == hosts[rank] for host in hosts])
        self._least = [LEAST_S * (inside or np.inf), LEAST_S * (between or np.inf)]
        self._sums = np.zeros(4, np.int64)
        self._open: deque[tuple[torch.cuda.Event, torch.cuda.Event, Size]] = deque()
        self._lock = threading.Lock()

    def size(self, sent: npt.ArrayLike, received: npt.ArrayLike) -> Size | None:
        """Of a transfer with so many bytes to and from every rank ([ranks] each); None where it does not count."""
        out, into = np.asarray(sent), np.asarray(received)
        crossing = max(int(out[~self._near].sum()), int(into[~self._near].sum()))
        found = Size(BETWEEN, crossing) if crossing else Size(INSIDE, max(int(out.sum()), int(into.sum())))
        return found if found.bytes >= self._least[found.kind] else None

    def size_of_messages(self, messages: npt.NDArray[np.int64]) -> Size | None:
        """The same for messages ([n, 4]: is_send, peer, address, bytes)."""
        ranks = len(self._near)
        sends = messages[:, 0] == 1
        out, into = (np.bincount(one[:, 1], one[:, 3], ranks) for one in (messages[sends], messages[~sends]))
        return self.size(out, into)

    def note(self, size: Size, seconds: float) -> None:
        with self._lock:
            self._sums[2 * size.kind : 2 * size.kind + 2] += round(seconds * 1e9), size.bytes

    def expect(self, before: torch.cuda.Event, after: torch.cuda.Event, size: Size) -> None:
        """A transfer lies between two events of a GPU; read without waiting."""
        self._open.append((before, after, size))

    def take(self) -> npt.NDArray[np.int64]:
        """[4] nanoseconds and bytes inside, nanoseconds and bytes between, of what ended since this was called last."""
        while self._open and self._open[0][1].query():
            before, after, size = self._open.popleft()
            self.note(size, before.elapsed_time(after) / 1e3)
        with self._lock:
            taken, self._sums = self._sums, np.zeros(4, np.int64)
        return taken
