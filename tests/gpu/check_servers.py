"""A tiny model beside one reserved server, the last rank, against every document alone in fp64; see check_models.py.

All other ranks train. Linear layers of one part run while the other is attended, with and without checkpointing, at
once and in more waves than have memory at once.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from check_models import Sizes, check, make_block, make_lengths, make_model
from lines import Found, Lines, Place

from deepspeed_cad.config import CADConfig
from deepspeed_cad.request import VARIABLE, Request
from deepspeed_cad.server.launch import take_role
from deepspeed_cad.session import close_session

OWN_WORLD = True
"""The server is in no world of torch.distributed."""
RESERVED = {"reserved": 1}


def run(place: Place, lines: Lines, case: str) -> None:
    """Transports; every case meets anew, as another attempt of the same launch."""
    known: list[Any] = []
    transports = ["nvlink", "nccl"] if place.on_gpu else ["c10d"]
    ways: list[tuple[bool, int | str]] = [(True, "auto"), (False, "auto"), (True, 5), (False, 5)]
    cases = [(transport, *way) for transport in transports for way in ways]
    for attempt, (transport, checkpointing, waves) in enumerate(cases):
        label = f"{place.ranks - 1} + 1, llama{', checkpointing' * checkpointing}"
        label += "" if waves == "auto" else f", {waves} waves"
        more = {"servers": RESERVED, "waves": waves}
        surrounding = {**os.environ, "TORCHELASTIC_RESTART_COUNT": str(attempt)}
        os.environ.update(surrounding)
        try:
            part = partial(_take_part, place, transport, checkpointing, known, more)
            lines.check(f"reserved by {transport}", label, part)
        finally:
            close_session()
            if dist.is_initialized():
                dist.destroy_process_group()
            os.environ.pop(VARIABLE, None)
            os.environ.update(surrounding)


def _take_part(place: Place, transport: str, checkpointing: bool, known: list[Any], more: dict[str, Any]) -> Found:
    """As trainer or server, whichever the launcher of CAD makes of this rank."""
    config = CADConfig.from_dict({**make_block(place, transport), **more})
    request, code = take_role(Request(config, "gpu_check"))
    if code is not None:
        return code == 0, f"the server ended with {code}"
    request.publish()
    dist.init_process_group("cpu:gloo,cuda:nccl" if place.on_gpu else "gloo")
    trainers = replace(place, rank=dist.get_rank(), ranks=dist.get_world_size())
    sizes = Sizes(512, 4096) if place.on_gpu else Sizes(64, 192)
    model = make_model(trainers, "llama", sizes)
    lengths = make_lengths("rows", trainers.ranks, sizes.tokens)
    found = check(trainers, model, lengths, transport, checkpointing, known, **more)
    dist.barrier()
    return found
