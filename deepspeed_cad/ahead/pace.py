"""Pace: which ranks the others wait for, learned from measured waits, so that plans can relieve them of attention.

In: seconds that every rank waited for exchanges in the ticks that ended lately. Out: a base load for the planner: the
seconds by which each rank is late in a tick for reasons that no plan knows, such as a GPU that runs at a lower clock.
Ranks exchange what they measured together with the lengths of a micro-batch, so all of them learn the same.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from deepspeed_cad.cost import TICKS_PER_LOAD

Floats = npt.NDArray[np.float64]

GAIN = 0.4
"""Share of a measured difference that is made up for at once. A choice: below 1, because waits also tell of errors of
prediction that pass with their step; a difference that stays is made up for to 92 % after five corrections."""
ENOUGH = 4
"""Ticks of every rank between two corrections. A choice: two layers' forward and backward, so that a few late kernels
do not count as a slow GPU."""
PAUSED = -1
"""In place of a number of ticks, where a rank does not want to be learned from."""
NANOSECONDS = 1e9
"""Per second: waits travel as whole numbers, so that every rank hears the same."""


def allowance(relief: float, speeds: Floats | None) -> float:
    """How far attention may be moved from the mean, as a share of it.

    `relief` is what is allowed where ranks are alike. Where `speeds` ([ranks], None: all alike) differ by more, so do
    linear layers, and that shows here: shares by speed end together only if linear layers do.
    """
    if not relief or speeds is None:
        return relief
    return max(relief, 1.0 - float(speeds.min() / speeds.max()))


class Pace:
    """The lateness of every rank of a group."""

    def __init__(
        self,
        ranks: int,
        measured: Callable[[], tuple[float, int]],
        most: float,
        pauses: Callable[[], bool] = lambda: False,
    ) -> None:
        """The pace of `ranks` ranks, of which nothing is known yet.

        Args:
            ranks: ranks of the CAD group.
            measured: gives the seconds that this rank waited and the ticks that ended since its last call.
            most: how far the attention of any rank may be moved from the mean, as a share of the mean; 0: never.
            pauses: while it holds on any rank, nothing is learned and nobody is relieved.
        """
        self.most = most
        self._measured, self._pauses = measured, pauses
        self._paused = False
        self._waited, self._ticks = np.zeros(ranks), np.zeros(ranks)
        self._late: Floats = np.zeros(ranks)
        """Seconds per load by which each rank is later than the mean."""
        self._attention = 0.0
        """Largest mean attention of a tick so far, in seconds."""

    def report(self) -> tuple[int, int]:
        """What this rank measured since it last reported: nanoseconds waited, ticks; PAUSED ticks where it pauses."""
        if not self.most:
            return 0, 0
        seconds, ticks = self._measured()
        return round(seconds * NANOSECONDS), PAUSED if self._pauses() else ticks

    def hear(self, nanoseconds: npt.ArrayLike, ticks: npt.ArrayLike) -> None:
        """Learn from what every rank reported ([ranks] each), equal on every rank."""
        self._paused = bool((np.asarray(ticks) == PAUSED).any())
        if self._paused:
            return
        self._waited += np.asarray(nanoseconds) / NANOSECONDS
        self._ticks += np.asarray(ticks)
        if self._ticks.min() < ENOUGH:
            return
        wait = self._waited / self._ticks
        # Who waits less than the others is the one they wait for.
        late = self._late + GAIN * TICKS_PER_LOAD * (wait.mean() - wait)
        limit = self.most * self._attention
        self._late = np.clip(late - late.mean(), -limit, limit)
        self._waited[:], self._ticks[:] = 0, 0

    @property
    def paused(self) -> bool:
        """Whether some rank paused when the last micro-batch was gathered."""
        return self._paused

    def expect(self, attention: float) -> None:
        """A tick with this mean attention, in seconds, will be planned: it bounds what is learned."""
        self._attention = max(self._attention, attention)

    @property
    def late(self) -> Floats:
        """[ranks] seconds per load by which each rank is later than the mean, as known now; zeros while paused."""
        return np.zeros_like(self._late) if self._paused else self._late.copy()

    def base_load(self, late: Floats, attention: float) -> Floats | None:
        """What the planner takes lateness for: [ranks] seconds, in a tick with this mean attention; None for none."""
        if not late.any():
            return None
        limit = self.most * attention
        bounded = np.clip(late, -limit, limit)
        return bounded - bounded.min()
