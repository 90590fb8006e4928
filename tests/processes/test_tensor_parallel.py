"""Tensor parallelism of host frameworks beside CAD: what they train without it, they train with it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trainers
import training
from engines import engine_config, import_deepspeed, train_engine
from model_cases import VERSION
from pool import WorkerPool
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import deepspeed_cad

WORLD, SHARES = 4, 2
OLD = pytest.mark.skipif(VERSION < (5, 24), reason="its from_pretrained does not load a model so on CPUs")
LENGTHS = [[300, 20], [40, 30, 9, 1, 50], [100, 100]]

AUTOTP: list[tuple[str, dict[str, Any], str | None, dict[str, int]]] = [
    ("ZeRO-1, accumulation", engine_config(1, gradient_accumulation_steps=2), None, {}),
    ("ZeRO-0, reentrant", engine_config(0), "reentrant", {}),
    ("ZeRO-2, non-reentrant", engine_config(2), "non-reentrant", {}),
    ("ZeRO-3", engine_config(3), None, {}),
    # DeepSpeed gives both to rank 0 of each replica, and two of three.
    ("one KV head", engine_config(1) | {"cad": {"overlap": "interleave"}}, "non-reentrant", {"num_key_value_heads": 1}),
    ("three KV heads", engine_config(1), None, {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}),
]


def _train(cad: bool, rank: int, config: dict[str, Any], checkpoint: str | None, changes: dict[str, int]) -> Any:
    """What the loop logged, and the first line of the session."""
    config = {**config, "tensor_parallel": {"autotp_size": SHARES}}
    more = config.pop("cad", {})
    count, replica = trainers.STEPS * config["gradient_accumulation_steps"], rank // SHARES
    rows = (training.documents(LENGTHS[(replica + step) % 3], seed=100 * step + replica) for step in range(count))
    block = {"cad": training.BLOCK | {"granularity": 8} | more} if cad else {}
    found = train_engine(config | block, checkpoint, rows, trainers.step_entry, **changes)
    return found, deepspeed_cad.current_session().describe() if cad else ""


def _autotp(rank: int, world: int, half: int) -> dict[str, Any]:
    import_deepspeed()
    return {name: trainers.without_and_with(_train, rank, *case) for name, *case in AUTOTP[half::2]}


@pytest.mark.slow
@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.long)])
def test_autotp(fresh_workers: WorkerPool, half: int) -> None:
    for found in fresh_workers.run(_autotp, WORLD, half, timeout=240.0):
        for name, ((plain, _), (cad, line)) in found.items():
            losses = trainers.STEPS * (2 if "accumulation" in name else 1)
            trainers.assert_same_and_balanced(name, plain, cad, losses)
            assert "2 replicas of 2 by tensor parallelism" in line


def _loaded(folder: str, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    """As transformers loads it by its own plan, sharded by FSDP2 between replicas."""
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(tp_size=SHARES, fsdp_size=WORLD // SHARES)
    return LlamaForCausalLM.from_pretrained(folder, dtype=dtype, use_cache=False, distributed_config=config)


def _sequence_parallel(folder: str) -> torch.nn.Module:
    """Norms on pieces of the tokens, attention and MLP on all of them; then `fully_shard`."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORLD // SHARES, SHARES), mesh_dim_names=("dp", "tp"))
    model = training.tiny_llama()
    parallelize_module(model, mesh["tp"], {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    })  # fmt: skip
    whole = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tp"], {
            "input_layernorm": SequenceParallel(), "post_attention_layernorm": SequenceParallel(),
            "self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Shard(1)},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            ),
            "self_attn.q_proj": ColwiseParallel(), "self_attn.k_proj": ColwiseParallel(),
            "self_attn.v_proj": ColwiseParallel(), "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
            "mlp": PrepareModuleInput(**whole), "mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
        })  # fmt: skip
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def _as_alone(rank: int, world: int, make: Callable[[str], torch.nn.Module], folder: str) -> dict[str, Any]:
    """Two steps of one model, whose mesh CAD reads from its parameters, against each document alone."""
    model = deepspeed_cad.apply(make(folder), training.BLOCK).train()
    reference, replicas = training.tiny_llama(), world // SHARES
    for step in range(2):
        rows = [training.documents(LENGTHS[(one + step) % 3], seed=10 * step + one) for one in range(replicas)]
        loss = training.forward_backward(model, training.pack(rows[rank // SHARES]))
        found = [training.alone(reference, docs) for docs in rows]
        expected = found[rank // SHARES][0]
        assert abs(loss - expected) < 1e-9 * max(1, expected)
        means = {name: sum(one[name] for _, one in found) / replicas for name in found[0][1]}
        training.assert_gradients(model, means)
        model.zero_grad()
    return training.figures() | {"line": deepspeed_cad.current_session().describe()}


@pytest.mark.parametrize("make", [pytest.param(_loaded, marks=OLD), _sequence_parallel])
def test_models_on_a_mesh(fresh_workers: WorkerPool, make: Callable[[str], torch.nn.Module], tmp_path: Path) -> None:
    training.tiny_llama().save_pretrained(tmp_path)
    results = fresh_workers.run(_as_alone, WORLD, make, str(tmp_path))
    assert results[0]["after"] < 1.05 and "2 replicas of 2 by tensor parallelism" in results[0]["line"]
    assert all(sum(one["sent"] for one in results[share::SHARES]) > 0 for share in range(SHARES))


def _trainer(cad: bool, folder: str) -> list[dict[str, Any]]:
    """The log of a Trainer, which makes Accelerate's ParallelismConfig(tp_size=...) of the model."""
    from transformers import Trainer

    model = _loaded(folder, torch.float32)
    if cad:
        deepspeed_cad.apply(model, training.BLOCK)
    given = {"max_steps": trainers.STEPS, "gradient_accumulation_steps": 2, "max_grad_norm": 0.0}
    arguments = trainers.training_arguments(folder, **given, eval_strategy="steps", eval_steps=3)
    trainer = Trainer(
        model=model, args=arguments, data_collator=trainers.collate, train_dataset=trainers.PackedRows(48),
        eval_dataset=trainers.PackedRows(4, seed=50),
    )  # fmt: skip
    trainer.train()
    return trainer.state.log_history


def _trainers(rank: int, world: int, folder: str) -> list[Any]:
    from accelerate.parallelism_config import ParallelismConfig

    ParallelismConfig._validate_accelerator = lambda self, accelerator: None  # it lets GPUs only
    return list(trainers.without_and_with(_trainer, folder))


@pytest.mark.long
@OLD
def test_the_trainer(fresh_workers: WorkerPool, tmp_path: Path) -> None:
    training.tiny_llama(torch.float32).save_pretrained(tmp_path)
    for plain, cad in fresh_workers.run(_trainers, WORLD, str(tmp_path), timeout=140.0):
        trainers.assert_same_and_balanced("tensor parallelism", plain, cad)
