"""shard_stream: a model trained on parts of a stream learns what it learns from the documents."""

from __future__ import annotations

import pytest
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
        hosts = 2 if zigzag else None
        training.stream_as_alone(model, reference, docs, rank, world, zigzag=zigzag, ranks_per_host=hosts)


@pytest.mark.parametrize(
    ("world", "overlap", "zigzag"),
    [(2, "local_first", False), (3, "pingpong", False), (2, "local_first", True), (3, "local_first", True)],
)
def test_training_on_parts_is_training_on_documents(
    workers: WorkerPool, world: int, overlap: str, zigzag: bool
) -> None:
    """Documents that span ranks; also reordered and dealt out in zigzag, where what moves goes in waves."""
    workers.run(_train, world, overlap, zigzag)
