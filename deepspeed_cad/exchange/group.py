"""The ranks that exchange attention: a process group of torch's world, or one of our own beside it.

With reserved servers trainers have a torch world without them, and a server has none at all. A group over both is made
of a store alone, as tried on torch 2.11 and 2.13; what is private in torch about that is in this file and nowhere else.
In: a store that all ranks reach. Out: an `OwnGroup`. Transports ask the functions below, which know both kinds.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from deepspeed_cad.errors import CADError
from deepspeed_cad.exchange.failure.board import Liveness
from deepspeed_cad.threads import start_daemon

logger = logging.getLogger(__name__)

OPENING = "the opening of the servers' group"
LETTING_GO_S = 1.0
"""For whoever still holds a group that is given up to let go of it."""


@dataclass(frozen=True, eq=False)
class OwnGroup:
    """A process group outside of torch's world."""

    rank: int
    ranks: int
    name: str
    """By which torch's symmetric memory finds it."""
    store: dist.Store
    processes: dist.ProcessGroup

    def numbers(self, value: int, liveness: Liveness | None = None) -> list[int]:
        """One whole number of every rank, through the CPU. Collective; CADPeerError where a rank is missing."""
        into = [torch.zeros(1, dtype=torch.int64) for _ in range(self.ranks)]
        work = dist.all_gather(into, torch.tensor([value]), group=self.processes, async_op=True)
        if liveness is not None:
            liveness.patiently(work.is_completed, OPENING, with_servers=True)
        with Liveness.watch(liveness, OPENING, with_servers=True):
            work.wait()
        return [int(one) for one in into]

    def close(self) -> None:
        """Take the name back from torch."""
        torch_groups: Any = dist.distributed_c10d
        torch_groups._unregister_process_group(self.name)

    def abandon(self) -> None:
        """Close a group one of whose ranks is lost; nobody uses it any more.

        What other ranks have under way in it may end only when this rank's sockets close, and they close when the last
        reference goes. That waits for what is under way here, so a thread of its own does it.
        """
        self.close()
        held = [self]

        def bury() -> None:
            time.sleep(LETTING_GO_S)
            held.clear()

        start_daemon("gives a group up", bury, None)


Group: TypeAlias = dist.ProcessGroup | OwnGroup


def make_group(store: dist.Store, rank: int, ranks: int, device: torch.device, name: str, timeout_s: float) -> OwnGroup:
    """A group of the ranks that share a store. Collective; torch.distributed need not be initialised.

    Raises CADError where this torch lacks what is needed for it.
    """
    limit = timedelta(seconds=timeout_s)
    shared = dist.PrefixStore(name, store)
    try:
        processes = dist.ProcessGroup(shared, rank, ranks)
        kinds = dist.ProcessGroup.BackendType
        # The CPU's first: it is what meets everybody, and NCCL opens no communicator before its first collective.
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("cpu", shared), rank, ranks, limit)
        processes._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
        if device.type == "cuda":
            store_of_nccl = dist.PrefixStore("cuda", shared)
            nccl = dist.ProcessGroupNCCL(store_of_nccl, rank, ranks, nccl_options(limit))
            processes._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
        named: Any = processes
        named._set_group_name(name)
        register: Any = dist.distributed_c10d
        register._register_process_group(name, processes)
    except (AttributeError, TypeError) as error:
        raise CADError(
            f"torch {torch.__version__} makes process groups in a way that is not known here ({error}): reserved "
            "servers were tried with torch 2.11 and 2.13"
        ) from error
    return OwnGroup(rank, ranks, name, store, processes)


def nccl_options(limit: timedelta) -> Any:
    """Of a group of torch's over which exchanges may go: ahead of attention, as the streams in nccl.py, because
    behind it nothing would be hidden."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    options.is_high_priority_stream = True
    return options


def rank_of(group: Group) -> int:
    return group.rank if isinstance(group, OwnGroup) else dist.get_rank(group)


def size_of(group: Group) -> int:
    return group.ranks if isinstance(group, OwnGroup) else dist.get_world_size(group)


def has_ways_apart(group: Group, may_change: bool) -> bool:
    """Whether transports have streams, and flags or a communicator, for each way: beside reserved servers, whose
    results come home while the next nano-batch goes out. Not where training is to go on without one that is lost
    (`may_change`): there hosts wait for each exchange."""
    return isinstance(group, OwnGroup) and not may_change


def name_of(group: Group) -> str:
    return group.name if isinstance(group, OwnGroup) else str(group.group_name)


def store_of(group: Group) -> dist.Store:
    """The store that all ranks of a group reach, and others: prefixes keep uses of it apart."""
    return group.store if isinstance(group, OwnGroup) else dist.distributed_c10d._get_default_store()


def processes_of(group: Group) -> dist.ProcessGroup:
    """What torch's collectives take."""
    return group.processes if isinstance(group, OwnGroup) else group


def global_rank(group: Group, rank: int) -> int:
    """The number of a rank of a group in what surrounds it."""
    return rank if isinstance(group, OwnGroup) else dist.get_global_rank(group, rank)


def abort(group: Group, device: torch.device) -> None:
    """End what this rank has under way on a device, whether or not the others take part; the group is of no use then.

    A GPU cannot be freed otherwise from a collective that another rank does not join.
    """
    backend: Any = processes_of(group)._get_backend(device)
    backend.abort()
