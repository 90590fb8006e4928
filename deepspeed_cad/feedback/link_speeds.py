"""Speeds of links while training: what exchanges really carried corrects what was timed at the start.

In: how long transfers took on every rank. Out: `Speeds`, to plan the next micro-batch with, equal on all ranks.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from deepspeed_cad.exchange.links import Links
from deepspeed_cad.exchange.waits import BETWEEN, INSIDE, Transfers
from deepspeed_cad.layout import Ints

ENOUGH = 4
FASTER, SLOWER = 2.0, 1e-4
"""Times the speed at the start. Corrections stay between: training measures beside everything else that uses links, so
a link is hardly faster than it was when nothing else ran."""
ALARMING = 100.0
"""Times slower than at the start. Then a link is not busy but broken, and somebody should look."""
KINDS = ("inside a host", "between hosts")


class Speeds(NamedTuple):
    """Bytes per second that plans count with; None where not known."""

    inside: float | None = None
    between: float | None = None


class LinkSpeeds:
    """The links of one group; a Reporter."""

    columns = 5
    """Whether it pauses; nanoseconds and bytes inside a host, the same between hosts."""

    def __init__(
        self, links: Links, rule: Links, transfers: Transfers | None, names: Sequence[str], pauses: Callable[[], bool]
    ) -> None:
        """The links of ranks (`names`: as messages call them), as known at the start.

        `rule`: figures that depend on no measured time, for as long as any rank `pauses`; `transfers`: what this rank's
        transfers took; None: figures are not corrected."""
        self.start, self._rule, self._names, self._pauses, self._transfers = links, rule, names, pauses, transfers
        self._speeds = [links.inside, links.between]
        self._paused = False
        self._seconds, self._bytes = np.zeros((2, len(names))), np.zeros((2, len(names)))
        self._heard = [0, 0]
        self.warning = ""
        """What a user should know of links; it stays."""

    def report(self, model: int) -> Ints:
        taken = np.zeros(4, np.int64) if self._transfers is None else self._transfers.take()
        return np.array([self._pauses(), *taken], np.int64)

    def hear(self, model: int, reports: Ints) -> None:
        self._paused = bool(reports[:, 0].any())
        if not self._paused:
            self._correct(INSIDE, self.start.inside, reports[:, 1], reports[:, 2])
            self._correct(BETWEEN, self.start.between, reports[:, 3], reports[:, 4])

    def watch(self, transfers: Transfers) -> None:
        self._transfers = transfers

    @property
    def now(self) -> Speeds:
        return Speeds(self.links.inside, self.links.between)

    @property
    def links(self) -> Links:
        if self._paused:
            return self._rule
        changed = self._speeds != [self.start.inside, self.start.between]
        return Links(self._speeds[INSIDE], self._speeds[BETWEEN], self.start.source + ", corrected" * changed)

    def _correct(self, kind: int, first: float | None, nanoseconds: Ints, size: Ints) -> None:
        if (speed := self._speeds[kind]) is None or first is None or not size.any():
            return
        self._seconds[kind] += nanoseconds / 1e9
        self._bytes[kind] += size
        self._heard[kind] += 1
        if self._heard[kind] < ENOUGH:
            return
        seconds, moved = self._seconds[kind], self._bytes[kind]
        self._warn(kind, first, moved / np.maximum(seconds, 1e-9))
        # All bytes over all seconds: a slow rank weighs as long as others wait for it, a late packet hardly at all.
        measured = moved.sum() / max(float(seconds.sum()), 1e-9)
        # A quarter of the difference, in orders of magnitude, is made up for at once, a choice: a busy step changes
        # plans little, one that stays slow is known to 76 % after five. By roots: hosts round those alike, powers not.
        corrected = speed * np.sqrt(np.sqrt(measured / speed))
        self._speeds[kind] = float(np.clip(corrected, SLOWER * first, FASTER * first))
        self._seconds[kind] = self._bytes[kind] = self._heard[kind] = 0

    def _warn(self, kind: int, first: float, speeds: np.ndarray) -> None:
        slow = [rank for rank, speed in enumerate(speeds) if 0 < speed < first / ALARMING]
        if not slow or self.warning:
            return
        who = ", ".join(f"{self._names[rank]} ({speeds[rank] / 1e9:.3g} GB/s)" for rank in slow[:8])
        self.warning = (
            f"the link {KINDS[kind]} is more than {ALARMING:g} times slower than the {first / 1e9:.3g} GB/s "
            f"{self.start.source} at start, for {who}: plans move less over it. Look at these hosts' network"
        )
