"""The ranks that exchange attention, and those of them that map each other's memory.

With reserved servers trainers have a torch world without them, and a server has none at all. A group over both is made
of a store alone, as tried on torch 2.11 and 2.13 (`OwnGroup`); what is private in torch about that is in this file and
nowhere else. To find peers (`PeerGroup`) starts no collective and no communicator.
"""

import re
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from deepspeed_cad.errors import CADError, CADPeerError
from deepspeed_cad.exchange.failure.board import Liveness
from deepspeed_cad.exchange.failure.watchdog import Alarm
from deepspeed_cad.exchange.native_calls import Table, symmetric_memory
from deepspeed_cad.threads import start_daemon

_TORCH: Any = dist.distributed_c10d
OPENING = "the opening of transports"
LETTING_GO_S = 1.0
"""For whoever still holds a group that is given up to let go of it."""


@dataclass(frozen=True, eq=False)
class OwnGroup:
    rank: int
    ranks: int
    name: str
    """By which torch's symmetric memory finds it."""
    store: dist.Store
    processes: dist.ProcessGroup

    def close(self) -> None:
        _TORCH._unregister_process_group(self.name)

    def abandon(self) -> None:
        """Close a group one of whose ranks is lost. What other ranks have under way in it may end only when this rank's
        sockets close, with the last reference; that waits for what is under way here, so a thread of its own does it.
        """
        self.close()
        held = [self]

        def bury() -> None:
            time.sleep(LETTING_GO_S)
            held.clear()

        start_daemon("gives a group up", bury, None)


Group: TypeAlias = dist.ProcessGroup | OwnGroup


def numbers_of(group: Group, liveness: Liveness | None, value: int) -> list[int]:
    """One whole number of every rank, through the CPU. Collective; CADPeerError where a rank is missing."""
    processes, servers = processes_of(group), isinstance(group, OwnGroup)
    into = [torch.zeros(1, dtype=torch.int64) for _ in range(size_of(group))]
    work = dist.all_gather(into, torch.tensor([value]), group=processes, async_op=True)
    if liveness is not None:
        liveness.patiently(work.get_future().done, OPENING, with_servers=servers)
    with Liveness.watch(liveness, OPENING, with_servers=servers):
        work.wait()
    return [int(one) for one in into]


def make_group(store: dist.Store, rank: int, ranks: int, device: torch.device, name: str, timeout_s: float) -> OwnGroup:
    """A group of the ranks that share a store. Collective; raises CADError where this torch lacks what that needs."""
    limit = timedelta(seconds=timeout_s)
    shared = dist.PrefixStore(name, store)
    try:
        processes = dist.ProcessGroup(shared, rank, ranks)
        kinds = dist.ProcessGroup.BackendType
        # The CPU's first: it is what meets everybody, and NCCL opens no communicator before its first collective.
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("cpu", shared), rank, ranks, limit)
        processes._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
        if device.type == "cuda":
            nccl = dist.ProcessGroupNCCL(dist.PrefixStore("cuda", shared), rank, ranks, nccl_options(limit))
            processes._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
        named: Any = processes
        named._set_group_name(name)
        _TORCH._register_process_group(name, processes)
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
    """Whether each way has a stream, and flags or a communicator, of its own: beside reserved servers, whose results
    come home while the next nano-batch goes out. Not where a lost one may be done without: there hosts wait."""
    return isinstance(group, OwnGroup) and not may_change


def name_of(group: Group) -> str:
    return group.name if isinstance(group, OwnGroup) else str(group.group_name)


def processes_of(group: Group) -> dist.ProcessGroup:
    return group.processes if isinstance(group, OwnGroup) else group


def abort(group: Group, device: torch.device) -> None:
    """End what this rank has under way on a device: what frees a GPU from a collective that a rank does not join."""
    processes_of(group)._get_backend(device).abort()


@dataclass(frozen=True, eq=False)
class PeerGroup:
    """Ranks that map each other's memory: a whole group, the ranks of one host in it, or one rank alone."""

    members: Table
    """Ranks of the CAD group, ascending."""
    place: int
    handle: dist.ProcessGroup | str | None
    """What torch's symmetric memory calls them; None: a rank alone, whose memory nobody else maps."""
    registered: tuple[dist.ProcessGroup, dist.Store] | None = None
    """Kept alive as long as torch is to find it by the name `handle`; and the store of it."""

    def forget(self) -> None:
        """Take the name back from torch."""
        if self.registered is not None:
            _TORCH._unregister_process_group(self.handle)


