"""How long attention waits for an exchange: wall time on the CPU, CUDA events on a GPU, read without waiting."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch


class Gain(NamedTuple):
    """What a plan promises a rank in one tick."""

    seconds: float
    """By which this rank's attention ends sooner than that of the slowest rank would without CAD."""
    era: int
    """Of how many changes the plan knew by which plans move more or less: sums never mix two."""
    held_up: float = 0.0
    """For which this rank is idle, as the plan knows, because it reads keys of a rank that is late."""
    most: float = math.inf
    """What its exchange may cost at the most. Longer waits are for a rank that is late, and are there without CAD, too,
    where gradients are summed."""


class Balance(NamedTuple):
    """What plans promised a rank in the ticks that ended, and what their exchanges made it wait: less than nothing
    where plans expected it to wait longer for late ranks than it did."""

    era: int
    gained: float
    waited: float
    ticks: int


class Waits:
    """Sum of the waits that are over, and of the ticks in which they lay. Any thread may read it."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._held_up = 0.0
        self._ticks = 0
        self._taken = (0.0, 0)
        self._balance = Balance(0, 0.0, 0.0, 0)
        self._open: deque[tuple[torch.cuda.Event, Callable[[], float], int, Gain | None]] = deque()
        """The last event of each wait, its seconds once that is over, how many ticks it ends, what they promised."""
        self._lock = threading.Lock()

    @contextmanager
    def timed(self, device: torch.device, ends_tick: bool = False, gain: Gain | None = None) -> Iterator[None]:
        """Count the time of the body: on a GPU, that of the current stream.

        `gain`: of the tick in which the wait lies; None where nothing moves, so that waits say nothing of links.
        """
        if device.type != "cuda":
            begin = time.perf_counter()
            yield
            with self._lock:
                self._add(time.perf_counter() - begin, int(ends_tick), gain)
            return
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        yield
        last.record()
        self._expect(last, lambda: first.elapsed_time(last) / 1e3, int(ends_tick), gain)

    def beside(
        self,
        own_end: torch.cuda.Event,
        waits: list[tuple[torch.cuda.Event | None, torch.cuda.Event]],
        served_end: torch.cuda.Event,
        returned: torch.cuda.Event,
        gain: Gain | None = None,
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

        self._expect(returned, idle, 1, gain)

    def seconds(self) -> float:
        """Seconds so far; what the GPU has not reached yet is counted later."""
        with self._lock:
            while self._open and self._open[0][0].query():
                _, seconds, ticks, gain = self._open.popleft()
                self._add(seconds(), ticks, gain)
            return self._seconds

    def take(self) -> tuple[float, int]:
        """Seconds that no plan knew of, and ticks, that ended since this was called last. Fewer than none where a rank
        waited less than its plans said."""
        self.seconds()
        with self._lock:
            now, before = (self._seconds - self._held_up, self._ticks), self._taken
            self._taken = now
        return now[0] - before[0], now[1] - before[1]

    def take_balance(self) -> Balance:
        """What plans of the newest era promised and cost, in ticks that ended since this was called last."""
        self.seconds()
        with self._lock:
            now = self._balance
            self._balance = Balance(now.era, 0.0, 0.0, 0)
        return now

    def _add(self, seconds: float, ticks: int, gain: Gain | None) -> None:
        self._seconds += seconds
        self._ticks += ticks
        if gain is None:
            return
        known = ticks * gain.held_up
        self._held_up += known
        if gain.era < self._balance.era:
            return
        cost = min(seconds, gain.held_up + gain.most) - known
        before = self._balance if gain.era == self._balance.era else Balance(gain.era, 0.0, 0.0, 0)
        self._balance = Balance(
            gain.era, before.gained + ticks * gain.seconds, before.waited + cost, before.ticks + ticks
        )  # fmt: skip

    def _expect(self, last: torch.cuda.Event, seconds: Callable[[], float], ticks: int, gain: Gain | None) -> None:
        self._open.append((last, seconds, ticks, gain))
        if len(self._open) > 4096:
            self.seconds()
