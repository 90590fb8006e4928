"""How long all that is not attention takes: linear layers, norms, what checkpointing runs again.

A stretch lies between two attentions of one micro-batch, or of one nano-batch where two alternate: from the moment at
which O of a layer is complete at home to the dispatch of the next layer; in the backward, from dQ, dK and dV of a layer
to the dispatch of the layer before. Nothing else runs on the trainer meanwhile. In: these moments, from attention
calls. Out: seconds per token. CUDA events on a GPU, read without waiting; the clock on a CPU.
Stretches in which a GPU waits for its host are left out.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any, NamedTuple

import torch

Moment = Any
"""An event on a GPU's current stream, or seconds of the clock."""
MOST = 4096
"""Stretches that are held between two readings."""


class _Stretch(NamedTuple):
    begin: Moment
    end: Moment
    tokens: int
    backward: bool


class StretchTimes:
    """The stretches of one model on this rank. Any thread may add and take."""

    def __init__(self) -> None:
        self._stretches: deque[_Stretch] = deque(maxlen=MOST)
        self._lock = threading.Lock()

    def add(self, begin: Moment, end: Moment, tokens: int, backward: bool) -> None:
        with self._lock:
            self._stretches.append(_Stretch(begin, end, tokens, backward))

    def take(self) -> tuple[list[float], list[float]]:
        """Seconds per token of the stretches that ended since this was called last: forward and backward ones."""
        found: tuple[list[float], list[float]] = ([], [])
        with self._lock:
            while self._stretches:
                one = self._stretches[0]
                if isinstance(one.end, torch.cuda.Event) and not one.end.query():
                    break
                self._stretches.popleft()
                found[one.backward].append(_seconds(one.begin, one.end) / one.tokens)
        return found


class Stretches:
    """Those of one nano-batch of one micro-batch."""

    def __init__(self, times: StretchTimes, device: torch.device, tokens: int) -> None:
        self._times, self._device, self._tokens = times, device, tokens
        self._open: tuple[int, bool, Moment] | None = None

    def begin(self, layer: int, backward: bool) -> None:
        """The attention of a layer is complete."""
        self._open = (layer, backward, self._now())

    def end(self, layer: int, backward: bool) -> None:
        """The attention of a layer is about to be dispatched."""
        opened, self._open = self._open, None
        # What lies before the first layer and behind the last has other work in it than a layer.
        if opened is None or opened[:2] != (layer + (1 if backward else -1), backward) or not self._tokens:
            return
        begin = opened[2]
        # A GPU that is past the begin of this stretch already waits for its host, whose time is not the GPU's.
        if isinstance(begin, float) or not begin.query():
            self._times.add(begin, self._now(), self._tokens, backward)

    def _now(self) -> Moment:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds(begin: Moment, end: Moment) -> float:
    return float(end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3)
