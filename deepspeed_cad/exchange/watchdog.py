"""Notices exchanges that do not end: a thread that looks at the waits queued on CUDA streams.

In: the events before and after each wait. A wait that its stream has reached and not left for `timeout_s` is stuck: a
peer died or hangs. Out: one call of `on_stuck` with what was waited for, from the thread; nothing else is done here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from deepspeed_cad.threads import start_daemon

logger = logging.getLogger(__name__)


class Event(Protocol):
    """What is needed of torch.cuda.Event."""

    def query(self) -> bool: ...


class Watchdog:
    """Watches the waits of one transport, oldest first."""

    def __init__(self, timeout_s: float, on_stuck: Callable[[str], None], device: torch.device | None = None) -> None:
        """`device`: that of the events."""
        self.timeout_s, self.on_stuck, self.device = timeout_s, on_stuck, device
        self._waits: deque[tuple[Event, Event, str]] = deque()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def track(self, before: Event, after: Event, label: str) -> None:
        """Watch one wait; the thread starts with the first."""
        self._waits.append((before, after, label))
        if self._thread is None:
            self._thread = start_daemon("watchdog", self._run, self.device)

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        pause = min(max(self.timeout_s / 20, 0.02), 1.0)
        reached: tuple[Event, float] | None = None
        try:
            while not self._stop.wait(pause):
                while self._waits and self._waits[0][1].query():
                    self._waits.popleft()
                if not self._waits:
                    continue
                before, _, label = self._waits[0]
                if not before.query():
                    continue
                if reached is None or reached[0] is not before:
                    reached = (before, time.monotonic())
                elif time.monotonic() - reached[1] > self.timeout_s:
                    self.on_stuck(label)
                    return
        except RuntimeError as error:
            logger.debug("the watchdog of the exchange ends with the CUDA context: %s", error)
