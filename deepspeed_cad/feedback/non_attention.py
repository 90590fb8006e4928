"""Seconds of all that is not attention, per token, on every rank: who has fewer tokens, or a faster GPU, attends more.

In: seconds per token that every trainer measured between attentions (attention/non_attention.py). Out: seconds per
token of every trainer, equal on all of them. A model has numbers of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from deepspeed_cad.layout import Ints
from deepspeed_cad.planner.plan import Floats

Measured = tuple[list[float], list[float]]
"""Seconds per token and layer of the stretches that ended: forward and backward."""
PICOSECONDS = 1e12
GAIN = 0.5
"""Share of a measured difference that is made up for at once. A choice: the first steps compile and allocate, and after
five reports 97 % of what they left is forgotten."""


class NonAttention:
    """Of all trainers; a Reporter."""

    columns = 3
    """Whether it pauses; picoseconds per token and layer forward, backward; 0 for nothing measured."""

    def __init__(self, trainers: int, take: Callable[[int], Measured], pauses: Callable[[], bool]) -> None:
        """`take` gives what this rank measured of a model since the last call. `pauses`: while it holds on any trainer,
        plans must depend on no measured time.
        """
        self._trainers, self._take, self._pauses = trainers, take, pauses
        self._each: dict[int, Floats] = {}
        """By model, seconds per token of every trainer ([2, trainers]: forward, backward), 0 where not known."""
        self._paused: dict[int, bool] = {}

    def report(self, model: int) -> Ints:
        """See Reporter."""
        each = [middle(seconds) for seconds in self._take(model)]
        return np.array([self._pauses(), *(round(seconds * PICOSECONDS) for seconds in each)], np.int64)

    def hear(self, model: int, reports: Ints) -> None:
        """See Reporter."""
        self._paused[model] = bool(reports[:, 0].any())
        each = self._each.get(model, np.zeros((2, self._trainers)))
        measured = reports[:, 1:].T / PICOSECONDS
        smooth = np.where(each > 0, each + GAIN * (measured - each), measured)
        self._each[model] = np.where(measured > 0, smooth, each)

    def seconds(self, model: int, backward: bool = True) -> Floats | None:
        """[trainers] seconds per token of one layer; None where not known, and while paused.

        A trainer that never had tokens is taken for the mean of the others. `backward`: of both passes, not of the
        forward alone.
        """
        if model not in self._each or self._paused[model]:
            return None
        each = self._each[model] if backward else self._each[model][:1]
        complete = (each > 0).all(0)
        if not complete.any():
            return None
        total = each.sum(0)
        return np.where(complete, total, total[complete].mean())


def middle(values: list[float]) -> float:
    """The mean of the middle half: layers that compile a kernel or wait for memory do not count. 0 for none."""
    if not values:
        return 0.0
    ordered = np.sort(values)
    cut = len(ordered) // 4
    return float(ordered[cut : len(ordered) - cut].mean())
