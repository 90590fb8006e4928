"""Brake: plans move less where measured waits eat what balance gains, down to nothing, and more again when they do not.

In: what plans promised every rank and what their exchanges made it wait, in ticks that ended. Out: how many times
slower than they are links are to be taken for. All ranks hear the same, so all brake at the same micro-batch.

Why links of a lower speed are the handle: the planner weighs attention against transfers itself. Told of slow links it
first gives up the moves that gain least for their bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

FACTORS = (1.0, 4.0, 16.0, 64.0, 1e9)
"""Times by which links are slower than they are, by level. At the last one nothing moves."""
WINDOW = 8
"""Reports that a verdict takes; a rank reports with each micro-batch."""
DROPPED = 2
"""Worst reports of a window that do not count: kernels that are compiled, a checkpoint that is written."""
PROBE = 64
"""Reports until a lower level is tried again; twice as many after each try that failed."""
LONGEST_PROBE = 1024


class Change(NamedTuple):
    """The brake was tightened or loosened."""

    text: str
    """What happened, with figures, for the log."""
    notable: bool
    """Whether a user should see it in any case: the first tightening, and the end of braking."""


class Brake:
    """The brake of one group."""

    def __init__(self) -> None:
        self.level = 0
        self.era = 0
        """How often the level changed: plans say by it with which level they were made."""
        self._reports: list[tuple[float, float, int]] = []
        """Seconds gained and waited of the rank that gained least, and which one it is."""
        self._since = 0
        self._patience = PROBE
        self._tries = self._told = False

    @property
    def factor(self) -> float:
        """Links are taken for so many times slower."""
        return FACTORS[self.level]

    def hear(self, eras: Floats, gained: Floats, waited: Floats, ticks: Floats) -> Change | None:
        """Learn from what every rank reported ([ranks] each), equal on every rank; says what changed."""
        self._since += 1
        # Ticks of plans that were made at another level say nothing of this one.
        if (eras == self.era).all() and ticks.min() > 0:
            # The slowest rank ends the step, so the least gain of any is what training gains.
            worst = int((gained - waited).argmin())
            self._reports.append((float(gained[worst]), float(waited[worst]), worst))
        if len(self._reports) == WINDOW and (change := self._judge()) is not None:
            return change
        if self.level and self._since >= self._patience:
            self._tries = True
            return self._set(
                self.level - 1, "plans move more again, to see whether exchanges have become faster", False
            )
        return None

    def _judge(self) -> Change | None:
        kept = sorted(self._reports, key=lambda one: one[0] - one[1])[DROPPED:]
        gained, waited = (sum(one[column] for one in kept) / len(kept) for column in (0, 1))
        figures = (
            f"balance gains {1e3 * gained:.3g} ms a micro-batch and exchanges make rank {kept[0][2]} wait "
            f"{1e3 * waited:.3g} ms"
        )
        self._reports.clear()
        if gained > waited:
            if self._tries:
                self._patience, self._tries = PROBE, False
            if not self.level and self._told:
                self._told = False
                return Change(f"{figures}: plans move all that they promise to gain by again", True)
            return None
        if self.level == len(FACTORS) - 1:
            return None
        if self._tries:
            self._patience = min(2 * self._patience, LONGEST_PROBE)
        self._tries = False
        notable, self._told = not self._told, True
        nothing = self.level + 1 == len(FACTORS) - 1
        return self._set(
            self.level + 1, f"{figures}: plans move {'nothing' if nothing else 'less'} for a while", notable
        )  # fmt: skip

    def _set(self, level: int, text: str, notable: bool) -> Change:
        self.level, self.era, self._since = level, self.era + 1, 0
        self._reports.clear()
        return Change(text, notable)
