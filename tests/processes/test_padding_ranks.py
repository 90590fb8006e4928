"""Labels that count padding on one of two ranks: both hear of it. Right paddings are cases of test_loops.py."""

import pytest
import torch
import training
from padded import loss_and_gradients, padded
from pool import WorkerPool

import deepspeed_cad
from deepspeed_cad.errors import CADDataError

BLOCK = {"granularity": 16, "tolerance": 0.02, "links": training.LINKS}


def _refused(rank: int, world: int) -> str:
    model = deepspeed_cad.apply(training.tiny_llama(torch.float32, attn_implementation="sdpa"), BLOCK)
    labels = "copied" if rank == 1 else "masked"
    with pytest.raises(CADDataError if rank == 1 else Exception) as caught:
        loss_and_gradients(model, padded([90], "right", labels, width=128))
    return str(caught.value)


def test_labels_that_count_padding(workers: WorkerPool) -> None:
    for text in workers.run(_refused, 2):
        assert "rank 1: 38 tokens from row 90 on are hidden by attention_mask" in text and "-100" in text
