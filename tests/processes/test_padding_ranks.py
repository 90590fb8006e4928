"""Padding on two ranks that move attention, also where nano-batches cut rows or batches; both hear of a refusal."""

import pytest
import torch
import training
from padded import assert_same, loss_and_gradients, padded
from pool import WorkerPool

import deepspeed_cad
from deepspeed_cad.errors import CADDataError

BLOCK = {"granularity": 16, "tolerance": 0.02, "links": training.LINKS}
LENGTHS = {"rows": [[300, 90, 31], [9, 40, 70]], "one row": [[201], [9]]}


def _train(rank: int, world: int, overlap: str, side: str, rows: str) -> int:
    batch = padded(LENGTHS[rows][rank], side, "masked", width=320)
    plain, model = (training.tiny_llama(torch.float64, attn_implementation="sdpa") for _ in range(2))
    deepspeed_cad.apply(model, {**BLOCK, "overlap": overlap})
    assert_same(loss_and_gradients(model, batch), loss_and_gradients(plain, batch), 1e-9)
    return int(deepspeed_cad.current_session().statistics.bytes_sent)


@pytest.mark.parametrize("overlap, side, rows", [
    ("local_first", "left", "rows"), ("interleave", "left", "one row"), ("interleave", "right", "one row"),
    ("interleave", "right", "rows"),
])  # fmt: skip
def test_as_without_cad(workers: WorkerPool, overlap: str, side: str, rows: str) -> None:
    assert sum(workers.run(_train, 2, overlap, side, rows)) > 0


def _refused(rank: int, world: int) -> str:
    model = deepspeed_cad.apply(training.tiny_llama(torch.float32, attn_implementation="sdpa"), BLOCK)
    labels = "copied" if rank == 1 else "masked"
    with pytest.raises(CADDataError if rank == 1 else Exception) as caught:
        loss_and_gradients(model, padded([90], "right", labels, width=128))
    return str(caught.value)


def test_labels_that_count_padding(workers: WorkerPool) -> None:
    for text in workers.run(_refused, 2):
        assert "rank 1: 38 tokens from row 90 on are hidden by attention_mask" in text and "-100" in text
