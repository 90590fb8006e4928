"""One process, with and without torch.distributed: nothing to exchange, the same result."""

from __future__ import annotations

import pytest
import torch
import training
from pool import WorkerPool

import deepspeed_cad
from deepspeed_cad.session import close_session


def _train(overlap: str) -> None:
    model, reference = training.tiny_llama(), training.tiny_llama()
    deepspeed_cad.apply(model, {"overlap": overlap})
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    docs = training.documents([40, 3, 1, 77], seed=5)
    loss = training.loss_sum(model, training.pack(docs))
    loss.backward()
    expected, gradients = training.alone(reference, docs)
    assert abs(float(loss.detach()) - expected) < 1e-8
    for name, p in model.named_parameters():
        assert (p.grad - gradients[name]).abs().max() < 1e-9, name
    session = deepspeed_cad.current_session()
    assert session is not None and session.transport is None and session.ranks == 1
    assert session.statistics.imbalance == pytest.approx(1.0)


@pytest.mark.parametrize("overlap", ["local_first", "pingpong", "none"])
def test_without_torch_distributed(overlap: str) -> None:
    assert not torch.distributed.is_initialized()
    try:
        _train(overlap)
    finally:
        close_session()


def _in_group(rank: int, world: int) -> None:
    _train("pingpong")


def test_a_group_of_one(workers: WorkerPool) -> None:
    workers.run(_in_group, 1)
