"""The process groups of a session: over which its trainers gather, and over which ranks of a CAD group exchange.

In: the configuration, and torch.distributed as the script set it up. Out: `Groups`, and costs. Opening is collective.
"""

import socket
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADError, CADPeerError, CADUnsupportedError, in_one_line
from deepspeed_cad.exchange.failure.board import Liveness, open_board
from deepspeed_cad.exchange.failure.roll_call import call_roll
from deepspeed_cad.exchange.group import Group, OwnGroup, nccl_options, numbers_of
from deepspeed_cad.exchange.links import Gather
from deepspeed_cad.profiles import Profile, choose_profile
from deepspeed_cad.profiles.profile import GENERIC_GPU
from deepspeed_cad.profiles.speed import in_seconds
from deepspeed_cad.server.launch import find_role
from deepspeed_cad.server.servers import NoServers, join_servers
from deepspeed_cad.shares import Replica, Shares


@dataclass(frozen=True, eq=False)
class Groups:
    """What one process is a member of; groups are None where it trains alone."""

    servers: NoServers
    cpu: dist.ProcessGroup | None = None
    """The trainers, over gloo; the look-ahead gathers here. None where there is one trainer."""
    exchange: Group | None = None
    """The ranks that run attention of one share of heads; transports exchange here. None where it is this one."""
    liveness: Liveness | None = None
    shares: Shares = field(default_factory=lambda: Shares.none(0, 1))
    """How trainers divide heads among them."""
    hosts: list[str] = field(default_factory=lambda: [socket.gethostname()])
    """The name of every trainer's host in this CAD group, for messages."""
    share: dist.ProcessGroup | None = None
    """Where heads are divided: the ranks with one share, over gloo. They open a transport and time links by themselves:
    how often they ask each other is their own affair."""

    def agree(self, of_job: Gather) -> Gather:
        """What gives one number of every rank of the CAD group, while it opens. Collective. `of_job` gives it by a
        collective of all trainers, which compares their configurations."""
        if isinstance(self.exchange, OwnGroup):
            return partial(numbers_of, self.exchange, self.liveness)
        if self.cpu is None:
            return lambda value: [value]
        if self.shares.count == 1:
            return of_job
        of_job(0)  # compares configurations, once
        return lambda value: [value] if self.share is None else numbers_of(self.share, self.liveness, value)

    def close(self) -> None:
        for group in (self.cpu, self.exchange, self.share):
            if isinstance(group, OwnGroup):
                group.close()
            elif group is not None and dist.is_initialized():
                dist.destroy_process_group(group)


def open_groups(config: CADConfig, device: torch.device, replica: Replica | None, rank: int, ranks: int) -> Groups:
    """Connect this rank, one of `ranks` trainers, to all others. Collective over trainers, and over servers where there
    are any. `replica`: the ranks that divide heads with this one; None: it has all of them.

    Raises CADConfigError where ranks do not agree who divides heads with whom, CADUnsupportedError where they do so
    beside servers or what else is not built there, and CADPeerError where ranks do not reach each other."""
    role, replica = find_role(config.servers, ranks, rank), replica or Replica((rank,))
    if role is not None and len(replica.ranks) > 1:
        raise CADUnsupportedError(
            f'"servers" reserves ranks, and {len(replica.ranks)} ranks divide the heads of a micro-batch among them '
            "(tensor parallelism, Ulysses): servers know of no shares. Leave one of them out"
        )
    alone = Groups(NoServers(1))
    trainers = alone if ranks == 1 else _open_trainers(config.timeout_s, device, replica, rank, ranks, role is None)
    if trainers.shares.count > 1:
        refuse_beside_shares(config, trainers.shares.pieces)
    if role is None:
        return trainers
    servers, exchange = join_servers(role, config, device)
    return Groups(servers, trainers.cpu, exchange, servers.liveness, trainers.shares, trainers.hosts)


