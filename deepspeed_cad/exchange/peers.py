"""Ranks that map each other's memory: a whole CAD group, the ranks of one host in it, or one rank alone.

In: the group, and which of its ranks belong together. Out: a `PeerGroup`, which landing areas are made over. Making
one starts no collective and no communicator; the ranks meet when they make memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist

from deepspeed_cad.exchange.failure.watchdog import Alarm
from deepspeed_cad.exchange.group import (
    Group,
    OwnGroup,
    global_rank,
    name_of,
    rank_of,
    show_to_symmetric_memory,
    size_of,
    store_of,
)
from deepspeed_cad.exchange.memory_store import MemoryStore
from deepspeed_cad.exchange.native_calls import Table, symmetric_memory


@dataclass(frozen=True, eq=False)
class PeerGroup:
    """See the top of this file."""

    members: Table
    """Ranks of the CAD group, ascending."""
    place: int
    """Where this rank is among them."""
    handle: dist.ProcessGroup | str | None
    """What torch's symmetric memory calls them; None: a rank alone, whose memory nobody else maps."""
    store: dist.Store | None
    """Where they meet; None: a rank alone."""
    registered: dist.ProcessGroup | None = None
    """Kept alive as long as torch is to find it by the name `handle`."""
    names: dist.Store | None = None
    """Likewise, the store of that."""

    def forget(self) -> None:
        """Take the name back from torch."""
        if self.registered is not None:
            torch_groups: Any = dist.distributed_c10d
            torch_groups._unregister_process_group(self.handle)


def whole_group(group: Group) -> PeerGroup:
    """All ranks of a group."""
    members = np.arange(size_of(group))
    if isinstance(group, OwnGroup):
        enable = getattr(symmetric_memory(), "enable_symm_mem_for_group", None)
        ranks = {int(member): int(member) for member in members}
        show_to_symmetric_memory(enable, group.name, group.processes, group.store, ranks)
    handle = group.name if isinstance(group, OwnGroup) else group
    return PeerGroup(members, rank_of(group), handle, open_store(group, "nvlink"))


def changed_group(group: OwnGroup, alarm: Alarm) -> PeerGroup:
    """All ranks of a group that was opened because servers changed: some may have come later than others."""
    members, name = np.arange(size_of(group)), f"{group.name}, its memory"
    names = MemoryStore(dist.PrefixStore("symmetric memory", group.store), alarm)
    registered = dist.ProcessGroup(names, group.rank, group.ranks)
    torch_groups: Any = dist.distributed_c10d
    torch_groups._register_process_group(name, registered)
    enable = getattr(symmetric_memory(), "enable_symm_mem_for_group", None)
    show_to_symmetric_memory(enable, name, registered, names, {int(member): int(member) for member in members})
    return PeerGroup(members, group.rank, name, open_store(group, "nvlink"), registered, names)


def host_group(group: Group, near: list[int]) -> PeerGroup:
    """The ranks r of a group with the same `near[r]` as this one. Every rank of the group calls it at the same time.

    Symmetric memory wants no more of a process group than rank, size and a store, so one is registered that has
    nothing else. `dist.new_group` would have all ranks of the job make the groups of all hosts, one after the other,
    and where a device is bound to the default group, ranks outside of a gloo group split its NCCL communicator.
    """
    rank = rank_of(group)
    members = np.flatnonzero(np.asarray(near) == near[rank]).astype(np.int64)
    place = int(np.searchsorted(members, rank))
    shared, number = _open(group, "host")
    if len(members) == 1:
        return PeerGroup(members, 0, None, None)
    name = f"deepspeed_cad host of rank {members[0]} in {name_of(group)}, {number}"
    store = dist.PrefixStore(name, shared)
    registered = dist.ProcessGroup(store, place, len(members))
    torch_groups: Any = dist.distributed_c10d
    torch_groups._register_process_group(name, registered)
    ranks = {global_rank(group, int(member)): index for index, member in enumerate(members)}
    enable = getattr(symmetric_memory(), "enable_symm_mem_for_group", None)
    show_to_symmetric_memory(enable, name, registered, store, ranks)
    return PeerGroup(members, place, name, dist.PrefixStore("meetings", store), registered)


def open_store(group: Group, purpose: str) -> dist.Store:
    """A part of the job's store for one transport object: all ranks of the group open it in the same order."""
    shared, number = _open(group, purpose)
    return dist.PrefixStore(f"{number}", shared)


def _open(group: Group, purpose: str) -> tuple[dist.Store, int]:
    """What all openings for a purpose share, and how many this rank has made."""
    rank = rank_of(group)
    shared = dist.PrefixStore(f"deepspeed_cad/{purpose}/{name_of(group)}", store_of(group))
    return shared, shared.add(f"opened by {rank}", 1)
