"""How long a server attended: on a GPU by events of its streams, read without waiting; by the clock on a CPU.

Calls of two nano-batches may run at the same time on two streams. Time in which both do counts once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Busy:
    """Seconds in which any of the timed calls ran."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._open: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._latest: torch.cuda.Event | None = None
        """The end up to which all is counted."""

    @contextmanager
    def timed(self, device: torch.device) -> Iterator[None]:
        """Count the time of the body: on a GPU, that of the current stream."""
        if device.type != "cuda":
            begin = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - begin
            return
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        yield
        last.record()
        self._open.append((first, last))
        if len(self._open) > 4096:
            self.seconds()

    def seconds(self) -> float:
        """So far; what the GPU has not reached yet is counted later."""
        while self._open and self._open[0][1].query():
            first, last = self._open.popleft()
            begin = 0.0 if self._latest is None else float(self._latest.elapsed_time(first))
            end = float((self._latest or first).elapsed_time(last))
            # What began before the latest end is counted from that end on.
            self._seconds += max(0.0, end - max(0.0, begin)) / 1e3
            if end > 0.0:
                self._latest = last
        return self._seconds
