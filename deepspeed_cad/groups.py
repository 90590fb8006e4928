"""The process groups of a session: over which its trainers gather, and over which all ranks of CAD exchange.

In: the configuration, and torch.distributed as the script set it up. Out: `Groups`. Opening is collective.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADConfigError, CADPeerError
from deepspeed_cad.exchange.failure.board import Liveness, open_board
from deepspeed_cad.exchange.failure.roll_call import call_roll
from deepspeed_cad.exchange.group import Group, OwnGroup, nccl_options
from deepspeed_cad.server.join import join_servers
from deepspeed_cad.server.launch import find_role
from deepspeed_cad.server.servers import NoServers
from deepspeed_cad.server.split import Split


@dataclass(frozen=True, eq=False)
class Groups:
    """What one process is a member of; groups are None where it trains alone."""

    servers: NoServers
    """What there is of them."""
    cpu: dist.ProcessGroup | None = None
    """The trainers, over gloo; the look-ahead gathers here. None where there is one trainer."""
    exchange: Group | None = None
    """All ranks that run attention; transports exchange here."""
    liveness: Liveness | None = None
    """The board on which ranks say that they end."""

    def close(self) -> None:
        """Release the groups; the servers must have been left."""
        for group in (self.cpu, self.exchange):
            if isinstance(group, OwnGroup):
                group.close()
            elif group is not None and dist.is_initialized():
                dist.destroy_process_group(group)

    def host_names(self) -> list[str]:
        """The name of every trainer's host, for messages. Collective over trainers."""
        if self.cpu is None:
            return [socket.gethostname()]
        names = [""] * dist.get_world_size(self.cpu)
        with Liveness.watch(self.liveness, "the other ranks' host names"):
            dist.all_gather_object(names, socket.gethostname(), group=self.cpu)
        return names


def open_groups(
    config: CADConfig, device: torch.device, group: dist.ProcessGroup | None, rank: int, ranks: int
) -> Groups:
    """Connect this rank to all others. Collective over trainers, and over servers where there are any.

    Args:
        config: the session's.
        device: where this rank computes.
        group: the trainers; None: all of torch.distributed's world.
        rank: of this process among them.
        ranks: how many they are.

    Raises CADConfigError for a group beside servers, and CADPeerError where ranks do not reach each other.
    """
    role = find_role(config, ranks, rank)
    if role is not None:
        return _open_with_servers(role, config, device, group, ranks)
    return Groups(NoServers(1)) if ranks == 1 else _open_in_place(config, device, group, rank, ranks)


def _open_in_place(
    config: CADConfig, device: torch.device, group: dist.ProcessGroup | None, rank: int, ranks: int
) -> Groups:
    call_roll(group, config.timeout_s)
    members = dist.get_process_group_ranks(group) if group is not None else None
    timeout = timedelta(seconds=config.timeout_s)
    try:
        cpu = dist.new_group(members, timeout=timeout, backend="gloo")
        exchange = open_exchange(members, timeout, device)
    except RuntimeError as error:
        raise CADPeerError(
            f"rank {rank} on {socket.gethostname()} cannot connect to all other ranks within "
            f"{config.timeout_s:g} s ({str(error).strip().splitlines()[0][:300]}). The hosts reach the job's "
            "store, but not all of each other: set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the network that "
            "connects them, and look at routes and firewalls"
        ) from error
    return Groups(NoServers(ranks), cpu, exchange, open_board(cpu, rank, ranks, config.timeout_s))


def open_exchange(members: list[int] | None, timeout: timedelta, device: torch.device) -> dist.ProcessGroup:
    """The group that transports exchange over where all ranks train; `members` None: all. Collective."""
    if device.type != "cuda":
        return dist.new_group(members, timeout=timeout, backend="gloo")
    return dist.new_group(members, timeout=timeout, backend="nccl", pg_options=nccl_options(timeout))


def _open_with_servers(
    role: Split, config: CADConfig, device: torch.device, group: dist.ProcessGroup | None, ranks: int
) -> Groups:
    if group is not None:
        raise CADConfigError('"servers" reserves ranks beside all of torch.distributed\'s: pass no group')
    cpu = None
    if ranks > 1:
        call_roll(None, config.timeout_s)
        cpu = dist.new_group(timeout=timedelta(seconds=config.timeout_s), backend="gloo")
    servers, exchange = join_servers(role, config, device)
    return Groups(servers, cpu, exchange, servers.liveness)
