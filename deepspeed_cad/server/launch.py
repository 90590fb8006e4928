"""What a launcher does before it runs the training script: decide who serves, and give trainers a smaller world.

In: a request for CAD, and the environment that torchrun, accelerate or deepspeed made. Out: the exit code of a server,
or a trainer's environment. Imports torch in a server only.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace

from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADConfigError, CADError
from deepspeed_cad.request import Request, read_environment
from deepspeed_cad.server.split import Split, split

logger = logging.getLogger("deepspeed_cad")

PROCESS = "process"
LEAVE_S = 2.0
"""For a trainer that ends without having met the servers to tell them."""


def take_role(request: Request) -> tuple[Request, int | None]:
    """A server serves here, and its exit code comes back; a trainer's request says who it is, and None.

    Raises CADConfigError where the reservation does not fit the launch, or the script's world is already made.
    """
    if isinstance(request.config.servers, str) or not request.config.enabled:
        return request, None
    _refuse_world()
    role, changed = split(request.config.servers, os.environ)
    if role.is_server:
        return request, start_server(role, request.config, os.environ)
    os.environ.update(changed)
    return replace(request, split={**asdict(role), PROCESS: os.getpid()}), None


def start_server(role: Split, config: CADConfig, environment: Mapping[str, str], device: str = "") -> int:
    """Serve on the GPU that the launcher means for this process, or on the CPU where trainers use it too."""
    import torch

    from deepspeed_cad.server.process import serve

    if device:
        chosen = torch.device(device)
    elif torch.cuda.is_available() and environment.get("DS_ACCELERATOR") != "cpu":
        chosen = torch.device("cuda", int(environment.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    else:
        chosen = torch.device("cpu")
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    return serve(role, config, chosen)


def find_role(config: CADConfig, world: int, rank: int) -> Split | None:
    """The numbers of this trainer, where ranks are reserved; `world`, `rank`: of torch.distributed.

    Raises CADConfigError where no launcher of ours reserved them, or the script made its world by other numbers.
    """
    if isinstance(config.servers, str):
        return None
    if (told := _published()) is not None:
        role = told
    elif "joined" in config.servers:
        # All ranks of this launch train: nothing had to be done before the script.
        surrounding = {"RANK": str(rank), "WORLD_SIZE": str(world)} | dict(os.environ)
        role, _ = split(config.servers, surrounding)
    else:
        raise CADConfigError(needs_launcher(config))
    if (role.trainers, role.rank) != (world, rank):
        raise CADConfigError(
            f"torch.distributed counts {world} ranks here and this is rank {rank}, but {role.trainers} trainers were "
            f"launched beside {role.servers} servers and this is trainer {role.rank}: the script initialised "
            "torch.distributed before the launcher could act, or by numbers of its own. Take RANK and WORLD_SIZE from "
            'the environment (init_method="env://")'
        )
    return role


def needs_launcher(config: CADConfig) -> str:
    """The error where the JSON alone asks for reserved ranks."""
    processes = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", "N"))
    block = json.dumps({key: value for key, value in config.to_dict().items() if key in ("servers", "trainers_serve")})
    command = f"-m deepspeed_cad.run --cad {shlex.quote(block)} {shlex.join(sys.argv)}"
    return (
        f'"cad": key "servers" is {json.dumps(config.servers)}: reserved ranks hold no model and must not run the '
        f"script, so CAD's launcher has to start it: torchrun --nproc_per_node {processes} {command} (or "
        "accelerate-cad launch, or deepspeed --module deepspeed_cad.run). The block "
        "may come from your JSON: --cad_config FILE"
    )


def farewell(reason: str) -> None:
    """This process ends: tell whoever waits for it, if they were not told; `reason` is empty where it ends well."""
    module = sys.modules.get("deepspeed_cad.session")
    session = module.current_session() if module is not None else None
    if session is not None:
        session.leave(reason)
        return
    role = _published()
    if role is None:
        return
    from deepspeed_cad.server.rendezvous import Rendezvous

    try:
        Rendezvous(role, LEAVE_S).leave(reason)
    except (CADError, RuntimeError, OSError) as error:
        logger.debug("no server was told: %s", error)


def _published() -> Split | None:
    """What `take_role` found for this process; processes that it started or forked are no trainers."""
    try:
        request = read_environment()
    except CADError:
        return None
    fields = {} if request is None or request.split is None else dict(request.split)
    return Split(**fields) if fields.pop(PROCESS, None) == os.getpid() else None


def _refuse_world() -> None:
    module = sys.modules.get("torch.distributed")
    if module is not None and module.is_available() and module.is_initialized():
        raise CADConfigError(
            "torch.distributed is initialised already, with ranks that are reserved for serving among its own: start "
            "the script by -m deepspeed_cad.run before anything initialises it"
        )
