"""Pipelines: losses and gradients of lockstep rounds are those of DeepSpeed's own schedule and of a single process."""

from __future__ import annotations

import re
from typing import Any

import pipelines
import pytest
import torch
import training
from landing import counted
from pool import WorkerPool

BLOCK = {"cost": "pairs", "granularity": 2}
LAYERS = 4


def _gradients(
    stages: int, count: int, block: dict[str, Any] | None, parts: list[int] | None = None, frozen: bool = False,
    interval: int = 0, **changes: Any,
) -> tuple[list[float], dict[str, torch.Tensor]]:  # fmt: skip
    """Losses of two steps, and the summed gradients of both, by name and layer, on this stage."""
    import deepspeed

    module = pipelines.by_hand(_model(frozen), stages, parts, interval)
    module.dynamic_shape = True
    config = pipelines.config(count, **changes) | ({} if block is None else {"cad": block})
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
    import deepspeed_cad
    from deepspeed_cad.session import close_session

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


def test_two_stages(workers: WorkerPool) -> None:
    workers.run(_compare, 2, [(2, 4, {})], timeout=60.0)


@pytest.mark.slow
def test_what_stages_are_made_of(fresh_workers: WorkerPool) -> None:
    """Unequal stages, one without attention, and activation checkpointing of both kinds: the same gradients."""
    cases = [
        (2, 3, {"parts": [0, 2, 6]}),
        (2, 3, {"parts": [0, 1, 6]}),
        (2, 3, {"frozen": True}),
        (2, 3, {"interval": 1}),
        (2, 3, {"interval": 2, "pipeline": {"use_reentrant": False}}),
    ]
    fresh_workers.run(_compare, 4, cases, timeout=200.0)


def _engine(stages: int, count: int, changes: dict[str, Any], block: dict[str, Any] | None, **model: Any) -> Any:
    deepspeed = pipelines.start()
    module = pipelines.by_hand(training.tiny_llama(torch.float32, num_hidden_layers=LAYERS, **model), stages)
    adam = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    config = pipelines.config(count, optimizer=adam, **changes) | ({} if block is None else {"cad": block})
    module.dynamic_shape = block is None
    engine, *_ = deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=config)
    return engine


def _losses(
    rank: int, world: int, stages: int, count: int, changes: dict[str, Any], block: dict[str, Any]
) -> list[list[float]]:
    """Losses of four steps on one loader with evaluations between, with CAD and without."""
    import deepspeed_cad
    from deepspeed_cad.session import close_session

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


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "block", "tolerance"),
    [
        ({}, {}, 1e-5),
        ({"zero_optimization": {"stage": 1}}, {"look_ahead": 0}, 1e-5),
        ({"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}, {"overlap": "none"}, 2e-2),
    ],
    ids=["plain", "ZeRO-1, no look-ahead", "ZeRO-1, bf16"],
)
def test_loaders_and_engines(
    fresh_workers: WorkerPool, changes: dict[str, Any], block: dict[str, Any], tolerance: float
) -> None:
    """Losses are those without CAD whatever reads ahead of whom, and the end of a loader is one on all ranks."""
    for cad, plain in fresh_workers.run(_losses, 4, 2, 3, changes, {**BLOCK, **block}, timeout=120.0):
        assert cad == pytest.approx(plain, abs=tolerance)


def _wrong(rank: int, world: int, what: str) -> str:
    """The error of one kind of bad input, on this rank."""
    from deepspeed_cad.errors import CADError

    try:
        if what == "ZeRO-2":
            _engine(2, 2, {"zero_optimization": {"stage": 2}}, BLOCK)
        elif what == "dropout":
            _engine(2, 2, {}, BLOCK, attention_dropout=0.1)
        elif what == "recompute_attention":
            _engine(2, 2, {}, {**BLOCK, "recompute_attention": True})
        else:
            engine = _engine(2, 2, {}, BLOCK)
            pairs = pipelines.pairs(0, 2, rank if what == "different data" else 0)
            if what == "no labels":
                pairs[1] = (pairs[1][0], torch.full_like(pairs[1][1], -100))
            engine.train_batch(iter(pairs))
    except CADError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("ZeRO-2", "CADUnsupportedError: .*stage 2"),
        ("recompute_attention", 'CADConfigError: .*"recompute_attention"'),
        ("dropout", "CADUnsupportedError: attention_dropout is 0.1"),
        ("no labels", "CADDataError: .*all labels of a micro-batch are -100"),
        ("different data", "CADDataError: .*on the first stage"),
    ],
)
def test_bad_input_is_one_error_on_all_ranks(fresh_workers: WorkerPool, what: str, expected: str) -> None:
    for said in fresh_workers.run(_wrong, 2, what, timeout=60.0):
        assert re.match(expected, said), said


def _hides_a_key(rank: int, world: int) -> tuple[str, str]:
    """What training says of layers whose own mask hides a key that the plan uses: unchecked, and with the default."""
    from unittest import mock

    from transformers import masking_utils

    from deepspeed_cad.errors import CADError
    from deepspeed_cad.session import close_session

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


# Ticks in waves: as little memory as was asked for, and one error on all ranks where there is too little


COUNT = 3
"""Micro-batches."""


def _train(rank: int, world: int, stages: int, has: float, block: dict[str, Any]) -> dict[str, Any]:
    import deepspeed_cad
    from deepspeed_cad.errors import CADError
    from deepspeed_cad.session import close_session

    pipelines.start()
    try:
        with counted(has) as landing:
            _, own = _gradients(stages, COUNT, {**BLOCK, "links": training.LINKS, **block})
    except CADError as error:
        return {"error": str(error), "most": landing.most}
    session = deepspeed_cad.current_session()
    assert session is not None and landing.now == 0
    bytes_ = session.statistics.landing_bytes
    close_session()
    alone = _in_one_process(world // stages, COUNT)
    for name, gradient in own.items():
        torch.testing.assert_close(gradient, alone[name], atol=1e-10, rtol=0)
    return {"most": landing.most, "waves": landing.span, "landing": bytes_}


def _kib(size: float) -> float:
    return size / 2**20


@pytest.mark.parametrize(
    ("stages", "world", "kib", "block"),
    [
        (2, 2, 120, {}),
        pytest.param(2, 4, 10000, {"waves": 3}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_exact_within_the_limit(
    workers: WorkerPool, stages: int, world: int, kib: float, block: dict[str, Any]
) -> None:
    found = workers.run(_train, world, stages, float("inf"), {"memory": _kib(kib), **block}, timeout=120.0)
    assert len({one["waves"] for one in found}) == 1
    assert found[0]["waves"][1] >= 3 and found[0]["waves"][0] >= block.get("waves", 1)
    assert all(0 < one["most"] <= kib * 1024 and 0 < one["landing"] <= kib * 1024 for one in found), found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("has", "block", "says"),
    [
        (float("inf"), {"memory": 1e-6}, "does not fit: cut into the smallest waves, what lands at rank"),
        (0, {}, "3 are free. Smaller waves do not help: the attention that ranks exchange does not fit"),
    ],
    ids=["a limit that is too small", "no memory"],
)
def test_too_little_is_one_error_on_all_ranks(
    fresh_workers: WorkerPool, has: float, block: dict[str, Any], says: str
) -> None:
    first, *others = fresh_workers.run(_train, 4, 2, has, block, timeout=120.0)
    assert says in first["error"] and '"memory" to at least' in first["error"] and first["most"] == 0
    assert all(one == first for one in others)