def find_peers(group: Group, alarm: Alarm, near: list[int] | None) -> PeerGroup:
    """The ranks r with the same `near[r]` as this one; None: all. Every rank of the group calls it at the same time."""
    if near is not None:
        return host_group(group, near)
    members, rank = np.arange(size_of(group)), rank_of(group)
    if not isinstance(group, OwnGroup):
        return PeerGroup(members, rank, group)
    ranks = {int(member): int(member) for member in members}
    if not alarm.goes_on:
        _show(group.name, group.processes, group.store, ranks)
        return PeerGroup(members, rank, group.name)
    # It was opened because servers changed: some ranks may have come later than others.
    name, names = f"{group.name}, its memory", MemoryStore(dist.PrefixStore("symmetric memory", group.store), alarm)
    return PeerGroup(members, rank, name, (_register(name, names, rank, ranks), names))


def host_group(group: Group, near: list[int]) -> PeerGroup:
    """The ranks with the same number as this one. Symmetric memory wants no more of a process group than rank, size and
    a store. `dist.new_group` would have all ranks make the groups of all hosts, and where a device is bound to the
    default group, split its NCCL communicator."""
    rank = rank_of(group)
    members = np.flatnonzero(np.asarray(near) == near[rank]).astype(np.int64)
    place = int(np.searchsorted(members, rank))
    shared, number = _count_openings(group, "host")
    if len(members) == 1:
        return PeerGroup(members, 0, None)
    name = f"deepspeed_cad host of rank {members[0]} in {name_of(group)}, {number}"
    store = dist.PrefixStore(name, shared)
    surrounding = [int(m) if isinstance(group, OwnGroup) else dist.get_global_rank(group, int(m)) for m in members]
    registered = _register(name, store, place, {one: index for index, one in enumerate(surrounding)})
    return PeerGroup(members, place, name, (registered, store))


def _register(name: str, store: dist.Store, place: int, ranks: dict[int, int]) -> dist.ProcessGroup:
    """A process group of a store alone, which torch's symmetric memory finds by its name."""
    registered = dist.ProcessGroup(store, place, len(ranks))
    _TORCH._register_process_group(name, registered)
    _show(name, registered, store, ranks)
    return registered


def _show(name: str, processes: dist.ProcessGroup, store: dist.Store, ranks: dict[int, int]) -> None:
    """Let an older torch's symmetric memory, whose `enable_symm_mem_for_group` is not deprecated, find a group. It
    looks store and ranks up among its own groups. They are there for this moment only: the profiler, for one, takes
    whatever is there for a whole process group."""
    enable = getattr(symmetric_memory(), "enable_symm_mem_for_group", None)
    if enable is None or hasattr(enable, "__deprecated__"):
        return
    world = _TORCH._world
    world.pg_map[processes], world.pg_group_ranks[processes] = ("none", store), ranks
    try:
        enable(name)
    finally:
        del world.pg_map[processes], world.pg_group_ranks[processes]


def open_store(group: Group, purpose: str) -> dist.Store:
    """A part of the job's store for one transport: all ranks of the group open it in the same order."""
    shared, number = _count_openings(group, purpose)
    return dist.PrefixStore(f"{number}", shared)


def _count_openings(group: Group, purpose: str) -> tuple[dist.Store, int]:
    store = group.store if isinstance(group, OwnGroup) else _TORCH._get_default_store()
    shared = dist.PrefixStore(f"deepspeed_cad/{purpose}/{name_of(group)}", store)
    return shared, shared.add(f"opened by {rank_of(group)}", 1)


_KEY = re.compile(r"(.*)/(\d+)/(\d+)")


class MemoryStore(dist.Store):
    """The store of one group through which its ranks map each other's memory, not all of them there from the start.

    Torch numbers what its symmetric memory exchanges, in keys "WHAT/NUMBER/RANK", by a counter of the process. A server
    that came later has exchanged less, so its keys would never be those that the others wait for. Here each number is
    replaced by its place among those of the group, in which all members exchange the same.

    Torch holds it by a pointer: whoever registers it has to keep it."""

    def __init__(self, store: dist.Store, alarm: Alarm) -> None:
        super().__init__()
        self._store, self._alarm = store, alarm
        self._places: dict[tuple[str, str], int] = {}

    def set(self, key: str, value: str) -> None:
        self._store.set(self._rename(key), value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(self._rename(key))

    def check(self, keys: list[str]) -> bool:
        return self._store.check([self._rename(key) for key in keys])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Raises ServerLostError where a server is lost, CADPeerError where time is up."""
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
