"""Trainers and reserved servers in the workers of the pool: each takes its role as a launcher would have it do."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from deepspeed_cad.config import CADConfig
from deepspeed_cad.request import VARIABLE, Request
from deepspeed_cad.server.launch import take_role
from deepspeed_cad.session import close_session


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def play(rank: int, world: int, port: int, block: dict[str, Any], train: Callable[..., Any], *args: Any) -> Any:
    """A trainer gives train(rank, trainers, block, *args), a server its exit code. All ranks are on one host."""
    dist.destroy_process_group()
    surrounding = dict(os.environ)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world),
    )  # fmt: skip
    try:
        request, code = take_role(Request(CADConfig.from_dict(block), "a test"))
        if code is not None:
            return code
        request.publish()
        dist.init_process_group("gloo")
        result = train(dist.get_rank(), dist.get_world_size(), block, *args)
        close_session()
        # The store is trainer 0's: it stays until all have left.
        dist.barrier()
        return result
    finally:
        os.environ.pop(VARIABLE, None)
        os.environ.update(surrounding)
