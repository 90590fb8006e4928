"""What a session says of itself: lines for the log, and the few that every user sees.

In: a session and its statistics. Out: text; nothing here changes how anything runs.
"""

from __future__ import annotations

import logging
import math
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING

from deepspeed_cad.notice import counted, notice
from deepspeed_cad.profiles.speed import in_words
from deepspeed_cad.server.idle import EVERY, advise

if TYPE_CHECKING:
    from deepspeed_cad.session import Session
    from deepspeed_cad.statistics import Statistics

logger = logging.getLogger("deepspeed_cad")

REASON = 200
"""Characters of an error in the last line; the error itself stands above it."""


class Words:
    """The lines of one session, each said once."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._said_first = self._said_last = self._said_idle = False
        self._warned: set[str] = set()

    def describe(self) -> str:
        """How the session is set up, as one line."""
        session = self.session
        transport = "nothing to exchange" if session.transport is None else session.transport.name
        servers = ""
        if session.reserved is not None:
            servers = f" beside {counted(session.reserved.role.servers, 'reserved server')}"
        return (
            f"rank {session.rank} of {session.ranks} attention servers{servers}, transport {transport}, "
            f"overlap {session.config.overlap_used}, tolerance {session.config.tolerance}, cost {session.cost.name}, "
            f"{self._memory()}{self._links()}{in_words(session.speeds)}"
        )

    def report(self) -> str:
        """What CAD did since the session opened, on this rank, as one line."""
        session = self.session
        parked = ""
        if session.parking is not None:
            parked = f"; {session.parking.host_bytes >> 20} MiB of host memory for what attention keeps"
        now = session.statistics
        return f"{now.in_words(self._balance(now))}{parked}; rank {session.rank} of {session.ranks}, {self._how()}"

    def say_first(self) -> None:
        """Once, on rank 0, when the first micro-batch was planned: that CAD is on, and what to expect."""
        session = self.session
        if self._said_first or session.rank != 0:
            return
        self._said_first = True
        now = session.statistics
        gain = f"{self._balance(now)} in the first micro-batch"
        sent = f"rank 0 sent {now.bytes_sent / 2**20:.1f} MiB in its forward"
        ranks = counted(session.ranks, "rank")
        if session.reserved is not None:
            servers = session.reserved.role.servers
            ranks = f"{counted(session.ranks, 'trainer')} and {counted(servers, 'reserved server')}"
        arranged = next(filter(None, (feed.arranged for feed in session.feeds)), "")
        notice(f"CAD is on: {ranks}, {self._how()}; {gain}, {sent}{f'; {arranged}' if arranged else ''}")

    def say_last(self, reason: str) -> None:
        """Once, on rank 0, where the session closes or the process ends: what CAD did.

        `reason`: why training ended early; empty where it went well.
        """
        if self._said_first and not self._said_last:
            self._said_last = True
            begin = f"CAD stopped early ({textwrap.shorten(reason, REASON)})" if reason else "CAD is done"
            notice(f"{begin}: {self.report()}")

    def warn(self, lines: Iterable[str]) -> None:
        """Warnings for the user, each once, on rank 0."""
        for text in lines:
            if self.session.rank == 0 and text not in self._warned:
                self._warned.add(text)
                logger.warning(text)

    def look_for_idle(self) -> None:
        """Say once where reserved servers or trainers were idle since this was called last."""
        session = self.session
        warm, found = session.statistics.micro_batches > EVERY, session.take_statistics("idle")
        if not warm or self._said_idle or not found.servers_s or session.reserved is None:
            return
        role = session.reserved.role
        trainers_idle = found.waited_s * role.servers / found.servers_s
        text = advise(found.servers_idle, trainers_idle, role.servers, role.trainers)
        if text:
            self._said_idle = True
            notice(text)

    def _balance(self, now: Statistics) -> str:
        """How even attention is without CAD and with it."""
        session, trainers = self.session, self.session.ranks
        servers = session.group_ranks - trainers
        if session.config.trainers_serve or not servers:
            return f"attention max/mean {now.imbalance_before:.2f} → {now.imbalance:.2f}"
        # Statistics divide by the mean over all ranks; trainers attend without CAD only, servers with it only.
        before, after = (
            ratio * n / session.group_ranks for ratio, n in ((now.imbalance_before, trainers), (now.imbalance, servers))
        )
        runs = f"{counted(servers, 'reserved server')} run{'s' * (servers == 1)} all of it"
        return f"attention max/mean {before:.2f} on trainers; {runs}{f', max/mean {after:.2f}' * (servers > 1)}"

    def _how(self) -> str:
        session = self.session
        transport = "nothing to exchange" if session.transport is None else f"transport {session.transport.name}"
        return f"{transport}, {self._links()}kernel {', '.join(session.kernel_names) or 'not chosen yet'}"

    def _memory(self) -> str:
        session = self.session
        if session.learned.memory is None or session.transport is None:
            return ""
        held, limit = session.transport.landing_bytes / 2**30, session.learned.memory.now.size / 2**30
        most = "" if math.isinf(limit) else f" of at most {limit:.3g}"
        return f"landing areas {held:.3g}{most} GiB, " if most or held else ""

    def _links(self) -> str:
        links = self.session.learned.links
        return "" if links is None else f"{links.links}, "
