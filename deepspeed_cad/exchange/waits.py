"""How long attention waits for an exchange, and how long a server attends: wall time on the CPU, CUDA events on a GPU,
read without waiting."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch


class Waits:
    """Sum of the timed stretches that are over. Any thread may read it."""

    def __init__(self) -> None:
        self._seconds = 0.0
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
        self,
        own_end: torch.cuda.Event,
        waits: list[tuple[torch.cuda.Event | None, torch.cuda.Event]],
        served_end: torch.cuda.Event,
        returned: torch.cuda.Event,
    ) -> None:
        """Count what was idle in a tick whose own and served tasks ran on two streams: neither of them runs from the
        end of the own tasks until a wave that is to be served arrives, and from the end of both until results are back.

        `waits`: when the stream of served tasks began to wait for each wave (None: with the tick), and when that came.
        """

        def idle() -> float:
            total = min(own_end.elapsed_time(returned), served_end.elapsed_time(returned))
            for begin, arrived in waits:
                own = own_end.elapsed_time(arrived)
                total += max(0.0, own if begin is None else min(own, begin.elapsed_time(arrived)))
            return total / 1e3

        self._expect(returned, idle)

    def seconds(self) -> float:
        """Seconds so far; what the GPU has not reached yet is counted later."""
        with self._lock:
            while self._open and self._open[0][0].query():
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
