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
from deepspeed_cad.server.crew import why_not_change
from deepspeed_cad.server.link import ServerLink, connect
from deepspeed_cad.server.meeting import offer_places, open_board, open_group
from deepspeed_cad.server.orders import Leader
from deepspeed_cad.server.rendezvous import Rendezvous, hello
from deepspeed_cad.server.split import Split
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
        hosts: np.ndarray | None = None,
        transport: Transport | None = None,
    ) -> Planning:
        """What plans have to know; the leader's also tell the servers.

        `linear`: seconds per token, by model. `hosts`, `transport`: of the present servers, where these may change.
        """
        trainers, servers, generation = self.role.trainers, self.role.servers, 0
        if self.changes is not None:
            servers, generation = len(self.changes.crew.servers), self.changes.crew.generation
        trainers_serve = self.config.trainers_serve or not servers
        # A trainer of speed 0 hands over even its own rows, whatever that moves.
        speed = None if trainers_serve else np.repeat([0.0, 1.0], [trainers, servers])
        leads = Leader(self.link, generation).open if rank == 0 and servers else None
        return Planning(
            servers, leads, trainers if self.config.trainers_serve else 0, linear, speed, generation, self.role.servers,
            None if self.changes is None else self.changes.passes, hosts, transport,
        )  # fmt: skip


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
    liveness = open_board(meeting, role)
    changing = config.on_server_failure == "continue"
    link = connect(role.rank, said[role.trainers :], liveness, mine.host, changing)
    group = open_group(role, liveness, device, config.timeout_s)
    changes = Changes(role, config, device, mine.host, link, liveness) if changing else None
    return Reserved(role, config, liveness, link, group, changes)
