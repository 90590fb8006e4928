"""shard_stream: the parts are the stream, no target is lost at a cut, and a model trained on parts learns the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import training
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import WorkerPool

import deepspeed_cad
from deepspeed_cad.errors import CADDataError


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 7))
def test_parts_are_the_stream(lengths: list[int], ranks: int) -> None:
    stream = training.pack(training.documents(lengths, seed=len(lengths)))
    parts = [deepspeed_cad.shard_stream(stream, rank, ranks) for rank in range(ranks)]
    for name in ("input_ids", "position_ids"):
        assert torch.equal(torch.cat([part[name] for part in parts], dim=1), stream[name])
    widths = [part["input_ids"].shape[1] for part in parts]
    assert max(widths) == -(-sum(lengths) // ranks)
    assert widths == sorted(widths, reverse=True)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 7))
def test_no_target_is_lost_or_invented(lengths: list[int], ranks: int) -> None:
    stream = training.pack(training.documents(lengths, seed=1))
    stream["labels"] = stream["input_ids"].clone()  # also without -100 at the first tokens: they are nobody's targets
    parts = [deepspeed_cad.shard_stream(stream, rank, ranks) for rank in range(ranks)]
    targets = torch.cat([part["shift_labels"] for part in parts], dim=1)[0]
    ends = set(np.cumsum(lengths) - 1)
    for row, target in enumerate(targets.tolist()):
        assert target == (-100 if row in ends else int(stream["input_ids"][0, row + 1]))
    for part in parts:
        assert torch.equal(part["labels"], part["shift_labels"])


def test_arrays_and_other_fields() -> None:
    positions = np.array([[0, 1, 2, 0, 1]])
    batch = {"position_ids": positions, "weights": positions * 2.0, "name": "a stream", "scale": np.float32(2.0)}
    part = deepspeed_cad.shard_stream(batch, 1, 2)
    assert part["position_ids"].tolist() == [[0, 1]] and part["weights"].tolist() == [[0.0, 2.0]]
    assert part["name"] == "a stream" and part["scale"] == 2.0


@pytest.mark.parametrize(
    ("change", "rank", "message"),
    [
        ({}, 2, "ranks are 0 to 1"),
        ({"position_ids": None}, 0, "needs position_ids"),
        ({"position_ids": torch.zeros(2, 4)}, 0, "one packed row"),
        ({"labels": torch.zeros(1, 3)}, 0, "labels has shape"),
        ({"attention_mask": torch.ones(4, 4)}, 0, "attention_mask has shape"),
    ],
)
def test_refusals(change: dict[str, Any], rank: int, message: str) -> None:
    batch = training.pack(training.documents([3, 1], seed=0)) | change
    batch = {name: value for name, value in batch.items() if value is not None}
    with pytest.raises(CADDataError, match=message):
        deepspeed_cad.shard_stream(batch, rank, 2)


STREAMS = ([150, 1, 33], [9] * 20, [300], [2, 2])
"""The last one leaves the third of three ranks without a token."""


def _train(rank: int, world: int, overlap: str, zigzag: bool = False) -> None:
    reference, model = training.tiny_llama(), training.tiny_llama()
    block = {"granularity": 16, "tolerance": 0.02, "overlap": overlap, "waves": 2 if zigzag else "auto"}
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


@pytest.mark.parametrize("overlap", ["local_first", "pingpong"])
def test_training_on_parts_is_training_on_documents(workers: WorkerPool, overlap: str) -> None:
    """Loss and gradients of documents that span ranks, against each document alone."""
    workers.run(_train, 2, overlap)
    workers.run(_train, 3, overlap)


@pytest.mark.parametrize("world", [2, 3])
def test_training_on_pieces_is_training_on_documents(workers: WorkerPool, world: int) -> None:
    """The same where documents are reordered and dealt out in zigzag, and what moves goes in waves."""
    workers.run(_train, world, "local_first", True)
