"""Ranks that map each other's memory: a whole CAD group, the ranks of one host in it, or one rank alone.

In: the group, and which of its ranks belong together. Out: a `PeerGroup`, which landing areas are made over. Making
one starts no collective and no communicator; the ranks meet when they make memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist

from deepspeed_cad.errors import CADPeerError
from deepspeed_cad.exchange.failure.watchdog import Alarm
from deepspeed_cad.exchange.group import (
    Group,
    OwnGroup,
    global_rank,
    name_of,
    rank_of,
    size_of,
    store_of,
)
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
    registered: tuple[dist.ProcessGroup, dist.Store] | None = None
    """Kept alive as long as torch is to find it by the name `handle`; and the store of it."""

    def forget(self) -> None:
        """Take the name back from torch."""
        if self.registered is not None:
            torch_groups: Any = dist.distributed_c10d
            torch_groups._unregister_process_group(self.handle)


def find_peers(group: Group, alarm: Alarm, near: list[int] | None) -> PeerGroup:
    """The ranks r with the same `near[r]` as this one; None: all. Every rank of the group calls it at the same time."""
    if near is not None:
        return host_group(group, near)
    if isinstance(group, OwnGroup) and alarm.goes_on:
        return changed_group(group, alarm)
    return whole_group(group)


def whole_group(group: Group) -> PeerGroup:
    members = np.arange(size_of(group))
    if isinstance(group, OwnGroup):
        _show(group.name, group.processes, group.store, {int(member): int(member) for member in members})
    handle = group.name if isinstance(group, OwnGroup) else group
    return PeerGroup(members, rank_of(group), handle, open_store(group, "nvlink"))


def changed_group(group: OwnGroup, alarm: Alarm) -> PeerGroup:
    """All ranks of a group that was opened because servers changed: some may have come later than others."""
    members, name = np.arange(group.ranks), f"{group.name}, its memory"
    names = MemoryStore(dist.PrefixStore("symmetric memory", group.store), alarm)
    registered = _register(name, names, group.rank, {int(member): int(member) for member in members})
    return PeerGroup(members, group.rank, name, open_store(group, "nvlink"), (registered, names))


def host_group(group: Group, near: list[int]) -> PeerGroup:
    """The ranks with the same number as this one.

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
    ranks = {global_rank(group, int(member)): index for index, member in enumerate(members)}
    registered = _register(name, store, place, ranks)
    return PeerGroup(members, place, name, dist.PrefixStore("meetings", store), (registered, store))


def _register(name: str, store: dist.Store, place: int, ranks: dict[int, int]) -> dist.ProcessGroup:
    """A process group of a store alone, which torch's symmetric memory finds by its name."""
    registered = dist.ProcessGroup(store, place, len(ranks))
    torch_groups: Any = dist.distributed_c10d
    torch_groups._register_process_group(name, registered)
    _show(name, registered, store, ranks)
    return registered


def _show(name: str, processes: dist.ProcessGroup, store: dist.Store, ranks: dict[int, int]) -> None:
    """Let an older torch's symmetric memory, whose `enable_symm_mem_for_group` is not deprecated, find a group.

    It looks store and ranks up among its own groups. They are there for this moment only: the profiler, for one, takes
    whatever is there for a whole process group.
    """
    enable = getattr(symmetric_memory(), "enable_symm_mem_for_group", None)
    if enable is None or hasattr(enable, "__deprecated__"):
        return
    world = dist.distributed_c10d._world
    world.pg_map[processes] = ("none", store)
    world.pg_group_ranks[processes] = ranks
    try:
        enable(name)
    finally:
        del world.pg_map[processes], world.pg_group_ranks[processes]


def open_store(group: Group, purpose: str) -> dist.Store:
    """A part of the job's store for one transport object: all ranks of the group open it in the same order."""
    shared, number = _open(group, purpose)
    return dist.PrefixStore(f"{number}", shared)


def _open(group: Group, purpose: str) -> tuple[dist.Store, int]:
    """What all openings for a purpose share, and how many this rank has made."""
    rank = rank_of(group)
    shared = dist.PrefixStore(f"deepspeed_cad/{purpose}/{name_of(group)}", store_of(group))
    return shared, shared.add(f"opened by {rank}", 1)


_KEY = re.compile(r"(.*)/(\d+)/(\d+)")


class MemoryStore(dist.Store):
    """The store of one group through which its ranks map each other's memory, not all of them there from the start.

    Torch numbers what its symmetric memory exchanges, in keys "WHAT/NUMBER/RANK", by a counter of the process
    (`StoreExchange` in its CUDASymmetricMemoryUtils.hpp; later versions count for each group). A server that came later
    has exchanged less, so its keys would never be those that the others wait for. Here each number is replaced by its
    place among those of the group, in which all members exchange the same.

    Torch holds it by a pointer: whoever registers it has to keep it.
    """

    def __init__(self, store: dist.Store, alarm: Alarm) -> None:
        super().__init__()
        self._store, self._alarm = store, alarm
        self._places: dict[tuple[str, str], int] = {}

    def set(self, key: str, value: str) -> None:
        self._store.set(self._rename(key), value)

    def get(self, key: str) -> bytes:
        """A value, when it is there. Raises ServerLostError where a server is lost, CADPeerError where time is up."""
        self.wait([key])
        return self._store.get(self._rename(key))

    def check(self, keys: list[str]) -> bool:
        return self._store.check([self._rename(key) for key in keys])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until values are there; raises as `get`."""
        alarm = self._alarm
        # Asked again and again, so that it ends where a server is lost.
        if not alarm.liveness.patiently(
            lambda: self.check(keys), "other ranks' memory", with_servers=True, timeout_s=alarm.timeout_s
        ):
            raise CADPeerError(
                f"rank {alarm.rank} waited {alarm.timeout_s:g} s for {', '.join(keys)} while ranks map "
                "each other's memory"
            )

    def _rename(self, key: str) -> str:
        found = _KEY.fullmatch(key)
        if found is None:
            return key
        what, number, rank = found.groups()
        place = self._places.setdefault((what, number), len(self._places))
        return f"{what}/place {place}/{rank}"
