"""Parts of a stream: each token once, each target where it belongs, documents in order of hosts, and bad input."""

from typing import Any

import numpy as np
import pytest
import torch
import training
from hypothesis import given, settings
from hypothesis import strategies as st

import deepspeed_cad
from deepspeed_cad.errors import CADDataError
from deepspeed_cad.stream import order_by_host, shard_stream


@settings(max_examples=60)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 7))
def test_parts_are_the_stream_with_its_targets(lengths: list[int], ranks: int) -> None:
    stream = training.pack(training.documents(lengths, seed=len(lengths)))
    stream["labels"] = stream["input_ids"].clone()  # also without -100 at the first tokens: they are nobody's targets
    parts = [deepspeed_cad.shard_stream(stream, rank, ranks) for rank in range(ranks)]
    for name in ("input_ids", "position_ids"):
        assert torch.equal(torch.cat([part[name] for part in parts], dim=1), stream[name])
    widths = [part["input_ids"].shape[1] for part in parts]
    assert max(widths) == -(-sum(lengths) // ranks) and widths == sorted(widths, reverse=True)
    targets = torch.cat([part["shift_labels"] for part in parts], dim=1)[0]
    ends = set(np.cumsum(lengths) - 1)
    for row, target in enumerate(targets.tolist()):
        assert target == (-100 if row in ends else int(stream["input_ids"][0, row + 1]))
    assert all(torch.equal(part["labels"], part["shift_labels"]) for part in parts)
    assert torch.equal(stream["labels"], stream["input_ids"]), "the caller's labels stay as they are"


def test_arrays_and_other_fields() -> None:
    positions = np.array([[0, 1, 2, 0, 1]])
    weights = positions[..., None] * [2.0, 1.0]
    batch = {"cu_seq_lens_q": np.array([0, 3, 5]), "max_length_q": 3}  # of the whole stream
    batch |= {"position_ids": positions, "weights": weights, "name": "a stream", "scale": np.ones(3)}
    part = shard_stream(batch, 1, 2)
    assert part["position_ids"].tolist() == [[0, 1]] and part["weights"].tolist() == [[[0.0, 0.0], [2.0, 1.0]]]
    assert part.keys() == {"position_ids", "weights", "name", "scale"}
    assert part["name"] == "a stream" and part["scale"].tolist() == [1, 1, 1]
    assert shard_stream({"position_ids": positions[:, :0]}, 1, 2, zigzag=True)["position_ids"].shape == (1, 0)


@pytest.mark.parametrize("as_numpy", [False, True])
def test_a_stream_is_dealt_out_in_zigzag(as_numpy: bool) -> None:
    """Targets are those of the stream, whatever rows stand beside each other."""
    positions = torch.cat([torch.arange(2), torch.arange(9), torch.arange(1)])[None]
    whole: dict[str, Any] = {name: torch.arange(12)[None] for name in ("input_ids", "labels")}
    whole["position_ids"] = positions
    if as_numpy:
        whole = {name: value.numpy() for name, value in whole.items()}
    shards = [shard_stream(whole, rank, 3, zigzag=True) for rank in range(3)]
    assert [one["position_ids"][0].tolist() for one in shards] == [[0, 1, 0, 8], [1, 2, 6, 7], [3, 4, 5, 0]]
    assert [one["input_ids"][0].tolist() for one in shards] == [[0, 1, 2, 10], [3, 4, 8, 9], [5, 6, 7, 11]]
    assert [one["labels"][0].tolist() for one in shards] == [[1, -100, 3, -100], [4, 5, 9, 10], [6, 7, 8, -100]]


@pytest.mark.parametrize("lengths, order", [
    ([5, 3, 18, 5, 1], [2, 0, 3, 1, 4]),  # one document is longer than a host
    ([14, 2, 9, 5, 2], [0, 4, 2, 3, 1]),  # each goes to the host with least attention, and none lies on two
])  # fmt: skip
def test_documents_are_ordered_by_host(lengths: list[int], order: list[int]) -> None:
    """Two hosts of two ranks, 8 tokens each."""
    assert order_by_host(lengths, 4, 8, 2) == order
    stream = training.pack(docs := training.documents(lengths, seed=0))
    parts = [shard_stream(stream, rank, 4, ranks_per_host=2)["input_ids"] for rank in range(4)]
    assert torch.equal(torch.cat(parts, dim=1)[0], torch.cat([docs[one] for one in order]))
    assert order_by_host([9, 8, 7], 3, 8, 2) == [0, 2, 1], "the last host has one rank"
    assert order_by_host([28, 10, 9], 6, 8, 2) == [0, 2, 1], "four tokens are left on the long one's second host"
    assert order_by_host([10, 10, 10, 11, 7], 6, 8, 2) == [3, 2, 0, 4, 1], "two fit nowhere, and lie across borders"
    assert order_by_host([1, 7], 2, 4, 1) == order_by_host([1, 7], 2, 4, 2) == [1, 0], "hosts of one rank, and of all"


@pytest.mark.parametrize("change, given, message", [
    ({}, {"rank": 2}, "ranks are 0 to 1"),
    ({}, {"rank": -1}, "rank -1 of 2"),
    ({"position_ids": None}, {}, "needs position_ids"),
    ({"position_ids": torch.zeros(2, 4)}, {}, "one packed row"),
    ({"labels": torch.zeros(1, 3)}, {}, "labels has shape"),
    ({"attention_mask": torch.ones(4, 4)}, {}, "attention_mask has shape"),
    ({"position_ids": torch.arange(3, 7)[None]}, {"zigzag": True}, "begins at position 3"),
    ({}, {"ranks_per_host": 3}, "ranks_per_host is 3; expected 1 to 2"),
])  # fmt: skip
def test_refusals(change: dict[str, Any], given: dict[str, Any], message: str) -> None:
    batch = training.pack(training.documents([3, 1], seed=0)) | change
    batch = {name: value for name, value in batch.items() if value is not None}
    with pytest.raises(CADDataError, match=message):
        shard_stream(batch, **{"rank": 0, "ranks": 2, **given})
