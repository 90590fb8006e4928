"""How a trainer meets the reserved servers, and what its session holds of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from deepspeed_cad.ahead.crew import Crew, Servers
from deepspeed_cad.config import CADConfig
from deepspeed_cad.exchange.failure.board import Liveness
from deepspeed_cad.exchange.group import OwnGroup
from deepspeed_cad.exchange.transport import Transport
from deepspeed_cad.planner.plan import Floats
from deepspeed_cad.server.handshake import connect_to
from deepspeed_cad.server.link import ServerLink
from deepspeed_cad.server.meeting import offer_places, open_board, open_group
from deepspeed_cad.server.orders import TRACE, Leader
from deepspeed_cad.server.rendezvous import Rendezvous, hello
from deepspeed_cad.server.split import Split
from deepspeed_cad.server.surviving.change import Changes
from deepspeed_cad.server.surviving.members import Members, why_not_change
from deepspeed_cad.trace.record import WARM_UP, Tracer
from deepspeed_cad.version import __version__

LEAST_SILENT_S = 5.0
"""Of silence, after which a server is lost: it speaks twice a second, and machines are busy."""


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

    def crew(self, transport: Transport | None, hosts: np.ndarray | None, speeds: Floats | None) -> Crew:
        """The trainers and present servers, as plans see them; on the leader they also tell the servers.

        `speeds`: in attention, of the ranks that the job began with; None: all are equal.
        """
        trainers, count, generation = self.role.trainers, self.role.servers, 0
        if self.changes is not None:
            members = self.changes.crew
            count, generation = len(members.servers), members.generation
            speeds = None if speeds is None else speeds_of(members, speeds)
        if count and not self.config.trainers_serve:
            # A trainer of speed 0 hands over even its own rows, whatever that moves.
            serves = np.repeat([0.0, 1.0], [trainers, count])
            speeds = serves if speeds is None else serves * speeds
        leads = Leader(self.link, generation).open if self.role.rank == 0 and count else None
        helpers = trainers if self.config.trainers_serve else 0
        servers = Servers(count, self.role.servers, helpers, leads)
        calls = {} if self.changes is None else {"calls": self.changes.calls}
        return Crew(trainers, transport, hosts, speeds, servers, generation, **calls)

    def trace_next(self, tracer: Tracer) -> None:
        """A micro-batch is about to be trained: servers record it where trainers do. Only the leader says so."""
        if tracer.rank == 0 and tracer.micro_batches <= WARM_UP + tracer.steps:
            generation = 0 if self.changes is None else self.changes.crew.generation
            head = {"do": TRACE, "path": str(tracer.path), "steps": tracer.steps, "ranks": tracer.ranks}
            self.link.tell(head, generation=generation)


def speeds_of(members: Members, speeds: Floats) -> Floats:
    """[members]: what was found at the start; who came later is taken for a mean server."""
    numbers, known = np.array(members.numbers), len(speeds)
    return np.where(numbers < known, speeds[np.minimum(numbers, known - 1)], speeds[members.trainers :].mean())


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
    doors = {server.rank: meeting.find_door(server.rank, config.timeout_s) for server in said[role.trainers :]}
    connections = {number: connect_to(role.rank, said[number].what, door) for number, door in doors.items()}
    link = ServerLink(role.rank, connections, liveness, max(config.timeout_s / 2, LEAST_SILENT_S), changing)
    group = open_group(role, liveness, device, config.timeout_s)
    changes = Changes(role, config, device, link, liveness) if changing else None
    return Reserved(role, config, liveness, link, group, changes)
