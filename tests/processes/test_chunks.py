"""Llama 4: layers that attend in chunks, against each document alone through the unmodified model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import training
from model_cases import FAMILIES, NEW, tiny_model
from pool import WorkerPool

import deepspeed_cad
from deepspeed_cad.errors import CADUnsupportedError

FAMILY = next(family for family in FAMILIES if family.kind == "llama4_text")
"""One layer in chunks, and one with all keys whose temperature changes every 16 tokens."""
CHUNK = FAMILY.changes["attention_chunk_size"]
LENGTHS = [[150, 3, 39], [20, 40, 1, 70]]
SETTINGS = {"granularity": 16, "tolerance": 0.02, "links": training.LINKS}

pytestmark = pytest.mark.skipif(not NEW, reason="older versions of transformers have another Llama 4")


def _model() -> Any:
    model = tiny_model(FAMILY.kind, **FAMILY.changes)
    assert {module.use_rope for module in model.modules() if hasattr(module, "use_rope")} == {True, False}
    return model.train()


def _compare(model: torch.nn.Module, reference: torch.nn.Module) -> float:
    expected = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    largest = max(float(one.abs().max()) for one in expected.values())
    return max(
        float((torch.zeros_like(p) if p.grad is None else p.grad).sub(expected.get(name, 0)).abs().max()) / largest
        for name, p in model.named_parameters()
    )


def _train(rank: int, world: int, overlap: str, checkpoint: bool) -> dict[str, Any]:
    reference, model = _model(), _model()
    if checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    deepspeed_cad.apply(model, {**SETTINGS, "overlap": overlap})
    docs = training.documents(LENGTHS[rank % 2], seed=rank)
    for _ in range(2):
        model.zero_grad()
        loss = training.loss_sum(model, training.pack(docs))
        loss.backward()
    expected = sum(_backward(reference, doc) for doc in docs if len(doc) > 1)
    with torch.no_grad():
        evaluated = float(training.loss_sum(model.eval(), training.pack(docs)))
    session = deepspeed_cad.current_session()
    assert session is not None and session.transport is not None
    keys = {(key.window, key.chunk) for feed in session.feeds for key in feed.keys}
    return {
        "loss": abs(float(loss.detach()) - expected) / expected, "gradients": _compare(model, reference),
        "evaluated": abs(evaluated - expected) / expected, "sent": session.transport.bytes_sent,
        "before": session.statistics.imbalance_before, "after": session.statistics.imbalance, "keys": keys,
    }  # fmt: skip


def _backward(reference: torch.nn.Module, doc: torch.Tensor) -> float:
    loss = training.loss_sum(reference, {**training.pack([doc]), "use_cache": False})
    loss.backward()
    return float(loss.detach())


@pytest.mark.parametrize(
    ("world", "overlap", "checkpoint"),
    [(2, "local_first", False), (2, "interleave", True), (4, "local_first", False)],
)
def test_documents_longer_than_a_chunk(workers: WorkerPool, world: int, overlap: str, checkpoint: bool) -> None:
    found = workers.run(_train, world, overlap, checkpoint)
    for one in found:
        assert max(one["loss"], one["gradients"], one["evaluated"]) < FAMILY.tolerance, found
        assert one["keys"] == {(None, None), (None, CHUNK)}
    assert sum(one["sent"] for one in found) > 0 and found[0]["after"] < found[0]["before"]


def _over_ranks(rank: int, world: int) -> tuple[float, float]:
    """One stream over both ranks: a document's chunks lie on both, and its positions go beyond a rank's rows."""
    lengths, rows = [20, 190, 17, 13], 120
    reference, model = _model(), _model()
    deepspeed_cad.apply(model, SETTINGS)
    docs = training.documents(lengths, seed=5)
    own = {name: value[:, rank * rows : (rank + 1) * rows] for name, value in training.pack(docs).items()}
    weights = torch.randn(sum(lengths), 96, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    logits = model(input_ids=own["input_ids"], position_ids=own["position_ids"]).logits[0]
    (logits * weights[rank * rows : (rank + 1) * rows]).sum().backward()
    found = [reference(**{**training.pack([doc]), "labels": None}, use_cache=False).logits[0] for doc in docs]
    expected = torch.cat(found)
    (expected * weights).sum().backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
    off = (logits - expected[rank * rows : (rank + 1) * rows]).abs().max() / expected.abs().max()
    return float(off), _compare(model, reference)


def test_a_document_over_two_ranks(workers: WorkerPool) -> None:
    assert max(max(one) for one in workers.run(_over_ranks, 2)) < FAMILY.tolerance


def _refused(rank: int, world: int) -> str:
    with pytest.raises(CADUnsupportedError) as error:
        deepspeed_cad.apply(_model(), {**SETTINGS, "verify": 1})
    return str(error.value)


def test_what_cannot_be_had_beside_chunks(workers: WorkerPool) -> None:
    assert set(workers.run(_refused, 2)) == {
        'layers of this model attend in chunks, beside which "verify" cannot be had'
    }
