"""FSDP2 (`fully_shard`) and FSDP1 in plain torch loops: `deepspeed_cad.apply` before sharding, gloo on CPU."""

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.fsdp._fully_shard._fsdp_param_group as home
import trainers
import training
from pool import WorkerPool
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard

import deepspeed_cad

WORLD = 2
MICRO = 2
"""Micro-batches of a step, whose gradients are accumulated."""


def _layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    return list(model.get_decoder().layers)


def _fsdp2(model: torch.nn.Module) -> torch.nn.Module:
    for module in (*_layers(model), model):
        fully_shard(module)
    return model


def _checkpointing(model: torch.nn.Module) -> torch.nn.Module:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return _fsdp2(model)


def _checkpoint_wrappers(model: torch.nn.Module) -> torch.nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    apply_activation_checkpointing(model, check_fn=lambda module: type(module) in {type(_layers(model)[0])})
    return _fsdp2(model)


def _lora(model: torch.nn.Module) -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model

    return _fsdp2(get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)))


def _compiled(model: torch.nn.Module) -> torch.nn.Module:
    torch._dynamo.reset()
    for layer in _layers(model):
        layer.compile(backend="eager")  # the accelerate tests compile the whole, with AOTAutograd
    return _fsdp2(model)


def _fsdp1(model: torch.nn.Module) -> torch.nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={type(_layers(model)[0])})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"))


def _frozen_embedding(model: torch.nn.Module) -> torch.nn.Module:
    model.get_input_embeddings().requires_grad_(False)
    return torch.nn.parallel.DistributedDataParallel(model)


WAYS: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "FSDP2": _fsdp2, "FSDP2, checkpointing": _checkpointing, "FSDP2, checkpoint wrappers": _checkpoint_wrappers,
    "FSDP2, compiled layers": _compiled, "FSDP2, LoRA": _lora, "FSDP2, root": fully_shard, "FSDP1": _fsdp1,
    "DDP, frozen embedding": _frozen_embedding,
}  # fmt: skip
LATE = ["FSDP2, checkpoint wrappers", "FSDP1"]
"""Ways that are tried with CAD turned on after the sharding, too, as -m deepspeed_cad.run does in plain torch."""
INTERLEAVED = ["FSDP2, checkpointing", "FSDP2, root"]
"""Ways that are tried with nano-batches, too: where layers are wrapped they alternate inside them, and a wrapper around
the whole model is none."""


def _train(
    cad: bool, rank: int, world: int, way: str, late: bool = False, block: dict[str, Any] = trainers.BLOCK
) -> tuple[list[dict[str, Any]], int, int]:
    """An entry of every micro-batch, how often parameters were gathered, and how many operations were compiled."""
    counters.clear()
    model = training.sdpa_llama()
    if cad and not late:
        deepspeed_cad.apply(model, block)
    model = WAYS[way](model)
    if cad and late:
        deepspeed_cad.apply(model, block)
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    rows = trainers.PackedRows(64)
    found = []
    with mock.patch.object(home, "foreach_all_gather", wraps=home.foreach_all_gather) as gather:
        for step in range(trainers.STEPS):
            for micro in range(MICRO):
                loss = model(**trainers.collate([rows[(MICRO * step + micro) * world + rank]])).loss
                (loss / MICRO).backward()
                found.append(trainers.step_entry(loss))
            optimizer.step()
            optimizer.zero_grad()
    for binding in deepspeed_cad.current_session().bindings.values() if cad and block != trainers.BLOCK else ():
        assert ("FSDP wraps its layers" in binding.in_turn) == (way != "FSDP2, root"), binding.in_turn
    return found, gather.call_count, counters["stats"]["calls_captured"]


def _compare(rank: int, world: int, half: int) -> dict[str, Any]:
    late, interleaved = ([], INTERLEAVED) if half else (LATE, [])
    found = {way: trainers.without_and_with(_train, rank, world, way) for way in list(WAYS)[half::2]}
    for way in late:
        found[f"late {way}"] = found[way][0], _train(True, rank, world, way, late=True)
        trainers.start_anew()
    for way in interleaved:
        block = {**trainers.BLOCK, "overlap": "interleave"}
        found[f"interleaved {way}"] = trainers.without_and_with(_train, rank, world, way, block=block)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.long)])
def test_same_losses_gathers_and_balance(workers: WorkerPool, half: int) -> None:
    for found in workers.run(_compare, WORLD, half, timeout=200.0):
        for way, (plain, cad) in found.items():
            trainers.assert_same_and_balanced(way, plain[0], cad[0], losses=trainers.STEPS * MICRO)
            assert [entry[trainers.BEFORE] for entry in cad[0]] == pytest.approx(
                trainers.unbalanced(trainers.STEPS * MICRO, WORLD)
            ), way
            assert cad[1] == plain[1], (way, "parameters are gathered as often as without CAD")
            assert (plain[1] > 0) == ("FSDP2" in way)
            assert (cad[2] > 0) == (plain[2] > 0) == ("compiled" in way)
