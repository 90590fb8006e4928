"""Parts of a stream: each token once, each target where it belongs, and bad input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import training
from hypothesis import given, settings
from hypothesis import strategies as st

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
