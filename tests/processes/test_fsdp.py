"""FSDP2 (`fully_shard`) and FSDP1 in plain torch loops: `deepspeed_cad.apply` before sharding, gloo on CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

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
)

WORLD = 4
MICRO = 2
"""Micro-batches of a step, whose gradients are accumulated."""


def _shard(model: torch.nn.Module, world: int, **options: Any) -> torch.nn.Module:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world,))
    for layer in _layers(model):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def _layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    return list(model.get_decoder().layers)


def _fsdp2(model: torch.nn.Module, world: int) -> torch.nn.Module:
    return _shard(model, world)


def _fsdp2_root(model: torch.nn.Module, world: int) -> torch.nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (world,)))


def _fsdp2_keeps_parameters(model: torch.nn.Module, world: int) -> torch.nn.Module:
    return _shard(model, world, reshard_after_forward=False)


def _fsdp2_checkpointing(model: torch.nn.Module, world: int) -> torch.nn.Module:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return _shard(model, world)


def _fsdp2_wrapped_checkpointing(model: torch.nn.Module, world: int) -> torch.nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    names = {type(_layers(model)[0])}
    apply_activation_checkpointing(model, check_fn=lambda module: type(module) in names)
    return _shard(model, world)


def _fsdp2_lora(model: torch.nn.Module, world: int) -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return _shard(get_peft_model(model, lora), world)


def _fsdp2_compiled(model: torch.nn.Module, world: int) -> torch.nn.Module:
    torch._dynamo.reset()
    for layer in _layers(model):
        layer.compile(backend="eager")  # the accelerate tests compile the whole, with AOTAutograd
    return _shard(model, world)


def _fsdp1(model: torch.nn.Module, world: int) -> torch.nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={type(_layers(model)[0])})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"))


def _ddp_frozen_embedding(model: torch.nn.Module, world: int) -> torch.nn.Module:
    model.get_input_embeddings().requires_grad_(False)
    return torch.nn.parallel.DistributedDataParallel(model)


WAYS: dict[str, Callable[[torch.nn.Module, int], torch.nn.Module]] = {
    "FSDP2": _fsdp2,
    "FSDP2, root": _fsdp2_root,
    "FSDP2, parameters kept": _fsdp2_keeps_parameters,
    "FSDP2, checkpointing": _fsdp2_checkpointing,
    "FSDP2, checkpoint wrappers": _fsdp2_wrapped_checkpointing,
    "FSDP2, LoRA": _fsdp2_lora,
    "FSDP2, compiled layers": _fsdp2_compiled,
    "FSDP1": _fsdp1,
    "DDP, frozen embedding": _ddp_frozen_embedding,
}

LATE = ["FSDP2", "FSDP1", "FSDP2, checkpoint wrappers"]


def _train(
    rank: int, world: int, way: str, cad: bool, late: bool = False, block: dict[str, Any] = BLOCK
) -> tuple[list[dict[str, Any]], int, int]:
    """An entry of every micro-batch, how often parameters were gathered, and how many operations were compiled."""
    from torch._dynamo.utils import counters

    import deepspeed_cad

    counters.clear()

    model = training.tiny_llama(torch.float32, attn_implementation="sdpa", use_cache=False)
    if cad and not late:
        deepspeed_cad.apply(model, block)
    model = WAYS[way](model, world)
    if cad and late:
        deepspeed_cad.apply(model, block)
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    rows = PackedRows(64)
    found = []
    with _Count() as gathers:
        for step in range(STEPS):
            for micro in range(MICRO):
                loss = model(**collate([rows[(MICRO * step + micro) * world + rank]])).loss
                (loss / MICRO).backward()
                found.append(step_entry(loss))
            optimizer.step()
            optimizer.zero_grad()
    return found, gathers.calls, counters["stats"]["calls_captured"]


class _Count:
    """Counts FSDP2's gathers of the parameters of one group."""

    def __enter__(self) -> _Count:
        import torch.distributed.fsdp._fully_shard._fsdp_param_group as home

        self.calls, self._home, self._original = 0, home, home.foreach_all_gather

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return self._original(*args, **kwargs)

        home.foreach_all_gather = counted
        return self

    def __exit__(self, *error: Any) -> None:
        self._home.foreach_all_gather = self._original


def _compare(rank: int, world: int, ways: list[str], late: bool) -> dict[str, Any]:
    import deepspeed_cad
    from deepspeed_cad.session import close_session

    found = {}
    for way in ways:
        plain = _train(rank, world, way, False)
        assert deepspeed_cad.current_session() is None
        cad = _train(rank, world, way, True, late)
        found[way] = (plain, cad)
        close_session()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("ways", "late"), [([*WAYS], False), (LATE, True)])
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
    from deepspeed_cad.session import close_session

    plain = _train(rank, world, way, False)
    cad = _train(rank, world, way, True, block={**BLOCK, "overlap": "interleave"})
    assert_same([entry["loss"] for entry in cad[0]], [entry["loss"] for entry in plain[0]])
    assert cad[1] == plain[1], "parameters are gathered as often as without CAD"
    reason = next(iter(deepspeed_cad.current_session().bindings.values())).interleaving.reason
    close_session()
    return str(reason)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["FSDP2, checkpointing", pytest.param("FSDP1", marks=pytest.mark.long), "FSDP2, root"])
def test_interleaved(workers: WorkerPool, way: str) -> None:
    """Where layers are wrapped nano-batches alternate inside them; a wrapper around the whole model is none."""
    for reason in workers.run(_interleaved, 2, way, timeout=100.0):
        assert ("FSDP wraps its layers" in reason) == (way != "FSDP2, root"), reason
