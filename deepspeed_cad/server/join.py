"""How a trainer meets the reserved servers, and what its session holds of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from deepspeed_cad.ahead.plan import Reserved as Planning
from deepspeed_cad.config import CADConfig
from deepspeed_cad.exchange.group import OwnGroup
from deepspeed_cad.exchange.liveness import Liveness
from deepspeed_cad.exchange.transport import Transport
from deepspeed_cad.planner.plan import Floats
from deepspeed_cad.server.change import Changes
from deepspeed_cad.server.crew import Crew, why_not_change
from deepspeed_cad.server.link import ServerLink, connect
from deepspeed_cad.server.meeting import offer_places, open_board, open_group
from deepspeed_cad.server.orders import TRACE, Leader
from deepspeed_cad.server.rendezvous import Rendezvous, hello
from deepspeed_cad.server.split import Split
from deepspeed_cad.trace.record import WARM_UP, Tracer
from deepspeed_cad.version import __version__


@dataclass(frozen=True, eq=False)
class Reserved:
    """The servers of one trainer's session."""

    role: Split
    config: CADConfig
    liveness: Liveness
    link: ServerLink
    group: OwnGroup
    changes: Changes | None
    """Where servers may change."""

    def planning(
        self,
        rank: int,
        linear: Callable[[int], Floats | None],
        speeds: Floats | None = None,
        hosts: np.ndarray | None = None,
        transport: Transport | None = None,
    ) -> Planning:
        """What plans have to know; the leader's also tell the servers.

        `linear`: seconds per token, by model. `speeds`: in attention, of the ranks that the job began with; None: all
        are equal. `hosts`, `transport`: of the present servers, where these may change.
        """
        trainers, servers, generation = self.role.trainers, self.role.servers, 0
        if self.changes is not None:
            crew = self.changes.crew
            servers, generation = len(crew.servers), crew.generation
            speeds = None if speeds is None else speeds_of(crew, speeds)
        if servers and not self.config.trainers_serve:
            # A trainer of speed 0 hands over even its own rows, whatever that moves.
            serves = np.repeat([0.0, 1.0], [trainers, servers])
            speeds = serves if speeds is None else serves * speeds
        leads = Leader(self.link, generation).open if rank == 0 and servers else None
        return Planning(
            servers, leads, trainers if self.config.trainers_serve else 0, linear, speeds, generation,
            self.role.servers, None if self.changes is None else self.changes.passes, hosts, transport,
        )  # fmt: skip

    def trace_next(self, tracer: Tracer) -> None:
        """A micro-batch is about to be trained: servers record it where trainers do. Only the leader says so."""
        if tracer.rank == 0 and tracer.micro_batches <= WARM_UP + tracer.steps:
            generation = 0 if self.changes is None else self.changes.crew.generation
            head = {"do": TRACE, "path": str(tracer.path), "steps": tracer.steps, "ranks": tracer.ranks}
            self.link.tell(head, generation=generation)


def speeds_of(crew: Crew, speeds: Floats) -> Floats:
    """[ranks of the crew]: what was found at the start; who came later is taken for a mean server."""
    numbers, known = np.array(crew.numbers), len(speeds)
    return np.where(numbers < known, speeds[np.minimum(numbers, known - 1)], speeds[crew.trainers :].mean())


def join_servers(role: Split, config: CADConfig, device: torch.device) -> Reserved:
    """Meet the servers. Collective over trainers and servers; raises one CADError on all of them where it fails."""
    meeting = Rendezvous(role, config.timeout_s)
    meeting.claim()
    mine = hello(role, config, __version__)
    if reason := why_not_change(config, device):
        meeting.refuse(reason)
    if role.rank == 0:
        offer_places(meeting, mine)
    said = meeting.meet(mine)
    liveness = open_board(meeting, role, config)
    changing = config.on_server_failure == "continue"
    link = connect(role.rank, said[role.trainers :], liveness, mine.host, changing)
    group = open_group(role, liveness, device, config.timeout_s)
    changes = Changes(role, config, device, mine.host, link, liveness) if changing else None
    return Reserved(role, config, liveness, link, group, changes)
