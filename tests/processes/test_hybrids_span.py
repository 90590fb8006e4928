"""Documents that span ranks in models with layers that carry state: as each document alone, and what moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hybrids import difference
from model_cases import FAMILIES, NEW, tiny_model
from pool import WorkerPool
from training import LINKS

import deepspeed_cad

KINDS = (
    "qwen3_5_text", "qwen3_next", "kimi_linear", "olmo_hybrid", "granitemoehybrid", "nemotron_h", "falcon_h1", "jamba",
    "lfm2", "bamba", "zamba", "lfm3", "lfm2_moe", "qwen3_5_moe_text",
)  # fmt: skip
STREAM = [90, 3, 140, 1, 67]
"""Documents of one stream. Over three ranks of 101 rows the third lies on all of them but one row."""

pytestmark = pytest.mark.skipif(not NEW, reason="older versions of transformers have few of these models")


def _documents(lengths: list[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(3, 96, (length,), generator=generator) for length in lengths]


def _expected(model: Any, docs: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of documents alone, and weights in which every logit counts; leaves gradients."""
    alone = [model(input_ids=one[None], use_cache=False).logits[0] for one in docs]
    logits = torch.cat(alone)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    weights = weights.to(logits.dtype)
    (logits * weights).sum().backward()
    return logits.detach(), weights


def _built(kind: str, dtype: torch.dtype) -> Any:
    family = next(one for one in FAMILIES if one.kind == kind)
    return tiny_model(kind, dtype, **family.changes).train()


def _spans(rank: int, world: int, kind: str, lengths: list[int], checkpoint: bool | None, how: dict) -> dict[str, Any]:
    """`checkpoint`: none, reentrant or not; `how`: as deepspeed_cad.shard_stream takes it."""
    docs = _documents(lengths)
    reference, model = _built(kind, torch.float64), _built(kind, torch.float64)
    expected, weights = _expected(reference, docs)
    if checkpoint is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpoint})
        model.enable_input_require_grads()
    deepspeed_cad.apply(model, {"granularity": 16, "tolerance": 0.02, "links": LINKS})
    rows = torch.arange(sum(lengths))[None]
    whole = {
        "input_ids": torch.cat(docs)[None],
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "labels": rows,
    }
    part = deepspeed_cad.shard_stream(whole, rank, world, **how)
    here = deepspeed_cad.shard_stream({**whole, "input_ids": rows}, rank, world, **how)["input_ids"][0]
    logits = model(input_ids=part["input_ids"], position_ids=part["position_ids"], use_cache=False).logits[0]
    real = part["position_ids"][0] >= 0
    (logits[real] * weights[here[real]]).sum().backward()
    own = dict(reference.named_parameters())
    largest = max(float(p.grad.abs().max()) for p in own.values() if p.grad is not None)
    worst = (0.0, "")
    for name, p in sorted(model.named_parameters()):
        gradient = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(gradient)
        if own[name].grad is not None:
            worst = max(worst, (float((gradient - own[name].grad).abs().max()) / largest, name))
    return {"logits": difference(logits[real], expected[here[real]]), "gradients": worst}


@pytest.mark.parametrize("kind", KINDS)
def test_as_alone(workers: WorkerPool, kind: str) -> None:
    family = next(one for one in FAMILIES if one.kind == kind)
    for found in workers.run(_spans, 3, kind, STREAM, None, {}):
        assert found["logits"] < family.tolerance and found["gradients"][0] < family.tolerance, found
