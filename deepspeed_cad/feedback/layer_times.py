"""How long all that is not attention takes, per token on every rank: linear layers, norms, what checkpointing repeats;
and how fast every rank attends. Who has fewer tokens, or a faster GPU, attends more.

A stretch lies between two attentions of one micro-batch, or of one nano-batch where two alternate: from the moment at
which O of a layer is complete at home to the dispatch of the next layer; in the backward, from dQ, dK and dV of a layer
to the dispatch of the layer before. Nothing else runs on the trainer meanwhile. CUDA events on a GPU, read without
waiting; the clock on a CPU. From the dispatch of a layer until it is complete lies its attention: without its waits it
says how fast this rank is beside what was planned for it. In: these moments, from attention calls. Out: seconds per
token and speeds of every trainer, equal on all of them. A model has numbers of its own. Small models are launched more
slowly than they run, and ranks differ in that by chance: where GPUs wait for their hosts, all trainers count as equally
fast, and plans leave attention where it is unless that makes a whole layer uneven.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from deepspeed_cad.exchange.waits import Waits
from deepspeed_cad.layout import Ints
from deepspeed_cad.planner.plan import Floats
from deepspeed_cad.threads import is_over

Moment = Any
"""An event on a GPU's current stream, or seconds of the clock."""
MOST = 4096
"""Stretches that are held between two readings."""


class Measured(NamedTuple):
    """Of what ended since the last reading, 0 for nothing: seconds per token of what lies between two attentions; in
    what share of that a GPU waited for its host; seconds that attention was planned to take at speed 1; its speed."""

    forward: float = 0.0
    backward: float = 0.0
    waited: float = 0.0
    load: float = 0.0
    speed: float = 0.0


class _Stretch(NamedTuple):
    begin: Moment
    end: Moment
    backward: bool
    amount: float
    """Tokens; of attention the seconds that both passes were planned to take."""
    waited: bool = False
    idle: Callable[[], float] | None = None
    """Of attention: seconds of it in which nothing ran, once it is over."""


class StretchTimes:
    """The stretches and attentions of one model on this rank. Any thread may add, one may take."""

    def __init__(self) -> None:
        self._stretches: deque[_Stretch] = deque(maxlen=MOST)
        self.add = self._stretches.append

    def take(self) -> Measured:
        """Of the stretches that ended since this was called last."""
        found: defaultdict[tuple[bool, bool], list[tuple[float, float]]] = defaultdict(list)
        waited: list[bool] = []
        while self._stretches:
            one = self._stretches[0]
            if isinstance(one.end, torch.cuda.Event) and not is_over(one.end):
                break
            self._stretches.popleft()
            took = one.end - one.begin if isinstance(one.end, float) else one.begin.elapsed_time(one.end) / 1e3
            if one.idle is None:
                waited.append(one.waited)
            else:
                took -= one.idle()
            found[one.idle is not None, one.backward].append((took / one.amount, one.amount))
        slow = [middle(found[True, backward]) for backward in (False, True)]
        return Measured(
            middle(found[False, False]), middle(found[False, True]), sum(waited) / max(len(waited), 1),
            sum(load for _, load in found[True, True]), 1.0 / sum(slow) if min(slow) > 0.0 else 0.0,
        )  # fmt: skip


class Stretches:
    """Those of one nano-batch of one micro-batch."""

    def __init__(self, times: StretchTimes, device: torch.device, tokens: int, waits: Waits) -> None:
        self._times, self._device, self._tokens, self._waits = times, device, tokens, waits
        self._open: tuple[int, bool, Moment] | None = None  # the attention that is complete, or under way

    def begin(self, layer: int, backward: bool, load: float = 0.0) -> None:
        """The attention of a layer is complete; `load`: see CallSetup."""
        now, entered = self._now(), self._open
        self._open, idle = (layer, backward, now), self._waits.lap(now)
        if load > 0.0 and entered is not None and entered[:2] == (layer, backward):
            self._times.add(_Stretch(entered[2], now, backward, load, idle=idle))

    def end(self, layer: int, backward: bool) -> None:
        """The attention of a layer is about to be dispatched."""
        now, opened = self._now(), self._open
        self._open = (layer, backward, now)
        self._waits.lap(now)  # what was waited for before is not this attention's
        # What lies before the first layer and behind the last has other work in it than a layer.
        if opened is None or opened[:2] != (layer + (1 if backward else -1), backward) or not self._tokens:
            return
        # A GPU that is past the begin already has nothing left to run.
        waited = not isinstance(opened[2], float) and is_over(opened[2])
        self._times.add(_Stretch(opened[2], now, backward, self._tokens, waited))

    def _now(self) -> Moment:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


