"""How long attention waits for an exchange: wall time on the CPU, CUDA events on a GPU, read without waiting."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Waits:
    """Sum of the waits that are over."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._open: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

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
        """Seconds so far; what the GPU has not reached yet is counted later."""
        while self._open and self._open[0][1].query():
            first, last = self._open.pop(0)
            self._seconds += first.elapsed_time(last) / 1e3
        return self._seconds
