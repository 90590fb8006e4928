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
from deepspeed_cad.planner.plan import Floats
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

    def planning(self, rank: int, linear: Callable[[int], Floats | None], speeds: Floats | None = None) -> Planning:
        """What plans have to know; the leader's also tell the servers.

        `linear`: seconds per token, by model. `speeds`: [ranks] in attention; None: all are equal.
        """
        speed = speeds
        if not self.config.trainers_serve:
            # A trainer of speed 0 hands over even its own rows, whatever that moves.
            serves = np.repeat([0.0, 1.0], [self.role.trainers, self.role.servers])
            speed = serves if speeds is None else serves * speeds
        leads = Leader(self.link).open if rank == 0 else None
        helpers = self.role.trainers if self.config.trainers_serve else 0
        return Planning(self.role.servers, leads, helpers, linear, speed)

    def trace_next(self, tracer: Tracer) -> None:
        """A micro-batch is about to be trained: servers record it where trainers do. Only the leader says so."""
        if tracer.rank == 0 and tracer.micro_batches <= WARM_UP + tracer.steps:
            self.link.tell({"do": TRACE, "path": str(tracer.path), "steps": tracer.steps, "ranks": tracer.ranks})


def join_servers(role: Split, config: CADConfig, device: torch.device) -> Reserved:
    """Meet the servers. Collective over trainers and servers; raises one CADError on all of them where it fails."""
    meeting = Rendezvous(role, config.timeout_s)
    meeting.claim()
    mine = hello(role, config, __version__)
    if role.rank == 0:
        offer_places(meeting, mine)
    said = meeting.meet(mine)
    liveness = open_board(meeting, role)
    link = connect(role.rank, said[role.trainers :], liveness, mine.host)
    return Reserved(role, config, liveness, link, open_group(role, liveness, device, config.timeout_s))