GAIN = 0.5
"""Share of a measured difference that is made up for at once. A choice: after five reports 97 % of what the first steps
left, which compile, is forgotten."""
REMEMBERED = 0.8
"""What an older report of attention counts beside the next, a choice: costs are 1 to 3 % wrong, in each step anew."""
BELIEVED = 0.25
"""What costs count beside the first report, a choice: GPUs of one host differ by up to 11 %, reports by 1 to 3 %."""
PULL = 0.1
"""Share of the way to the mean by which each speed is moved, a choice. Else a wait that is not counted looks like slow
attention, the rank gets less, waits longer, and looks slower still."""
WAITS = 0.25
"""Share of stretches, of any trainer, from which on GPUs count as waiting for their hosts. A choice, which nothing
measured yet; where it is wrong, layers are as uneven as the tolerance allows."""


class LayerTimes:
    """Of all trainers; a Reporter."""

    columns = 6
    """Whether it pauses, and each field of `Measured` in whole numbers of its unit."""
    UNITS = np.array([1e-12, 1e-12, 1e-3, 1e-9, 1e-6])

    def __init__(self, trainers: int, take: Callable[[int], Measured], pauses: Callable[[], bool]) -> None:
        """`take` gives what this rank measured of a model since the last call. `pauses`: while it holds on any trainer,
        plans must depend on no measured time."""
        self._trainers, self._take, self._pauses = trainers, take, pauses
        self._each: dict[int, Floats] = {}
        """By model, seconds per token of every trainer ([2, trainers]: forward, backward), 0 where not known."""
        self._waited: dict[int, Floats] = {}
        """[trainers] share of stretches."""
        self._attended: dict[int, Floats] = {}
        """[2, trainers] seconds that attention was planned to take at speed 1, and took: sums of weighted reports."""
        self._paused: dict[int, bool] = {}

    def report(self, model: int) -> Ints:
        return np.array([self._pauses(), *np.rint(np.minimum(self._take(model) / self.UNITS, 1e18))], np.int64)

    def hear(self, model: int, reports: Ints) -> None:
        self._paused[model] = bool(reports[:, 0].any())
        each = self._each.get(model, np.zeros((2, self._trainers)))
        measured, (share, load, speed) = np.split((reports[:, 1:] * self.UNITS).T, [2])
        smooth = np.where(each > 0, each + GAIN * (measured - each), measured)
        self._each[model] = np.where(measured > 0, smooth, each)
        waited = self._waited.get(model, np.zeros(self._trainers))
        # Steps that compile wait, too; the first one without any wait ends that.
        found = np.where(share > 0, waited + GAIN * (share - waited), 0.0)
        self._waited[model] = np.where((measured > 0).any(0), found, waited)
        attends = (speed > 0.0) & (load > 0.0)
        if attends.any() and model in self._attended:
            # Sums, so that a rank with little attention, most of which is what starting it takes, changes little.
            sums, before = np.stack([load, load / np.where(attends, speed, 1.0)]), self._attended[model]
            self._attended[model] = np.where(attends, REMEMBERED * before + sums, before)
        elif attends.any():  # the first step compiles: it counts for nothing, and all are as fast as the costs say
            self._attended[model] = np.full((2, self._trainers), BELIEVED / REMEMBERED * load.max())

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

    def speeds(self, model: int) -> Floats | None:
        """[trainers] in attention, beside what costs say; None while paused and where hosts set the pace."""
        speeds = np.divide(*self._attended.get(model, np.ones((2, self._trainers))))
        return None if self._paused.get(model) or self.hosts_pace(model) else speeds + PULL * (speeds.mean() - speeds)

    def hosts_pace(self, model: int) -> bool:
        """Whether layers take as long as their launching."""
        return model in self._waited and bool(self._waited[model].max() >= WAITS)


def middle(values: list[tuple[float, float]]) -> float:
    """The mean of the middle half of values, by weight: layers that compile a kernel or wait for memory do not count,
    and those with little to do hardly. 0 for none."""
    if not values:
        return 0.0
    cut = len(values) // 4
    value, weight = np.array(sorted(values)[cut : len(values) - cut]).T
    return float(np.average(value, weights=weight))