def _open_trainers(
    timeout_s: float, device: torch.device, replica: Replica, rank: int, ranks: int, exchanges: bool
) -> Groups:
    """Of trainers alone; `exchanges`: without servers beside them."""
    call_roll(timeout_s)
    timeout, exchange, share = timedelta(seconds=timeout_s), None, None
    try:
        cpu = dist.new_group(timeout=timeout, backend="gloo")
        said = [(replica, socket.gethostname())] * ranks
        dist.all_gather_object(said, said[rank], group=cpu)
        shares = Shares.of([of for of, _ in said], rank)
        # All ranks make the groups of all shares, in the same order.
        for members in shares.groups if exchanges and len(shares.replicas) > 1 else []:
            group = open_exchange(members, timeout, device)
            exchange = group if rank in members else exchange
            if shares.count > 1:
                group = open_exchange(members, timeout, torch.device("cpu"))
                share = group if rank in members else share
    except CADError:
        raise
    except RuntimeError as error:
        raise CADPeerError(
            f"rank {rank} on {socket.gethostname()} cannot connect to all other ranks, with "
            f"{timeout_s:g} s for each try ({in_one_line(error)}). The hosts reach the "
            "job's store, but not all of each other: set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the network "
            "that connects them, and look at routes and firewalls"
        ) from error
    board = open_board(cpu, rank, ranks, timeout_s)
    board.watched = shares.members
    board.beside = [one for one in range(ranks) if one not in board.watched]
    hosts = [said[one][1] for one in shares.members]
    return Groups(NoServers(len(shares.replicas)), cpu, exchange, board, shares, hosts, share)


def open_exchange(members: list[int] | None, timeout: timedelta, device: torch.device) -> dist.ProcessGroup:
    """The group that transports exchange over where all ranks train; `members` None: all. Collective over the job."""
    if device.type != "cuda":
        return dist.new_group(members, timeout=timeout, backend="gloo")
    return dist.new_group(members, timeout=timeout, backend="nccl", pg_options=nccl_options(timeout))


def refuse_beside_shares(config: CADConfig, pieces: bool) -> None:
    """Raise CADUnsupportedError for what is not built where ranks divide heads; `pieces`: see Replica."""
    if config.documents == "deal":
        raise CADUnsupportedError(
            '"documents": "deal" moves documents between ranks, and here several ranks hold one micro-batch '
            'together (tensor parallelism, Ulysses). Set it to "keep"'
        )
    if pieces and (config.overlap_used == "interleave" or config.verify):
        key = "verify" if config.verify else "overlap"
        raise CADUnsupportedError(
            f'"{key}" cannot be had beside Ulysses, where ranks hold all tokens inside attention only: leave it out'
        )


def share_cost(config: CADConfig, device: torch.device, group: dist.ProcessGroup | None, exchanges: bool) -> Profile:
    """The costs that rank 0 finds, because profiles measured on two machines are never equal, and plans must be.
    Collective; raises on all ranks what went wrong on rank 0. `group`: the trainers; None where there is one.
    `exchanges`: other ranks run attention too, so that costs are weighed against transfers, as ratios cannot be."""
    found: list[Profile | CADError | None] = [None]
    if group is None or dist.get_rank(group) == 0:
        try:
            cost = choose_profile(config.cost, device, config.kernel)
            if cost is GENERIC_GPU and exchanges and not torch.are_deterministic_algorithms_enabled():
                cost = in_seconds(GENERIC_GPU, device, config.kernel)
            found = [cost]
        except Exception as error:
            said = f"rank 0 found no cost profile: {type(error).__name__}: {in_one_line(error)}"
            found = [error if isinstance(error, CADError) else CADError(said)]
    if group is not None:
        dist.broadcast_object_list(found, src=dist.get_global_rank(group, 0), group=group)
    if not isinstance(found[0], Profile):
        raise found[0] or CADError("rank 0 sent no cost profile")
    return found[0]
