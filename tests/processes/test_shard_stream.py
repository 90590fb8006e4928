"""shard_stream: a model trained on parts of a stream learns what it learns from the documents."""

from __future__ import annotations

import pytest
import torch
import training
from pool import WorkerPool

import deepspeed_cad

STREAMS = ([150, 1, 33], [9] * 20, [300], [2, 2])
"""The last one leaves the third of three ranks without a token."""


def _train(rank: int, world: int, overlap: str, zigzag: bool) -> None:
    reference, model = training.tiny_llama(), training.tiny_llama()
    block = {
        "granularity": 16,
        "tolerance": 0.02,
        "links": training.LINKS,
        "overlap": overlap,
        "waves": 2 if zigzag else "auto",
    }
    deepspeed_cad.apply(model, block)
    model.train()
    for step, lengths in enumerate(STREAMS):
        docs = training.documents(lengths, seed=step)
        expected, gradients = training.alone(reference, docs)
        targets = sum(length - 1 for length in lengths)
        part = deepspeed_cad.shard_stream(
            training.pack(docs), rank, world, zigzag=zigzag, ranks_per_host=2 if zigzag else None
        )
        output = model(**part, num_items_in_batch=targets)
        loss = torch.nn.functional.cross_entropy(
            output.logits.flatten(0, 1), part["shift_labels"].flatten(), reduction="sum"
        )
        # The model's own loss takes the shifted targets as they are; it works in fp32.
        assert abs(float(output.loss) * targets - float(loss)) < 1e-5 * (1 + abs(float(loss)))
        loss.backward()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        assert abs(float(total) - expected) < 1e-9 * max(1.0, expected), lengths
        for name, parameter in model.named_parameters():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
            torch.distributed.all_reduce(grad)
            wanted = gradients[name]
            assert (grad - wanted).abs().max() < 1e-10 * (1 + wanted.abs().max()), (name, lengths)
        model.zero_grad()


@pytest.mark.parametrize(
    ("world", "overlap", "zigzag"),
    [(2, "local_first", False), (3, "pingpong", False), (2, "local_first", True), (3, "local_first", True)],
)
def test_training_on_parts_is_training_on_documents(
    workers: WorkerPool, world: int, overlap: str, zigzag: bool
) -> None:
    """Documents that span ranks; also reordered and dealt out in zigzag, where what moves goes in waves."""
    workers.run(_train, world, overlap, zigzag)
