"""Pipelines: losses and gradients of lockstep rounds are those of DeepSpeed's own schedule and of a single process."""

from typing import Any
from unittest import mock

import pipelines
import pytest
import torch
import training
from landing import counted
from model_cases import NEW
from pool import WorkerPool
from transformers import masking_utils

import deepspeed_cad
from deepspeed_cad.errors import CADError
from deepspeed_cad.session import close_session

BLOCK = {"cost": "pairs", "granularity": 2}
LAYERS = 4
OLD = pytest.mark.skipif(not NEW, reason="its functions that make masks have other arguments")


def _gradients(
    stages: int, count: int, block: dict[str, Any] | None, parts: list[int] | None = None, frozen: bool = False
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of two steps, and the summed gradients of both, by name and layer, on this stage."""
    import deepspeed

    module = pipelines.by_hand(_model(frozen), stages, parts)
    module.dynamic_shape = True
    config = pipelines.config(count) | ({} if block is None else {"cad": block})
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=1.0)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    total = pipelines.summed_gradients(engine)
    losses = []
    for step in range(2):
        engine.train_batch(iter(pipelines.pairs(engine.grid.get_data_parallel_id(), count, step)))
        # What train_batch gives is fp32.
        losses.append(float(engine.total_loss) / count if engine.is_last_stage() else None)
    return losses, total


def _model(frozen: bool) -> Any:
    model = training.tiny_llama(torch.float64, num_hidden_layers=LAYERS)
    if frozen:
        # No gradient reaches attention of the first layer, and its tick comes all the same.
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[0].requires_grad_(False)
    return model


def _in_one_process(replicas: int, count: int, frozen: bool = False) -> dict[str, torch.Tensor]:
    model = _model(frozen)
    for step in range(2):
        pipelines.in_one_process(model, replicas, count, step)
    module = torch.nn.ModuleDict({str(i): part for i, part in enumerate(pipelines.layers(model))})
    return {name: torch.zeros_like(p) if p.grad is None else p.grad / replicas for name, p in module.named_parameters()}


def _compare(rank: int, world: int, cases: list[tuple[int, int, dict[str, Any]]]) -> list[tuple[float, float]]:
    pipelines.start()
    found = []
    for stages, count, changes in cases:
        losses, own = _gradients(stages, count, BLOCK, **changes)
        session = deepspeed_cad.current_session()
        assert session is not None and session.statistics.imbalance < 1.05
        close_session()
        expected, theirs = _gradients(stages, count, None, **changes)
        alone = _in_one_process(world // stages, count, changes.get("frozen", False))
        for loss, other in zip(losses, expected, strict=True):
            assert loss == other or abs(loss - other) < 1e-10
        for name, gradient in own.items():
            torch.testing.assert_close(gradient, theirs[name], atol=1e-10, rtol=0)
            torch.testing.assert_close(gradient, alone[name], atol=1e-10, rtol=0)
        found.append((len(own), session.statistics.imbalance))
    return found


@OLD
def test_what_stages_are_made_of(workers: WorkerPool) -> None:
    """Unequal stages, one without attention, and frozen layers: the same gradients. (Others: test_loops.py.)"""
    workers.run(_compare, 2, [(2, 4, {}), (2, 3, {"parts": [0, 1, 6]}), (2, 3, {"frozen": True})], timeout=60.0)


def _engine(stages: int, count: int, changes: dict[str, Any], block: dict[str, Any] | None) -> Any:
    deepspeed = pipelines.start()
    module = pipelines.by_hand(training.tiny_llama(torch.float32, num_hidden_layers=LAYERS), stages)
    adam = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    config = pipelines.config(count, optimizer=adam, **changes) | ({} if block is None else {"cad": block})
    module.dynamic_shape = block is None
    engine, *_ = deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=config)
    return engine


def _losses(
    rank: int, world: int, stages: int, count: int, changes: dict[str, Any], block: dict[str, Any]
) -> list[list[float]]:
    """Losses of four steps on one loader with evaluations between, with CAD and without."""
    found = []
    for cad in (block, None):
        engine = _engine(stages, count, changes, cad)
        replica = engine.grid.get_data_parallel_id()
        loader = iter([pair for step in range(5) for pair in pipelines.pairs(replica, count, step)])
        losses = [float(engine.train_batch(loader)) for _ in range(2)]
        losses.append(float(engine.eval_batch(iter(pipelines.pairs(replica, count, 7)))))
        losses.append(float(engine.train_batch(loader)))
        losses.append(float(engine.eval_batch(loader, num_micro_batches=count)))  # takes what was read ahead
        losses.append(float(engine.train_batch(loader)))
        if cad is not None:
            with pytest.raises(StopIteration):
                engine.train_batch(loader)
            session = deepspeed_cad.current_session()
            assert session is not None and session.counts.forwards == session.counts.backwards > 0
        found.append(losses)
        close_session()
        engine.destroy()
    return found


@pytest.mark.long
def test_loaders_and_engines(fresh_workers: WorkerPool) -> None:
    """Losses are those without CAD whatever reads ahead of whom, and the end of a loader is one on all ranks."""
    changes = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}
    for cad, plain in fresh_workers.run(_losses, 4, 2, 3, changes, {**BLOCK, "look_ahead": 0}, timeout=120.0):
        assert cad == pytest.approx(plain, abs=2**-5), "to the next number in bf16"


def _hides_a_key(rank: int, world: int) -> tuple[str, str]:
    """What training says of layers whose own mask hides a key that the plan uses: unchecked, and with the default."""
    make, said = masking_utils.create_causal_mask, []

    def make_less(**given: Any) -> Any:
        return make(**given, and_mask_function=lambda batch, head, query, key: (key != 3) | (query == 3))

    for check in ({"check": "off"}, {}):
        with mock.patch.object(masking_utils, "create_causal_mask", make_less):
            engine = _engine(2, 2, {}, {**BLOCK, **check})
            try:
                engine.train_batch(iter(pipelines.pairs(0, 2)))
                said.append("nothing")
            except CADError as error:
                said.append(f"{type(error).__name__}: {error}")
        close_session()
        engine.destroy()
    return said[0], said[1]


@pytest.mark.slow
def test_masks_of_layers_are_compared_with_plans(fresh_workers: WorkerPool) -> None:
    found = fresh_workers.run(_hides_a_key, 2, timeout=60.0)
    assert [unchecked for unchecked, _ in found] == ["nothing", "nothing"]
    first, serving = (checked for _, checked in found)
    assert first.startswith("CADUnsupportedError: the model's own mask hides key position 3 to query position")
    assert serving.startswith("CADPeerError") and "rank 0" in serving and "hides key position 3" in serving


# Ticks in waves: as little memory as was asked for


COUNT, KIB = 3, 2**-20
"""Micro-batches; in GiB."""


def _train(rank: int, world: int, block: dict[str, Any]) -> dict[str, Any]:
    pipelines.start()
    with counted() as landing:
        _, own = _gradients(2, COUNT, {**BLOCK, "links": training.LINKS, **block})
    session = deepspeed_cad.current_session()
    assert session is not None and landing.now == 0
    bytes_ = session.statistics.landing_bytes
    close_session()
    alone = _in_one_process(world // 2, COUNT)
    for name, gradient in own.items():
        torch.testing.assert_close(gradient, alone[name], atol=1e-10, rtol=0)
    return {"most": landing.most, "waves": landing.span, "landing": bytes_}


@OLD
def test_exact_within_the_limit(workers: WorkerPool) -> None:
    found, limit = workers.run(_train, 2, {"memory": 120 * KIB}, timeout=120.0), 120 * 1024
    assert len({one["waves"] for one in found}) == 1 and found[0]["waves"][1] >= 3
    assert all(0 < one["most"] <= limit and 0 < one["landing"] <= limit for one in found), found
