"""Micro-batches in every form that transformers users pass: positions, cumulative lengths, padded batches, spans."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import told
import torch
import training
from pool import WorkerPool
from torch.nn.parallel import DistributedDataParallel

import deepspeed_cad

BLOCK = {"granularity": 16, "tolerance": 0.02, "links": training.LINKS}
LENGTHS = [[200, 31], [40, 9, 1, 70]]


def _padded(docs: list[torch.Tensor], left: bool) -> dict[str, torch.Tensor]:
    """One document per batch row with a 2-D mask."""
    width = max(len(doc) for doc in docs)
    ids, mask, labels = (torch.zeros(len(docs), width, dtype=torch.long) for _ in range(3))
    labels.fill_(-100)
    for row, doc in enumerate(docs):
        here = slice(width - len(doc), width) if left else slice(0, len(doc))
        ids[row, here], mask[row, here] = doc, 1
        labels[row, here] = torch.cat([torch.tensor([-100]), doc[1:]])
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _batch(form: str, docs: list[torch.Tensor]) -> dict[str, Any]:
    if form in told.FORMS:
        return told.told(docs, form)
    packed = training.pack(docs)
    if form == "positions":
        return packed
    if form == "cumulative":
        ends = torch.tensor([0, *np.cumsum([len(d) for d in docs])], dtype=torch.int32)
        longest = max(len(d) for d in docs)
        return {
            **packed,
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
            "max_length_q": longest,
            "max_length_k": longest,
        }
    if form == "right padding":
        return _padded(docs, left=False)
    padded = _padded(docs, left=True)
    mask = padded["attention_mask"]
    return {**padded, "position_ids": (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)}


def _train(rank: int, world: int, form: str, overlap: str) -> dict[str, Any]:
    reference, model = training.tiny_llama(), training.tiny_llama()
    deepspeed_cad.apply(model, {**BLOCK, "overlap": overlap})
    docs = training.documents(LENGTHS[rank], seed=rank)
    loss = training.loss_sum(model, _batch(form, docs))
    loss.backward()
    expected, gradients = (told if form in told.FORMS else training).alone(reference, docs)
    assert abs(float(loss.detach()) - expected) < 1e-8
    training.assert_gradients(model, gradients, 1e-9)
    session = deepspeed_cad.current_session()
    return {"sent": session.transport.bytes_sent, "after": session.statistics.imbalance}


@pytest.mark.parametrize(
    ("form", "overlap"),
    [
        ("positions", "local_first"), ("cumulative", "pingpong"), ("right padding", "interleave"),
        ("left padding", "pingpong"), ("lengths and ones", "interleave"), ("numbers, padded", "local_first"),
        ("additive", "interleave"),
    ],
)  # fmt: skip
def test_every_form_is_exact(workers: WorkerPool, form: str, overlap: str) -> None:
    results = workers.run(_train, 2, form, overlap)
    assert sum(r["sent"] for r in results) > 0
    assert results[0]["after"] < 1.05


def _ddp(rank: int, world: int, overlap: str) -> None:
    reference = training.tiny_llama()
    model = deepspeed_cad.apply(training.tiny_llama(), {**BLOCK, "overlap": overlap})
    wrapped = DistributedDataParallel(model)
    docs = training.documents(LENGTHS[rank], seed=rank)
    session = deepspeed_cad.current_session()
    for _ in range(2):
        with wrapped.no_sync():
            training.loss_sum(wrapped, training.pack(docs)).backward()
    training.loss_sum(wrapped, training.pack(docs)).backward()
    gradients: dict[str, torch.Tensor] = {}
    for other in range(world):
        _, one = training.alone(reference, training.documents(LENGTHS[other], seed=other))
        gradients = {name: gradients.get(name, 0) + 3 * g / world for name, g in one.items()}
    training.assert_gradients(model, gradients, 1e-9)
    layers, parts = 2, 1 if overlap == "local_first" else 2
    assert session.transport.exchanges == 3 * layers * parts * 4


@pytest.mark.parametrize("overlap", ["local_first", "interleave"])
def test_data_parallel_wrapper_and_accumulation(workers: WorkerPool, overlap: str) -> None:
    workers.run(_ddp, 2, overlap)


def test_wrappers_pass_the_descriptor_on_as_it_is() -> None:
    """FSDP's mixed precision and DDP rebuild containers of tensors among arguments; a descriptor is none."""
    from torch.distributed.utils import _apply_to_tensors
    from torch.utils._pytree import tree_map

    from deepspeed_cad.attention.microbatch import MaskDescriptor
    from deepspeed_cad.attention.setup import Modes

    descriptor = MaskDescriptor(None, 7, None, Modes())
    assert _apply_to_tensors(lambda x: x, {"attention_mask": descriptor})["attention_mask"] is descriptor
    assert tree_map(lambda x: x, [descriptor])[0] is descriptor
