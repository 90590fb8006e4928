"""Trainers and reserved servers in the workers of the pool: each takes its role as a launcher would have it do."""

import os
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist
import training
from pool import WorkerPool
from ports import free_port

from deepspeed_cad.config import CADConfig
from deepspeed_cad.request import Request
from deepspeed_cad.server import process
from deepspeed_cad.server.launch import take_role
from deepspeed_cad.server.loop import Loop
from deepspeed_cad.session import close_session


class Served(NamedTuple):
    """What a server did."""

    code: int
    micro_batches: int
    held: int
    """Bytes that it still holds for backwards."""
    most_held: int
    opened: int
    """Micro-batches that it remembers."""


def run(workers: WorkerPool, trainers: int, servers: int, train: Callable[..., Any], *args: Any, **block: Any) -> Any:
    """What trainers give, and what servers did, all of which end well; `block` beside the usual."""
    given = {**training.BLOCK, "servers": {"reserved": servers}, **block}
    results = workers.run(play, trainers + servers, free_port(), given, train, *args, joined=False)
    for one in results[trainers:]:
        assert one.code == 0 and one.held < one.most_held and one.micro_batches > 0 and one.opened <= 2, one
    return results[:trainers], results[trainers:]


def play(rank: int, world: int, port: int, block: dict[str, Any], train: Callable[..., Any], *args: Any) -> Any:
    """A trainer gives train(rank, trainers, block, *args), a server what `Served` has. All ranks are on one host."""
    world_of = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    surrounding = {name: str(value) for name, value in world_of.items()} | {"MASTER_ADDR": "127.0.0.1"}
    loops: list[Loop] = []

    def made(*given: Any) -> Loop:
        loops.append(Loop(*given))
        return loops[0]

    with mock.patch.dict(os.environ, surrounding), mock.patch.object(process, "Loop", made):
        request, server = take_role(Request(CADConfig.from_dict(block), "a test"))
        if server is not None:
            code = process.serve(server, request.config)
            return Served(code, loops[0].micro_batches, loops[0].held, loops[0].most_held, len(loops[0]._opened))
        request.publish()
        dist.init_process_group("gloo")
        result = train(dist.get_rank(), dist.get_world_size(), block, *args)
        close_session()
        # The store is trainer 0's: it stays until all have left.
        dist.barrier()
        return result
