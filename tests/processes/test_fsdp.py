"""FSDP2 (`fully_shard`) and FSDP1 in plain torch loops: `deepspeed_cad.apply` before sharding, gloo on CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import training
from pool import WorkerPool
from torch.distributed.device_mesh import init_device_mesh
from trainers import (
    BEFORE,
    BLOCK,
    STEPS,
    PackedRows,
    assert_same,
    assert_same_and_balanced,
    collate,
    step_entry,
    unbalanced,
    without_and_with,
)

WORLD = 2
MICRO = 2
"""Micro-batches of a step, whose gradients are accumulated."""


def _layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    return list(model.get_decoder().layers)


def _fsdp2(model: torch.nn.Module, world: int, **options: Any) -> torch.nn.Module:
    from torch.distributed.fsdp import fully_shard

    for module in (*_layers(model), model):
        fully_shard(module, mesh=init_device_mesh("cpu", (world,)), **options)
    return model


def _root(model: torch.nn.Module, world: int) -> torch.nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (world,)))


def _checkpointing(model: torch.nn.Module, world: int) -> torch.nn.Module:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return _fsdp2(model, world)


def _checkpoint_wrappers(model: torch.nn.Module, world: int) -> torch.nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    names = {type(_layers(model)[0])}
    apply_activation_checkpointing(model, check_fn=lambda module: type(module) in names)
    return _fsdp2(model, world)


def _lora(model: torch.nn.Module, world: int) -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return _fsdp2(get_peft_model(model, lora), world)


def _compiled(model: torch.nn.Module, world: int) -> torch.nn.Module:
    torch._dynamo.reset()
    for layer in _layers(model):
        layer.compile(backend="eager")  # the accelerate tests compile the whole, with AOTAutograd
    return _fsdp2(model, world)


def _fsdp1(model: torch.nn.Module, world: int) -> torch.nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={type(_layers(model)[0])})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"))


def _frozen_embedding(model: torch.nn.Module, world: int) -> torch.nn.Module:
    model.get_input_embeddings().requires_grad_(False)
    return torch.nn.parallel.DistributedDataParallel(model)


WAYS: dict[str, Callable[[torch.nn.Module, int], torch.nn.Module]] = {
    "FSDP2": _fsdp2, "FSDP2, root": _root, "FSDP2, checkpointing": _checkpointing,
    "FSDP2, parameters kept": functools.partial(_fsdp2, reshard_after_forward=False),
    "FSDP2, checkpoint wrappers": _checkpoint_wrappers, "FSDP2, LoRA": _lora, "FSDP2, compiled layers": _compiled,
    "FSDP1": _fsdp1, "DDP, frozen embedding": _frozen_embedding,
}  # fmt: skip

SELDOM = ["FSDP2, root", "FSDP2, checkpointing", "FSDP2, parameters kept"]


def _train(
    cad: bool, rank: int, world: int, way: str, late: bool = False, block: dict[str, Any] = BLOCK
) -> tuple[list[dict[str, Any]], int, int]:
    """An entry of every micro-batch, how often parameters were gathered, and how many operations were compiled."""
    import torch.distributed.fsdp._fully_shard._fsdp_param_group as home
    from torch._dynamo.utils import counters

    import deepspeed_cad

    counters.clear()
    model = training.sdpa_llama()
    if cad and not late:
        deepspeed_cad.apply(model, block)
    model = WAYS[way](model, world)
    if cad and late:
        deepspeed_cad.apply(model, block)
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    rows = PackedRows(64)
    found, calls = [], [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return gather(*args, **kwargs)

    gather = home.foreach_all_gather
    with mock.patch.object(home, "foreach_all_gather", counted):
        for step in range(STEPS):
            for micro in range(MICRO):
                loss = model(**collate([rows[(MICRO * step + micro) * world + rank]])).loss
                (loss / MICRO).backward()
                found.append(step_entry(loss))
            optimizer.step()
            optimizer.zero_grad()
    return found, calls[0], counters["stats"]["calls_captured"]


def _compare(rank: int, world: int, ways: list[str], late: bool) -> dict[str, Any]:
    return {way: without_and_with(_train, rank, world, way, late) for way in ways}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ways", "late"),
    [
        ([way for way in WAYS if way not in SELDOM], False), (["FSDP2, checkpoint wrappers"], True),
        pytest.param(SELDOM, False, marks=pytest.mark.long),
        pytest.param(["FSDP2", "FSDP1"], True, marks=pytest.mark.long),
    ],
    ids=["often", "late", "seldom", "seldom late"],
)  # fmt: skip
def test_same_losses_gathers_and_balance(workers: WorkerPool, ways: list[str], late: bool) -> None:
    """`late`: apply after the sharding, as -m deepspeed_cad.run does in a loop of plain torch."""
    for found in workers.run(_compare, WORLD, ways, late, timeout=140.0):
        for way, (plain, cad) in found.items():
            assert_same_and_balanced(way, plain[0], cad[0], losses=STEPS * MICRO)
            assert [entry[BEFORE] for entry in cad[0]] == pytest.approx(unbalanced(STEPS * MICRO, WORLD)), way
            assert cad[1] == plain[1], (way, "parameters are gathered as often as without CAD")
            assert (plain[1] > 0) == ("FSDP2" in way)
            assert (cad[2] > 0) == (plain[2] > 0) == ("compiled" in way)


def _interleaved(rank: int, world: int, way: str) -> str:
    import deepspeed_cad

    reasons = []

    def run(cad: bool) -> Any:
        found = _train(cad, rank, world, way, block={**BLOCK, "overlap": "interleave"})
        if cad:
            session = deepspeed_cad.current_session()
            reasons.extend(binding.in_turn for binding in session.bindings.values())
        return found

    plain, cad = without_and_with(run)
    assert_same([entry["loss"] for entry in cad[0]], [entry["loss"] for entry in plain[0]])
    assert cad[1] == plain[1], "parameters are gathered as often as without CAD"
    return str(reasons[0])


@pytest.mark.slow
@pytest.mark.parametrize("way", ["FSDP2, checkpointing", pytest.param("FSDP1", marks=pytest.mark.long), "FSDP2, root"])
def test_interleaved(workers: WorkerPool, way: str) -> None:
    """Where layers are wrapped nano-batches do not alternate; a wrapper around the whole model is none."""
    for reason in workers.run(_interleaved, 2, way, timeout=100.0):
        assert ("FSDP wraps its layers" in reason) == (way != "FSDP2, root"), reason
