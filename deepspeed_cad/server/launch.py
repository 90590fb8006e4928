"""Who trains and who serves, decided before the training script runs, and a smaller world for those that train.

In: a request for CAD with the "servers" key, and the environment variables RANK, WORLD_SIZE, LOCAL_RANK and those for
the host, as torchrun, accelerate and deepspeed set them. Out: a `Split`, the same on all processes but for the rank,
and a trainer's environment. Imports no torch.
"""

import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from deepspeed_cad.errors import CADConfigError, CADError
from deepspeed_cad.request import Request, read_environment

PROCESS = "process"
Reservation = dict[str, Any]
"""The value of "servers" where it is not "all"."""

LAUNCH = "torchrun --nproc_per_node N -m deepspeed_cad.run --cad_config FILE train.py …"


@dataclass(frozen=True)
class Split:
    """One process of a job with reserved servers."""

    trainers: int
    servers: int
    rank: int
    """CAD rank: trainers come first."""
    rendezvous: str
    """HOST:PORT of the store that the trainers' torch.distributed meets at."""
    attempt: int = 0
    """How often the launcher has started the job again."""

    @property
    def ranks(self) -> int:
        return self.trainers + self.servers

    @property
    def is_server(self) -> bool:
        return self.rank >= self.trainers

    @property
    def came_later(self) -> bool:
        return self.rank >= self.ranks


def split(servers: Reservation, environment: Mapping[str, str]) -> tuple[Split, dict[str, str]]:
    """The role of this process, and the variables that change where it trains.

    Raises CADConfigError where the reservation does not fit the launch; on all processes alike where each can tell."""
    rank, world, local, size, host, hosts = _read_place(environment)
    rendezvous = f"{environment.get('MASTER_ADDR', '127.0.0.1')}:{environment.get('MASTER_PORT', '29500')}"
    # Each host counts only what failed there. The number is needed where the store outlives an attempt.
    outlives = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")) if outlives else 0
    kind, value = next(iter(servers.items()))
    if kind == "joined":
        return Split(world, value, rank, rendezvous, attempt), {}
    first = rank - local
    if kind == "reserved_per_node":
        if value >= size:
            raise _no_trainer(servers, size)
        here, total, serves = value, value * hosts, local >= size - value
        below = value * host + max(local - (size - value), 0)
    else:
        chosen = sorted(value) if kind == "ranks" else list(range(world - value, world))
        if len(chosen) >= world:
            raise _bad(servers, f"there are {world} ranks: at least one must train")
        if chosen[-1] >= world:
            raise _bad(servers, f"there are {world} ranks, 0 to {world - 1}, and no rank {chosen[-1]}")
        # Where each host has as many ranks, the hosts of all ranks are known here.
        known = hosts * size == world and first == host * size
        for begin in range(0, world, size) if known else [first]:
            _check_host(servers, chosen, begin, size)
        below, here = sum(one < rank for one in chosen), sum(first <= one < first + size for one in chosen)
        total, serves = len(chosen), rank in chosen
    trainers = world - total
    if serves:
        return Split(trainers, total, trainers + below, rendezvous, attempt), {}
    changed = {"RANK": rank - below, "WORLD_SIZE": trainers}
    # LOCAL_RANK stays: it says which GPU, and servers are the last ranks of their host.
    changed |= {name: size - here for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if name in environment}
    changed |= {name: changed[name[5:]] for name in ("ROLE_RANK", "ROLE_WORLD_SIZE") if name in environment}
    role = Split(trainers, total, rank - below, rendezvous, attempt)
    return role, {name: str(number) for name, number in changed.items()}


