"""Models with layers that carry state, under what shards parameters, and where documents change ranks before a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hybrids import alone, packed
from model_cases import FAMILIES, NEW, tiny_model
from pool import WorkerPool

BLOCK = {"overlap": "local_first", "granularity": 16, "tolerance": 0.02}
ROWS = [[[100, 3, 17]], [[20, 5, 20, 35, 40]]]
"""Documents of each rank: unequally many, so that layers run a different number of times on each."""

pytestmark = pytest.mark.skipif(not NEW, reason="older versions of transformers have few of these models")


def _model(kind: str) -> Any:
    family = next(one for one in FAMILIES if one.kind == kind)
    return tiny_model(kind, torch.float32, **family.changes).train()


def _expected(kind: str, world: int) -> dict[str, torch.Tensor]:
    """Gradients of all ranks' documents, each run alone, averaged over ranks as engines do."""
    model, total = _model(kind), {}
    for lengths in ROWS[:world]:
        for name, gradient in alone(model, packed(lengths), lengths)[1].items():
            total[name] = total.get(name, 0) + gradient / world
    return total


def _worst(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    return max(float((got[name] - value).abs().max()) for name, value in expected.items()) / largest


def _loss(logits: torch.Tensor, rank: int) -> torch.Tensor:
    """That of `hybrids.run`: every logit counts."""
    lengths = ROWS[rank]
    found = torch.cat([logits[row, : sum(of)] for row, of in enumerate(lengths)])
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return (found * weights.to(found.dtype)).sum()


def _fsdp2(rank: int, world: int, kind: str, late: bool) -> float:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import deepspeed_cad

    model = _model(kind)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if not late:
        deepspeed_cad.apply(model, BLOCK)
    for layer in (*model.model.layers, model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
    if late:
        deepspeed_cad.apply(model, BLOCK)
    _loss(model(**packed(ROWS[rank])).logits, rank).backward()
    got = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    return _worst(got, _expected(kind, world))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "late"), [("qwen3_5_text", False), ("lfm2", True)])
def test_fsdp2(workers: WorkerPool, kind: str, late: bool) -> None:
    """Turned on before sharding and after it, with checkpointing."""
    for worst in workers.run(_fsdp2, 2, kind, late):
        assert worst < 1e-4
