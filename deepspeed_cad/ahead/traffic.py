"""Traffic: what links carry while training, as all ranks know it: speeds for the planner, and the brake.

In: how long transfers took and what waits cost on every rank, which travels with the lengths of a micro-batch. Out:
`Now`, what plans of the next micro-batch are made with. All ranks hear the same numbers at the same point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from deepspeed_cad.ahead.brake import Brake
from deepspeed_cad.exchange.links import Links
from deepspeed_cad.exchange.transfers import BETWEEN, INSIDE, Transfers
from deepspeed_cad.exchange.waits import Waits
from deepspeed_cad.layout import Ints
from deepspeed_cad.planner.plan import Plan

COLUMNS = 9
"""Of a report: whether it pauses; nanoseconds and bytes inside, the same between; era, nanoseconds gained and waited,
ticks."""
GAIN = 0.25
"""Share of a measured difference of speed, in orders of magnitude, that is made up for at once. A choice: a link that
is busy for a step does not change plans by much, and one that stays slow is known to 76 % after five corrections."""
ENOUGH = 4
"""Reports with transfers between two corrections."""
FASTER, SLOWER = 2.0, 1e-4
"""Times the speed at the start. Corrections stay between: training measures beside everything else that uses links, so
a link is hardly faster than it was when nothing else ran."""
ALARMING = 100.0
"""Times slower than at the start. Then a link is not busy but broken, and somebody should look."""
KINDS = ("inside a host", "between hosts")


class Now(NamedTuple):
    """What plans are made with."""

    inside: float | None = None
    """Bytes per second, None where not known."""
    between: float | None = None
    era: int | None = None
    """Of the brake; None where it does not act."""


class Traffic:
    """The links of one group."""

    def __init__(
        self,
        links: Links,
        rule: Links,
        transfers: Transfers | None,
        waits: Waits | None,
        hosts: Sequence[str],
        pauses: Callable[[], bool],
    ) -> None:
        """The links of the ranks on `hosts`, as known at the start.

        Args:
            links: figures to begin with.
            rule: figures that depend on no measured time, for as long as any rank pauses.
            transfers: what this rank's transfers took; None: figures are not corrected.
            waits: what plans promised this rank and what waits cost; None: nothing is braked, costs are not seconds.
            hosts: name of every rank's host, for people.
            pauses: whether this rank wants plans that depend on no measured time.
        """
        self.start, self._rule, self._hosts, self._pauses = links, rule, hosts, pauses
        self._transfers, self._waits = transfers, waits
        self.brake = Brake()
        self._speeds = [links.inside, links.between]
        self._paused = False
        ranks = len(hosts)
        self._seconds, self._bytes = np.zeros((2, ranks)), np.zeros((2, ranks))
        self._heard = [0, 0]
        self._warned = False
        self.news: list[tuple[str, bool]] = []
        """Lines to be said on one rank, and whether a user should see each in any case; who says them takes them."""

    def report(self) -> Ints:
        """[COLUMNS] what this rank measured since it last reported, as whole numbers, so that all hear the same."""
        found = np.zeros(COLUMNS, np.int64)
        found[0] = self._pauses()
        if self._transfers is not None:
            found[1:5] = self._transfers.take()
        if self._waits is not None:
            era, gained, waited, ticks = self._waits.take_balance()
            found[5:] = era, round(gained * 1e9), round(waited * 1e9), ticks
        return found

    def hear(self, reports: Ints) -> None:
        """Learn from what every rank reported ([ranks, COLUMNS]), equal on every rank."""
        self._paused = bool(reports[:, 0].any())
        if self._paused:
            return
        for kind in range(2):
            self._correct(kind, reports[:, 1 + 2 * kind], reports[:, 2 + 2 * kind])
        if self._waits is not None:
            era, gained, waited, ticks = (column.astype(np.float64) for column in reports[:, 5:].T)
            change = self.brake.hear(era, gained / 1e9, waited / 1e9, ticks)
            if change is not None:
                self.news.append(change)

    def watch(self, transfers: Transfers) -> None:
        """Learn from what another transport notes."""
        self._transfers = transfers

    @property
    def now(self) -> Now:
        """What the next micro-batch is planned with."""
        if self._paused:
            return Now(self._rule.inside, self._rule.between)
        inside, between = (None if speed is None else speed / self.brake.factor for speed in self._speeds)
        return Now(inside, between, None if self._waits is None else self.brake.era)

    def longest(self, plan: Plan, copies: bool) -> float:
        """Seconds that the exchanges of one tick take at the very most; infinite where figures do not follow that.

        Given ones stay as they are, whatever links carry, and what is too small to be noted may take any time.
        `copies`: copy engines move all of it, which are alone on their links.
        """
        if self._transfers is None:
            return math.inf
        crosses = plan.between_bytes > 0
        moved = max(int(plan.sent_bytes.max()), int(plan.received_bytes.max()))
        # There and back, by waves.
        noted = copies or self._transfers.notes(BETWEEN if crosses else INSIDE, moved / (2 * plan.waves))
        return self.links.longest(moved, crosses) if noted else math.inf

    @property
    def links(self) -> Links:
        """Figures as they are now, without the brake."""
        if self._paused:
            return self._rule
        changed = self._speeds != [self.start.inside, self.start.between]
        source = f"{self.start.source}, corrected" if changed else self.start.source
        return Links(self._speeds[INSIDE], self._speeds[BETWEEN], source)

    def _correct(self, kind: int, nanoseconds: Ints, size: Ints) -> None:
        speed, first = self._speeds[kind], (self.start.inside, self.start.between)[kind]
        if speed is None or first is None or not size.any():
            return
        self._seconds[kind] += nanoseconds / 1e9
        self._bytes[kind] += size
        self._heard[kind] += 1
        if self._heard[kind] < ENOUGH:
            return
        seconds, moved = self._seconds[kind], self._bytes[kind]
        self._warn(kind, first, moved / np.maximum(seconds, 1e-9))
        # All bytes over all seconds: a slow rank weighs as long as others wait for it, a late packet hardly at all.
        found = moved.sum() / max(float(seconds.sum()), 1e-9)
        self._speeds[kind] = float(np.clip(speed ** (1 - GAIN) * found**GAIN, SLOWER * first, FASTER * first))
        self._seconds[kind], self._bytes[kind], self._heard[kind] = 0.0, 0.0, 0

    def _warn(self, kind: int, first: float, speeds: np.ndarray) -> None:
        slow = [rank for rank, speed in enumerate(speeds) if 0 < speed < first / ALARMING]
        if not slow or self._warned:
            return
        self._warned = True
        who = ", ".join(f"rank {rank} on {self._hosts[rank]} ({speeds[rank] / 1e9:.3g} GB/s)" for rank in slow[:8])
        self.news.append(
            (
                f"the link {KINDS[kind]} is more than {ALARMING:g} times slower than the {first / 1e9:.3g} GB/s "
                f"{self.start.source} at start, for {who}: plans move less over it. Look at these hosts' network",
                True,
            )
        )