def _read_place(environment: Mapping[str, str]) -> tuple[int, int, int, int, int, int]:
    """Where the launcher put this process: rank of ranks, rank of those of its host, host of hosts. Raises
    CADConfigError where none says."""
    if missing := [name for name in ("RANK", "WORLD_SIZE") if not environment.get(name)]:
        raise CADConfigError(
            f'"cad": key "servers" reserves ranks, but {" and ".join(missing)} are not set: no launcher started this '
            f"process. Start it with {LAUNCH}, or by accelerate-cad launch, or deepspeed --module deepspeed_cad.run"
        )

    def read(*names: str, default: int) -> int:
        return next((int(environment[name]) for name in names if environment.get(name)), default)

    rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    local = read("LOCAL_RANK", default=rank)
    local_world = read("LOCAL_WORLD_SIZE", "LOCAL_SIZE", default=world)
    host = read("GROUP_RANK", "CROSS_RANK", default=(rank - local) // local_world)
    hosts = read("GROUP_WORLD_SIZE", "CROSS_SIZE", default=-(-world // local_world))
    return rank, world, local, local_world, host, hosts


def _check_host(servers: Reservation, chosen: list[int], first: int, size: int) -> None:
    here = [one for one in chosen if first <= one < first + size]
    if len(here) == size:
        raise _no_trainer(servers, size)
    if here and here[0] != first + size - len(here):
        raise _bad(
            servers,
            f"rank {here[0]} would serve and rank {next(r for r in range(here[0], first + size) if r not in chosen)} "
            "of the same host train: reserve the last ranks of a host, because frameworks take the first one for its "
            "main process",
        )


def _no_trainer(servers: Reservation, size: int) -> CADConfigError:
    return _bad(
        servers,
        f"no trainer would be left on a host of {size} ranks. For hosts that only serve, start "
        "`deepspeed-cad serve --rendezvous HOST:PORT` there, and say how many servers join: "
        '{"joined": n}',
    )


def _bad(servers: Reservation, reason: str) -> CADConfigError:
    return CADConfigError(f'"cad": key "servers" is {servers}: {reason}')


def take_role(request: Request) -> tuple[Request, Split | None]:
    """The role of a server; a trainer's request says who it is, and its role is None.

    Raises CADConfigError where the reservation does not fit the launch, or the script's world is already made."""
    if isinstance(request.config.servers, str) or not request.config.enabled:
        return request, None
    module = sys.modules.get("torch.distributed")
    if module is not None and module.is_available() and module.is_initialized():
        raise CADConfigError(
            "torch.distributed is initialised already, with ranks that are reserved for serving among its own: start "
            "the script by -m deepspeed_cad.run before anything initialises it"
        )
    role, changed = split(request.config.servers, os.environ)
    if role.is_server:
        return request, role
    os.environ.update(changed)
    return replace(request, split={**asdict(role), PROCESS: os.getpid()}), None


def find_role(servers: str | Reservation, world: int, rank: int) -> Split | None:
    """The numbers of this trainer, where ranks are reserved; `world`, `rank`: of torch.distributed.

    Raises CADConfigError where no launcher of ours reserved them, or the script made its world by other numbers."""
    if isinstance(servers, str):
        return None
    if (told := published()) is not None:
        role = told
    elif "joined" in servers:
        # All ranks of this launch train: nothing had to be done before the script.
        role, _ = split(servers, {"RANK": str(rank), "WORLD_SIZE": str(world)} | dict(os.environ))
    else:
        processes = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", "N"))
        command = f"-m deepspeed_cad.run --cad {shlex.quote(json.dumps({'servers': servers}))} {shlex.join(sys.argv)}"
        raise CADConfigError(
            f'"cad": key "servers" is {json.dumps(servers)}: reserved ranks hold no model and must not run the script, '
            f"so CAD's launcher has to start it: torchrun --nproc_per_node {processes} {command} (or accelerate-cad "
            "launch, or deepspeed --module deepspeed_cad.run). The block may come from your JSON: --cad_config FILE"
        )
    if (role.trainers, role.rank) != (world, rank):
        raise CADConfigError(
            f"torch.distributed counts {world} ranks here and this is rank {rank}, but {role.trainers} trainers were "
            f"launched beside {role.servers} servers and this is trainer {role.rank}: the script initialised "
            "torch.distributed before the launcher could act, or by numbers of its own. Take RANK and WORLD_SIZE from "
            'the environment (init_method="env://")'
        )
    return role


def published() -> Split | None:
    """What `take_role` found for this process; processes that it started or forked are no trainers."""
    try:
        request = read_environment()
    except CADError:
        return None
    fields = {} if request is None or request.split is None else dict(request.split)
    return Split(**fields) if fields.pop(PROCESS, None) == os.getpid() else None
