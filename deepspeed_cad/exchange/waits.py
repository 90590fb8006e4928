"""How long attention waits for an exchange, how long a server attends, and how long transfers take: wall time on the
CPU, CUDA events on a GPU, read without waiting.

Of transfers: seconds and bytes, by which links are corrected. One that reaches another host counts between hosts, with
the bytes that cross: what stays inside is over before.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from deepspeed_cad.threads import is_over

INSIDE, BETWEEN = 0, 1
LEAST_S = 0.5e-3
"""A transfer that links should be done with sooner is not counted: it tells what starting one costs, not what the link
carries."""


class Waits:
    """Sum of the timed stretches that are over. Any thread may read it."""

    def __init__(self) -> None:
        self._seconds = self._lapped = 0.0
        self._open: deque[tuple[torch.cuda.Event, Callable[[], float]]] = deque()
        """The last event of each, and its seconds once that is over."""
        self._lock = threading.Lock()

    @contextmanager
    def timed(self, device: torch.device) -> Iterator[None]:
        """Count the time of the body: on a GPU, that of the current stream."""
        if device.type != "cuda":
            begin = time.perf_counter()
            yield
            with self._lock:
                self._seconds += time.perf_counter() - begin
            return
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        yield
        last.record()
        self._expect(last, partial(self._between, first, last))

    def beside(
        self, own_end: torch.cuda.Event, waits: list[tuple[torch.cuda.Event | None, torch.cuda.Event]],
        served_end: torch.cuda.Event, returned: torch.cuda.Event,
    ) -> None:  # fmt: skip
        """Count what was idle in a tick whose own and served tasks ran on two streams: from the end of the own tasks
        until a wave arrives, and from the end of both until results are back. `waits`: when the stream of served tasks
        began to wait for each wave (None: with the tick), and when that came."""

        def idle() -> float:
            total = min(own_end.elapsed_time(returned), served_end.elapsed_time(returned))
            for begin, arrived in waits:
                own = own_end.elapsed_time(arrived)
                total += max(0.0, own if begin is None else min(own, begin.elapsed_time(arrived)))
            return total / 1e3

        self._expect(returned, idle)

    def lap(self, now: torch.cuda.Event | float) -> Callable[[], float]:
        """Seconds between the lap before and this one (an event; a float on a CPU), to be asked for when it is over."""
        found: list[float] = []

        def end() -> float:
            found.append(self._seconds - self._lapped)
            self._lapped = self._seconds
            return 0.0

        if isinstance(now, float):
            end()
        else:
            self._expect(now, end)
        return lambda: (self.seconds(), sum(found))[1]  # nothing where another stream is behind

    def seconds(self) -> float:
        """Seconds so far; what the GPU has not reached yet is counted later."""
        with self._lock:
            while self._open and is_over(self._open[0][0]):
                self._seconds += self._open.popleft()[1]()
            return self._seconds

    def _between(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        return float(first.elapsed_time(last)) / 1e3

    def _expect(self, last: torch.cuda.Event, seconds: Callable[[], float]) -> None:
        self._open.append((last, seconds))
        if len(self._open) > 4096:
            self.seconds()


class Busy(Waits):
    """The same for stretches on two streams, as calls of two nano-batches are: time in which both run counts once."""

    _latest: torch.cuda.Event | None = None
    """The end up to which all is counted."""

    def _between(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        begin = 0.0 if self._latest is None else float(self._latest.elapsed_time(first))
        end = float((self._latest or first).elapsed_time(last))
        if end > 0.0:
            self._latest = last
        # What began before the latest end is counted from that end on.
        return max(0.0, end - max(0.0, begin)) / 1e3


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
        while self._open and is_over(self._open[0][1]):
            before, after, size = self._open.popleft()
            self.note(size, before.elapsed_time(after) / 1e3)
        with self._lock:
            taken, self._sums = self._sums, np.zeros(4, np.int64)
        return taken
