"""How long all that is not attention takes, per token on every rank: linear layers, norms, what checkpointing repeats.
Who has fewer tokens, or a faster GPU, attends more.

A stretch lies between two attentions of one micro-batch, or of one nano-batch where two alternate: from the moment at
which O of a layer is complete at home to the dispatch of the next layer; in the backward, from dQ, dK and dV of a layer
to the dispatch of the layer before. Nothing else runs on the trainer meanwhile. CUDA events on a GPU, read without
waiting; the clock on a CPU. In: these moments, from attention calls. Out: seconds per token of every trainer, equal on
all of them. A model has numbers of its own. Small models are launched more slowly than they run, and ranks differ in
that by chance: where GPUs wait for their hosts, all trainers count as equally fast, and plans leave attention where it
is unless that makes a whole layer uneven.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from deepspeed_cad.layout import Ints
from deepspeed_cad.planner.plan import Floats
from deepspeed_cad.threads import is_over

Measured = tuple[list[float], list[float], list[bool]]
"""Of the stretches that ended: seconds per token and layer, forward and backward; of each, whether its GPU waited for
its host."""
Moment = Any
"""An event on a GPU's current stream, or seconds of the clock."""
MOST = 4096
"""Stretches that are held between two readings."""


class _Stretch(NamedTuple):
    begin: Moment
    end: Moment
    tokens: int
    backward: bool
    waited: bool


class StretchTimes:
    """The stretches of one model on this rank. Any thread may add and take."""

    def __init__(self) -> None:
        self._stretches: deque[_Stretch] = deque(maxlen=MOST)
        self._lock = threading.Lock()

    def add(self, begin: Moment, end: Moment, tokens: int, backward: bool, waited: bool) -> None:
        with self._lock:
            self._stretches.append(_Stretch(begin, end, tokens, backward, waited))

    def take(self) -> Measured:
        """Of the stretches that ended since this was called last."""
        found: tuple[list[float], list[float]] = ([], [])
        waited: list[bool] = []
        with self._lock:
            while self._stretches:
                one = self._stretches[0]
                if isinstance(one.end, torch.cuda.Event) and not is_over(one.end):
                    break
                self._stretches.popleft()
                begin, end = one.begin, one.end
                took = float(end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3)
                found[one.backward].append(took / one.tokens)
                waited.append(one.waited)
        return *found, waited


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
        # A GPU that is past the begin already has nothing left to run.
        waited = not isinstance(begin, float) and is_over(begin)
        self._times.add(begin, self._now(), self._tokens, backward, waited)

    def _now(self) -> Moment:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


PICOSECONDS = 1e12
GAIN = 0.5
"""Share of a measured difference that is made up for at once. A choice: the first steps compile and allocate, and after
five reports 97 % of what they left is forgotten."""
WAITS = 0.25
"""Share of stretches, of any trainer, from which on GPUs count as waiting for their hosts. A choice, which nothing
measured yet; where it is wrong, layers are as uneven as the tolerance allows."""


class NonAttention:
    """Of all trainers; a Reporter."""

    columns = 4
    """Whether it pauses; picoseconds per token and layer forward, backward; 0 for nothing measured; the share of
    stretches with a GPU that waited, in thousandths."""

    def __init__(self, trainers: int, take: Callable[[int], Measured], pauses: Callable[[], bool]) -> None:
        """`take` gives what this rank measured of a model since the last call. `pauses`: while it holds on any trainer,
        plans must depend on no measured time."""
        self._trainers, self._take, self._pauses = trainers, take, pauses
        self._each: dict[int, Floats] = {}
        """By model, seconds per token of every trainer ([2, trainers]: forward, backward), 0 where not known."""
        self._waited: dict[int, Floats] = {}
        """[trainers] share of stretches."""
        self._paused: dict[int, bool] = {}

    def report(self, model: int) -> Ints:
        *each, waited = self._take(model)
        seconds = [round(middle(one) * PICOSECONDS) for one in each]
        return np.array([self._pauses(), *seconds, 1000 * sum(waited) // max(len(waited), 1)], np.int64)

    def hear(self, model: int, reports: Ints) -> None:
        self._paused[model] = bool(reports[:, 0].any())
        each = self._each.get(model, np.zeros((2, self._trainers)))
        measured = reports[:, 1:3].T / PICOSECONDS
        smooth = np.where(each > 0, each + GAIN * (measured - each), measured)
        self._each[model] = np.where(measured > 0, smooth, each)
        waited, newest = self._waited.get(model, np.zeros(self._trainers)), reports[:, 3] / 1000
        # Steps that compile wait, too; the first one without any wait ends that.
        found = np.where(newest > 0, waited + GAIN * (newest - waited), 0.0)
        self._waited[model] = np.where((measured > 0).any(0), found, waited)

    def seconds(self, model: int, backward: bool = True) -> Floats | None:
        """[trainers] seconds per token of one layer; None where not known, and while paused.

        A trainer that never had tokens is taken for the mean of the others. `backward`: of both passes, not of the
        forward alone."""
        if model not in self._each or self._paused[model]:
            return None
        each = self._each[model] if backward else self._each[model][:1]
        complete = (each > 0).all(0)
        if not complete.any():
            return None
        total = each.sum(0)
        return np.where(complete & (not self.hosts_pace(model)), total, total[complete].mean())

    def hosts_pace(self, model: int) -> bool:
        """Whether layers take as long as their launching."""
        return model in self._waited and bool(self._waited[model].max() >= WAITS)


def middle(values: list[float]) -> float:
    """The mean of the middle half: layers that compile a kernel or wait for memory do not count. 0 for none."""
    if not values:
        return 0.0
    ordered = np.sort(values)
    cut = len(ordered) // 4
    return float(ordered[cut : len(ordered) - cut].mean())
