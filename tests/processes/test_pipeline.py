"""Pipelines: gradients of lockstep rounds are those of a single process, within the memory that is given."""

from functools import partial
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


def _train(
    rank: int, world: int, block: dict[str, Any], count: int = 3, parts: list[int] | None = None, frozen: bool = False
) -> dict[str, Any]:
    """What two steps held in landing areas, and in how many waves they went; gradients are right."""
    deepspeed, module = pipelines.start(), pipelines.by_hand(_model(frozen), 2, parts)
    module.dynamic_shape = True
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=1.0)
    config = pipelines.config(count) | {"cad": {**BLOCK, **block}}
    with counted() as landing:
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
        own = pipelines.summed_gradients(engine)
        for step in range(2):
            engine.train_batch(iter(pipelines.pairs(engine.grid.get_data_parallel_id(), count, step)))
    session = deepspeed_cad.current_session()
    assert session is not None and session.statistics.imbalance < (1.05 if not block else 2.0)
    found = {"landing": session.statistics.landing_bytes, "now": landing.now}
    close_session()
    alone = _in_one_process(world // 2, count, frozen)
    for name, gradient in own.items():
        torch.testing.assert_close(gradient, alone[name], atol=1e-10, rtol=0)
    return {"most": landing.most, "waves": landing.span, **found}


@OLD
@pytest.mark.parametrize(
    "changes", [{"count": 4}, {"parts": [0, 1, 6]}, {"frozen": True}], ids=lambda one: next(iter(one))
)
def test_what_stages_are_made_of(workers: WorkerPool, changes: dict[str, Any]) -> None:
    """Unequal stages, one without attention, and frozen layers: the same gradients. (Others: test_loops.py.)"""
    workers.run(partial(_train, **changes), 2, {}, timeout=60.0)


@OLD
def test_exact_within_the_limit(workers: WorkerPool) -> None:
    """Ticks in waves: as little memory as was asked for, in GiB."""
    limit = 120 * 1024
    found = workers.run(_train, 2, {"memory": limit / 2**30, "links": training.LINKS}, timeout=120.0)
    assert len({one["waves"] for one in found}) == 1 and found[0]["waves"][1] >= 3
    assert all(0 < one["most"] <= limit and 0 < one["landing"] <= limit and not one["now"] for one in found), found


def _hides_a_key(rank: int, world: int) -> tuple[str, str]:
    """What training says of layers whose own mask hides a key that the plan uses: unchecked, and with the default."""
    deepspeed, make, said = pipelines.start(), masking_utils.create_causal_mask, list[str]()

    def make_less(**given: Any) -> Any:
        return make(**given, and_mask_function=lambda batch, head, query, key: (key != 3) | (query == 3))

    for check in ({"check": "off"}, {}):
        with mock.patch.object(masking_utils, "create_causal_mask", make_less):
            module = pipelines.by_hand(training.tiny_llama(torch.float32, num_hidden_layers=LAYERS), 2)
            config = pipelines.config(2) | {"cad": {**BLOCK, **check}}
            optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
            engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
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
