"""Pipelines: losses and gradients of lockstep rounds are those of DeepSpeed's own schedule and of a single process."""

from __future__ import annotations

from typing import Any

import pipelines
import pytest
import torch
import training
from pool import WorkerPool

BLOCK = {"cost": "pairs", "granularity": 2}
LAYERS = 4


def _gradients(
    stages: int, count: int, block: dict[str, Any] | None, parts: list[int] | None = None, interval: int = 0,
    **changes: Any,
) -> tuple[list[float], dict[str, torch.Tensor]]:  # fmt: skip
    """Losses of two steps, and the summed gradients of both, by name and layer, on this stage."""
    import deepspeed
    from deepspeed.runtime.pipe.schedule import OptimizerStep

    model = training.tiny_llama(torch.float64, num_hidden_layers=LAYERS)
    module = pipelines.by_hand(model, stages, parts, interval)
    module.dynamic_shape = True
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": count,
        "zero_allow_untested_optimizer": True, **changes,
    }  # fmt: skip
    if block is not None:
        config["cad"] = block
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    engine.pipeline_enable_backward_allreduce = False  # it refuses fp64
    group, replicas = engine.grid.get_data_parallel_group(), engine.grid.get_data_parallel_world_size()
    total = {name: torch.zeros_like(p) for name, p in module.named_parameters()}

    def add(engine: Any) -> None:
        for name, p in module.named_parameters():
            torch.distributed.all_reduce(p.grad, group=group)
            total[name] += p.grad / replicas
            p.grad = None

    engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, OptimizerStep: add}
    losses = []
    for step in range(2):
        engine.train_batch(iter(pipelines.pairs(engine.grid.get_data_parallel_id(), count, step)))
        # What train_batch gives is fp32.
        losses.append(float(engine.total_loss) / count if engine.is_last_stage() else None)
    return losses, total


def _in_one_process(replicas: int, count: int) -> dict[str, torch.Tensor]:
    model = training.tiny_llama(torch.float64, num_hidden_layers=LAYERS)
    for step in range(2):
        pipelines.in_one_process(model, replicas, count, step)
    module = torch.nn.ModuleDict({str(i): part for i, part in enumerate(pipelines.layers(model))})
    return {name: p.grad / replicas for name, p in module.named_parameters()}


def _compare(rank: int, world: int, cases: list[tuple[int, int, dict[str, Any]]]) -> list[tuple[float, float]]:
    import deepspeed

    import deepspeed_cad
    from deepspeed_cad.session import close_session

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    deepspeed_cad.install()
    found = []
    for stages, count, changes in cases:
        losses, own = _gradients(stages, count, BLOCK, **changes)
        session = deepspeed_cad.current_session()
        assert session is not None and session.statistics.imbalance < 1.05
        close_session()
        expected, theirs = _gradients(stages, count, None, **changes)
        alone = _in_one_process(world // stages, count)
        for loss, other in zip(losses, expected, strict=True):
            assert loss == other or abs(loss - other) < 1e-10
        for name, gradient in own.items():
            torch.testing.assert_close(gradient, theirs[name], atol=1e-10, rtol=0)
            torch.testing.assert_close(gradient, alone[name], atol=1e-10, rtol=0)
        found.append((len(own), session.statistics.imbalance))
    return found


def test_two_stages(workers: WorkerPool) -> None:
    """More micro-batches than stages; the smallest real pipeline."""
    workers.run(_compare, 2, [(2, 4, {})], timeout=60.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (1, [(1, 1, {}), (1, 3, {})]),
        (2, [(1, 2, {}), (2, 1, {}), (2, 9, {})]),
        (3, [(1, 2, {}), (3, 1, {}), (3, 2, {}), (3, 5, {})]),
        (4, [(2, 1, {}), (2, 3, {}), (4, 1, {}), (4, 2, {}), (4, 9, {})]),
        (6, [(2, 3, {}), (3, 1, {}), (3, 4, {})]),
        (8, [(4, 2, {}), (4, 6, {})]),
        (9, [(3, 3, {})]),
        (12, [(4, 1, {}), (4, 5, {})]),
    ],
    ids=lambda value: f"{value} ranks" if isinstance(value, int) else "",
)
def test_any_width(fresh_workers: WorkerPool, world: int, cases: list[Any]) -> None:
    """Stages × replicas × micro-batches, fewer micro-batches than stages among them."""
    fresh_workers.run(_compare, world, cases, timeout=200.0)


@pytest.mark.slow
def test_what_stages_are_made_of(fresh_workers: WorkerPool) -> None:
    """Unequal stages, one without attention, and activation checkpointing of both kinds: the same gradients."""
    cases = [
        (2, 3, {"parts": [0, 2, 6]}),
        (2, 3, {"parts": [0, 1, 6]}),
        (2, 3, {"interval": 1}),
        (2, 3, {"interval": 2, "pipeline": {"use_reentrant": False}}),
    ]
    fresh_workers.run(_compare, 4, cases, timeout=200.0)
