"""How trainers and servers come together at the start of a job: the board, the sockets, the group."""

from __future__ import annotations

import torch
import torch.distributed as dist

from deepspeed_cad.config import CADConfig
from deepspeed_cad.exchange.failure.board import Liveness
from deepspeed_cad.exchange.group import OwnGroup, make_group
from deepspeed_cad.server.handshake import connect_to
from deepspeed_cad.server.link import ServerLink
from deepspeed_cad.server.rendezvous import Rendezvous, hello, offer_places
from deepspeed_cad.server.servers import ReservedServers
from deepspeed_cad.server.split import Split
from deepspeed_cad.server.surviving.change import SurvivingServers
from deepspeed_cad.server.surviving.link import SurvivingLink
from deepspeed_cad.server.surviving.members import may_change, why_not_change
from deepspeed_cad.version import __version__

LEAST_SILENT_S = 5.0
"""Of silence, after which a server is lost: it speaks twice a second, and machines are busy."""


def join_servers(role: Split, config: CADConfig, device: torch.device) -> tuple[ReservedServers, OwnGroup]:
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
    doors = {server.rank: meeting.find_door(server.rank, config.timeout_s) for server in said[role.trainers :]}
    connections = {number: connect_to(role.rank, said[number].what, door) for number, door in doors.items()}
    given = role.rank, connections, liveness, max(config.timeout_s / 2, LEAST_SILENT_S)
    if not may_change(config):
        link = ServerLink(*given)
        return ReservedServers(role, config, liveness, link), open_group(role, liveness, device, config.timeout_s)
    surviving = SurvivingLink(*given)
    group = open_group(role, liveness, device, config.timeout_s)
    return SurvivingServers(role, config, liveness, surviving, device), group


def open_board(meeting: Rendezvous, role: Split, config: CADConfig) -> Liveness:
    board = dist.PrefixStore("board", meeting.root)
    liveness = Liveness(board, role.rank, role.ranks, meeting.timeout_s / 2)
    liveness.may_change = may_change(config)
    return liveness


def open_group(role: Split, liveness: Liveness, device: torch.device, timeout_s: float) -> OwnGroup:
    """The process group of trainers and servers. Collective."""
    # A connection of its own: gloo waits inside the store, and nobody else could ask it anything meanwhile.
    store = dist.PrefixStore("group", Rendezvous(role, timeout_s).root)
    with Liveness.watch(liveness, "the group of trainers and servers"):
        return make_group(store, role.rank, role.ranks, device, f"deepspeed_cad servers {role.attempt}", timeout_s)
