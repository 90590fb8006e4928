"""Reserved servers in real processes: exact against each document alone, whatever the trainers do."""

from __future__ import annotations

from typing import Any

import torch
import training
from pool import WorkerPool
from served import run

import deepspeed_cad


def _many(rank: int, trainers: int, block: dict[str, Any]) -> None:
    """Micro-batches whose backwards come later and in another order, forwards without gradients, evaluation, two models
    in one process, and layers whose backward never comes."""
    reference = training.tiny_llama()
    models = [training.tiny_llama(), training.tiny_llama(num_key_value_heads=2)]
    references = [reference, training.tiny_llama(num_key_value_heads=2)]
    for model in models:
        deepspeed_cad.apply(model, block).train()
    own = [training.documents([40 * (1 + (rank + step) % 2), 7, 1, 30], 10 * step + rank) for step in range(3)]
    expected = [[training.alone(one, docs) for docs in own] for one in references]
    losses = [training.loss_sum(models[0], training.pack(docs)) for docs in own[:2]]
    with torch.no_grad():
        looked = training.loss_sum(models[0], training.pack(own[2]))
    assert abs(float(looked) - expected[0][2][0]) < 1e-8
    other = training.loss_sum(models[1], training.pack(own[0]))
    models[0].eval()
    with torch.no_grad():
        assert abs(float(training.loss_sum(models[0], training.pack(own[1]))) - expected[0][1][0]) < 1e-8
    models[0].train()
    losses[1].backward()
    other.backward()
    losses[0].backward()
    for model, wanted in ((models[0], (expected[0][0], expected[0][1])), (models[1], (expected[1][0],))):
        whole = {name: sum(gradients[name] for _, gradients in wanted) for name in wanted[0][1]}
        training.assert_gradients(model, whole, 1e-9)
    del losses, looked, other
    # The first layer's attention needs no backward: what a server holds of it goes when the micro-batch does.
    for name, parameter in models[0].named_parameters():
        parameter.requires_grad_("layers.0" not in name and "embed" not in name)
    for docs in own:
        training.loss_sum(models[0], training.pack(docs)).backward()


def test_many_micro_batches_and_models_in_flight(workers: WorkerPool) -> None:
    _, served = run(workers, 2, 1, _many, forward_only="balanced")
    assert served[0].micro_batches == 8
