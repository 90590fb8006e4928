"""Padding whose labels count, on two ranks that move attention, also where nano-batches cut rows or batches."""

from __future__ import annotations

import pytest
import torch
import training
from padded import assert_same, loss_and_gradients, padded
from pool import WorkerPool

import deepspeed_cad
from deepspeed_cad.errors import CADDataError

BLOCK = {"granularity": 16, "tolerance": 0.02, "links": training.LINKS}
LENGTHS = {
    "rows": [[300, 90, 31], [9, 40, 70]],
    "one row": [[201], [9]],
    "one row, none padded": [[24], [9]],
}
DTYPES = {"sdpa": torch.float64, "eager": torch.float32}


def _train(rank: int, world: int, overlap: str, attention: str, side: str, rows: str) -> int:
    batch = padded(LENGTHS[rows][rank], side, "copied", width=320 if rows != "one row, none padded" else 24)
    plain = training.tiny_llama(DTYPES[attention], attn_implementation=attention)
    model = training.tiny_llama(DTYPES[attention], attn_implementation=attention)
    deepspeed_cad.apply(model, {**BLOCK, "overlap": overlap})
    expected = loss_and_gradients(plain, batch)
    assert_same(loss_and_gradients(model, batch), expected, 1e-5 if attention == "eager" else 1e-9)
    return int(deepspeed_cad.current_session().statistics.bytes_sent)


@pytest.mark.parametrize(
    ("overlap", "attention", "side", "rows"),
    [
        ("local_first", "sdpa", "left", "rows"), ("interleave", "sdpa", "left", "one row"),
        ("interleave", "sdpa", "right", "one row"), ("interleave", "sdpa", "right", "one row, none padded"),
        ("interleave", "eager", "left", "rows"), ("interleave", "eager", "right", "one row"),
    ],
)  # fmt: skip
def test_as_without_cad(workers: WorkerPool, overlap: str, attention: str, side: str, rows: str) -> None:
    sent = workers.run(_train, 2, overlap, attention, side, rows)
    assert sum(sent) > 0 or rows == "one row, none padded"


def _refused(rank: int, world: int) -> str:
    model = training.tiny_llama(torch.float32, attn_implementation="eager")
    deepspeed_cad.apply(model, {**BLOCK, "overlap": "interleave"})
    side = "left" if rank == 1 else "right"
    with pytest.raises(CADDataError if rank == 1 else Exception) as caught:
        loss_and_gradients(model, padded([90], side, "copied", width=128))
    return str(caught.value)


def test_values_behind_the_cut_are_not_there_yet(workers: WorkerPool) -> None:
    """Eager attention gives padding in front the mean of all values of its row: both ranks stop and say why."""
    for text in workers.run(_refused, 2):
        assert "rank 1: its only row begins with padding" in text and '"overlap": "local_first"' in text
