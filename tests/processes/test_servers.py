"""Reserved servers in real processes: exact against each document alone, whatever the trainers do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import training
from pool import WorkerPool
from served import free_port, play

import deepspeed_cad

LENGTHS = {
    1: [[260, 3, 40]],
    2: [[260], [40, 30, 9, 1, 50]],
    3: [[130, 70], [], [31, 33, 5]],
}


def _train(rank: int, trainers: int, block: dict[str, Any], checkpoint: str | None, steps: int) -> dict[str, Any]:
    reference, model = training.tiny_llama(), training.tiny_llama()
    deepspeed_cad.apply(model, block)
    if checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": checkpoint == "reentrant"})
    model.train()
    session = deepspeed_cad.current_session()
    assert session is not None
    for step in range(steps):
        own = training.documents(LENGTHS[trainers][(rank + step) % trainers], seed=100 * step + rank)
        loss = training.loss_sum(model, training.pack(own))
        loss.backward()
        expected, gradients = training.alone(reference, own)
        assert abs(float(loss.detach()) - expected) < 1e-9 * max(1, expected)
        for name, parameter in model.named_parameters():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            assert (grad - gradients[name]).abs().max() < 1e-10 * (1 + gradients[name].abs().max()), name
        model.zero_grad()
    load = session.statistics.load
    return {"load": load.tolist(), "after": session.statistics.imbalance, "forwards": session.counts.forwards}


BLOCK = {"granularity": 16, "tolerance": 0.02}


@pytest.mark.parametrize(("trainers", "servers"), [(1, 1), (2, 1), (2, 2), (1, 3), (3, 1), (3, 3)])
def test_same_as_each_document_alone(workers: WorkerPool, trainers: int, servers: int) -> None:
    block = {**BLOCK, "servers": {"reserved": servers}}
    world = trainers + servers
    results = workers.run(play, world, free_port(), block, _train, None, 2)
    assert results[trainers:] == [0] * servers
    for result in results[:trainers]:
        assert len(result["load"]) == world and min(result["load"]) > 0
        assert result["after"] < 1.1
