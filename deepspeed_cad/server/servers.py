"""The reserved servers of one trainer's session. An object of these classes is chosen once, when groups are opened:
nobody is reserved, servers stay as they are, or, in surviving/change.py, servers may be lost and others come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from deepspeed_cad.ahead.crew import Crew, Servers
from deepspeed_cad.config import CADConfig
from deepspeed_cad.exchange.failure.board import Liveness
from deepspeed_cad.exchange.probe import Opened
from deepspeed_cad.exchange.transport import Transport
from deepspeed_cad.planner.plan import Floats
from deepspeed_cad.server.link import ServerLink
from deepspeed_cad.server.orders import TRACE, Leader
from deepspeed_cad.server.split import Split
from deepspeed_cad.server.surviving.members import Members
from deepspeed_cad.trace.record import WARM_UP, Tracer


class NoServers:
    """Every rank trains and serves."""

    at_start = 0
    """Servers that the job began with."""
    reporters: tuple[Any, ...] = ()
    """What travels about servers with document lengths."""
    bytes_sent = 0
    """Through transports that were given up."""

    def __init__(self, trainers: int) -> None:
        self.members = Members(0, trainers, ())

    def crew(self, opened: Opened | None, speeds: Floats | None) -> Crew:
        """The ranks that there are now, as plans see them.

        `opened`: through what they exchange; None: there is one rank. `speeds`: in attention, of the ranks that the job
        began with; None: all are equal.
        """
        if opened is None:
            return Crew(self.members.trainers, speeds=speeds)
        return Crew(self.members.trainers, opened.transport, np.array(opened.hosts, np.int64), speeds)

    def begin(self, transport: Transport | None, install: Callable[[Opened | None], None]) -> None:
        """From now on servers may change, if they may at all.

        `install` takes what exchanges go through from then on; None: nothing, one rank is left.
        """

    def trace_next(self, tracer: Tracer) -> None:
        """A micro-batch is about to be trained: servers record it where trainers do."""

    def busy(self) -> tuple[float, float]:
        """Seconds that servers attended and that they are up, summed over servers, as they last told the leader."""
        return 0.0, 0.0

    def close(self) -> None:
        """Servers change no more."""

    def leave(self, reason: str) -> None:
        """This trainer needs no server any more; `reason` is empty where it ended well."""


class ReservedServers(NoServers):
    """Servers that are there until the job ends: what ends one ends all."""

    def __init__(self, role: Split, config: CADConfig, liveness: Liveness, link: ServerLink) -> None:
        self.role, self.config, self.liveness, self.link = role, config, liveness, link
        self.members = Members(0, role.trainers, tuple(range(role.trainers, role.ranks)))
        self.at_start = role.servers

    def crew(self, opened: Opened | None, speeds: Floats | None) -> Crew:
        """See NoServers; on the leader the crew also tells the servers."""
        trainers, count, generation = self.role.trainers, len(self.members.servers), self.members.generation
        speeds = None if speeds is None else speeds_of(self.members, speeds)
        if count and not self.config.trainers_serve:
            # A trainer of speed 0 hands over even its own rows, whatever that moves.
            serves = np.repeat([0.0, 1.0], [trainers, count])
            speeds = serves if speeds is None else serves * speeds
        leads = Leader(self.link.tell, generation).open if self.role.rank == 0 and count else None
        servers = Servers(count, self.at_start, trainers if self.config.trainers_serve else 0, leads)
        return replace(super().crew(opened, speeds), servers=servers, generation=generation)

    def busy(self) -> tuple[float, float]:
        return self.link.busy()

    def leave(self, reason: str) -> None:
        self.link.leave(reason)

    def trace_next(self, tracer: Tracer) -> None:
        """See NoServers; only the leader says so."""
        if tracer.rank == 0 and tracer.micro_batches <= WARM_UP + tracer.steps:
            head = {"do": TRACE, "path": str(tracer.path), "steps": tracer.steps, "ranks": tracer.ranks}
            self.link.tell(head, generation=self.members.generation)


def speeds_of(members: Members, speeds: Floats) -> Floats:
    """[members]: what was found at the start; who came later is taken for a mean server."""
    numbers, known = np.array(members.numbers), len(speeds)
    return np.where(numbers < known, speeds[np.minimum(numbers, known - 1)], speeds[members.trainers :].mean())
