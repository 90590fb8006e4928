"""FSDP1, FSDP2, DDP and DeepSpeed's engines around a model: losses of some steps without CAD and with it."""

from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import training
import wrapped
from engines import engine_config, import_deepspeed, train_engine
from lines import Found, Lines, Place, Refused

import deepspeed_cad
from deepspeed_cad.session import close_session

STEPS = 8
MODES: list[dict[str, Any]] = [{}, {"overlap": "interleave"}, {"keep": "host"}, {"waves": 2, "keep": "host"}]
"""Each way gets the next of these."""


def run(place: Place, lines: Lines, case: str) -> None:
    ways = [(name, partial(train_wrapped, name)) for name in wrapped.WAYS | (wrapped.ON_GPUS if place.on_gpu else {})]
    ways += [(f"{name}, late", partial(train_wrapped, name, late=True)) for name in wrapped.LATE]
    zero = (1, None), (2, "reentrant"), (3, None), (3, "non-reentrant")
    ways += [(f"ZeRO-{stage}, checkpointing: {how}", partial(train_zero, stage, how)) for stage, how in zero]
    for i, (name, train) in enumerate(ways):
        more = MODES[i % len(MODES)]
        label = ", ".join([name, *(f"{key} {value}" for key, value in more.items())])
        lines.check("wrapper", label, lambda train=train, more=more: check(place, train, more))


def check(place: Place, train: Any, more: dict[str, Any]) -> Found:
    """The kernel is exact, so that another order of sums is all that may differ."""
    tokens = 4800 if place.on_gpu else 200
    lengths = [[tokens] if (i + place.rank) % place.ranks == 0 else [tokens // 20] * 20 for i in range(STEPS)]
    rows = [training.documents(one, seed=i * place.ranks + place.rank) for i, one in enumerate(lengths)]
    block = training.BLOCK | {"kernel": "torch_math", "timeout_s": 30}
    (plain, drawn), (cad, drawn_with_cad) = (
        (train(place, rows, one), float(torch.rand(1, device=place.device))) for one in (None, block | more)
    )
    statistics = deepspeed_cad.current_session().statistics
    close_session()
    farthest = max(abs(one / other - 1) for one, other in zip(cad, plain, strict=True))
    on = statistics.micro_batches == len(cad) == STEPS and statistics.bytes_sent > 0 and drawn == drawn_with_cad
    detail = f"{len(cad)} losses from {plain[0]:.4f} to {plain[-1]:.4f}, off by {farthest:.0e}"
    return on and farthest < 1e-5, f"{detail}, {statistics.bytes_sent >> 10} KiB sent"


def train_wrapped(way: str, place: Place, rows: list[Any], block: dict[str, Any] | None, late: bool = False) -> list:
    if "LoRA" in way and find_spec("peft") is None:
        raise Refused("peft is not installed")
    return wrapped.train(way, map(training.pack, rows), float, block, place.device, late)


def train_zero(stage: int, checkpoint: str | None, place: Place, rows: list[Any], block: dict[str, Any] | None) -> list:
    if find_spec("deepspeed") is None:
        raise Refused("DeepSpeed is not installed")
    import_deepspeed()
    config = engine_config(stage) if block is None else engine_config(stage, cad=block)
    return train_engine(config, checkpoint, rows, float, attn_implementation="sdpa", use_cache=False)
