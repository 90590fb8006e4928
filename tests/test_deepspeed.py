"""The JSON alone turns CAD on: DeepSpeed engines with and without the block give the same losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import training
from pool import WorkerPool

LENGTHS = [[220], [40, 30, 9, 1, 50], [100, 100], [64, 3, 90]]


def _config(stage: int, **changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "wall_clock_breakdown": False,
    }
    return config | changes


def _losses(rank: int, world: int, config: dict[str, Any], checkpoint: str | None, steps: int) -> list[float]:
    import deepspeed

    model = training.tiny_llama(torch.float32)
    if checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": checkpoint == "reentrant"})
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.train()
    losses = []
    for step in range(steps):
        own = training.documents(LENGTHS[(rank + step) % len(LENGTHS)], seed=100 * step + rank)
        batch = training.pack(own)
        logits = engine(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    engine.destroy()
    return losses


def _compare(rank: int, world: int, cases: list[tuple[str, dict[str, Any], str | None]]) -> dict[str, Any]:
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    import deepspeed_cad
    from deepspeed_cad.session import close_session

    assert get_accelerator().device_name() == "cpu"
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed_cad.install()
    found = {}
    for name, config, checkpoint in cases:
        plain = _losses(rank, world, config, checkpoint, 4)
        assert deepspeed_cad.current_session() is None
        block = {"granularity": 16, "tolerance": 0.02}
        cad = _losses(rank, world, {**config, "cad": block}, checkpoint, 4)
        session = deepspeed_cad.current_session()
        assert session is not None
        figures = session.statistics
        found[name] = {
            "difference": max(abs(a - b) for a, b in zip(plain, cad, strict=True)),
            "moved": plain[0] - plain[-1],
            "before": figures.imbalance_before,
            "after": figures.imbalance,
            "counts": (session.counts.forwards, session.counts.backwards, session.counts.replays),
        }
        close_session()
    return found


CASES: list[tuple[str, dict[str, Any], str | None]] = [
    ("ZeRO-0", _config(0), None),
    ("ZeRO-1, accumulation", _config(1, gradient_accumulation_steps=2), None),
    ("ZeRO-2, reentrant", _config(2), "reentrant"),
    ("ZeRO-3", _config(3), None),
    ("ZeRO-3, non-reentrant", _config(3), "non-reentrant"),
    ("ZeRO-3, reentrant, offload", _config(3, zero_optimization={
        "stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"},
        "stage3_param_persistence_threshold": 0,
    }, zero_force_ds_cpu_optimizer=False), "reentrant"),
]  # fmt: skip


@pytest.mark.slow
def test_zero_stages(fresh_workers: WorkerPool) -> None:
    """Every stage, both checkpoint modes and offload: the same losses, and attention is balanced."""
    for found in fresh_workers.run(_compare, 2, CASES, timeout=240.0):
        for name, case in found.items():
            assert case["difference"] < 1e-5, (name, case)
            assert abs(case["moved"]) > 1e-3, (name, case)
            assert case["before"] > 1.2 and case["after"] < 1.05, (name, case)
            assert case["counts"][0] == case["counts"][1], (name, case)
            assert case["counts"][2] == (case["counts"][0] if "reentrant" in name else 0), (name, case)
