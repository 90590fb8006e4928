"""Pipelines on GPUs: losses and gradients of lockstep rounds against DeepSpeed's own schedule, over real exchanges."""

from functools import partial
from typing import Any

import pipelines
import torch
import training
from engines import import_deepspeed
from lines import Found, Lines, Place

import deepspeed_cad
from deepspeed_cad.session import close_session

COUNT = 3
"""Micro-batches of a step."""
BOUND = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
LEARNING_RATE = 64.0
"""So high that what a step changes is read from weights without their rounding."""
"""Largest difference of losses, which are about 4; in fp32 also of gradients, relative to the largest."""


def run(place: Place, lines: Lines, case: str) -> None:
    """Two stages, and as many as there are GPUs; exact arithmetic, and the kernel that training takes."""
    import_deepspeed().init_distributed("nccl" if place.on_gpu else "gloo")
    torch.backends.cuda.matmul.allow_tf32 = False
    for stages in dict.fromkeys((2, place.ranks)):
        if place.ranks % stages:
            continue
        for dtype, kernel in ((torch.float32, "torch_math"), (torch.bfloat16, place.kernel)):
            name = f"{stages} stages, {place.ranks // stages} replicas, {str(dtype).split('.')[1]}"
            if place.on_gpu or dtype == torch.float32:
                lines.check("pipelines", name, partial(compare, place, stages, dtype, kernel))
                # More than have memory at once.
                lines.check("pipelines", f"{name}, 5 waves", partial(compare, place, stages, dtype, kernel, waves=5))


def compare(place: Place, stages: int, dtype: torch.dtype, kernel: str, **more: Any) -> Found:
    loss, own = step(stages, dtype, {"cost": "pairs", "granularity": 16, "kernel": kernel, **more})
    session = deepspeed_cad.current_session()
    moved = sum(place.gather(session.transport.bytes_sent if session.transport else 0))
    close_session()
    expected, theirs = step(stages, dtype, None)
    largest = max(float(value.abs().max()) for value in theirs.values())
    apart = max(float((own[name] - theirs[name]).abs().max()) for name in theirs) / largest
    # Weights in bf16 are too coarse to read gradients from what a step changed.
    worst = abs(loss - expected) if dtype == torch.bfloat16 else max(abs(loss - expected), apart)
    right = worst < BOUND[dtype] and moved > 0
    return right, f"losses {loss:.5f} and {expected:.5f}, gradients {apart:.1e} apart; {moved >> 10} KiB moved"


def step(stages: int, dtype: torch.dtype, block: dict[str, Any] | None) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of a step, and what it changed in this stage's weights."""
    import deepspeed

    module = pipelines.by_hand(training.tiny_llama(dtype, num_hidden_layers=4, hidden_size=512), stages, interval=1)
    module.dynamic_shape = True
    more = ({"bf16": {"enabled": True}} if dtype == torch.bfloat16 else {}) | ({} if block is None else {"cad": block})
    config = pipelines.config(COUNT, steps_per_print=1 << 30, pipeline={"use_reentrant": False}, **more)
    before = {name: p.detach().float().clone() for name, p in module.named_parameters()}
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    loss = float(engine.train_batch(iter(pipelines.pairs(engine.grid.get_data_parallel_id(), COUNT))))
    return loss, {name: before[name].to(p.device) - p.detach().float() for name, p in module.named_parameters()}
