"""How long attention waits for an exchange: wall time on the CPU, CUDA events on a GPU, read without waiting."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Waits:
    """Sum of the waits that are over, and of the ticks in which they lay. Any thread may read it."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._ticks = 0
        self._taken = (0.0, 0)
        self._open: deque[tuple[torch.cuda.Event, Callable[[], float], int]] = deque()
        """The last event of each wait, its seconds once that is over, and how many ticks it ends."""
        self._lock = threading.Lock()

    @contextmanager
    def timed(self, device: torch.device, ends_tick: bool = False) -> Iterator[None]:
        """Count the time of the body: on a GPU, that of the current stream."""
        if device.type != "cuda":
            begin = time.perf_counter()
            yield
            self._add(time.perf_counter() - begin, int(ends_tick))
            return
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        yield
        last.record()
        self._expect(last, lambda: first.elapsed_time(last) / 1e3, int(ends_tick))

    def beside(
        self,
        own_end: torch.cuda.Event,
        arrived: torch.cuda.Event,
        served_end: torch.cuda.Event,
        returned: torch.cuda.Event,
    ) -> None:
        """Count what was idle in a tick whose own and served tasks ran on two streams: neither of them runs from the
        end of the own tasks until what is to be served arrives, and from the end of both until results are back."""

        def idle() -> float:
            own = max(0.0, own_end.elapsed_time(arrived))
            return (own + min(own_end.elapsed_time(returned), served_end.elapsed_time(returned))) / 1e3

        self._expect(returned, idle, 1)

    def seconds(self) -> float:
        """Seconds so far; what the GPU has not reached yet is counted later."""
        with self._lock:
            while self._open and self._open[0][0].query():
                _, seconds, ticks = self._open.popleft()
                self._seconds += seconds()
                self._ticks += ticks
            return self._seconds

    def take(self) -> tuple[float, int]:
        """Seconds and ticks that ended since this was called last."""
        self.seconds()
        with self._lock:
            now, before = (self._seconds, self._ticks), self._taken
            self._taken = now
        return now[0] - before[0], now[1] - before[1]

    def _add(self, seconds: float, ticks: int) -> None:
        with self._lock:
            self._seconds += seconds
            self._ticks += ticks

    def _expect(self, last: torch.cuda.Event, seconds: Callable[[], float], ticks: int) -> None:
        self._open.append((last, seconds, ticks))
        if len(self._open) > 4096:
            self.seconds()
