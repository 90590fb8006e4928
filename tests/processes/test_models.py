"""Every supported family against each of its documents run alone, over two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed_cad.integrations.model_table import REFUSED, SEEING, SUPPORTED
from deepspeed_cad.integrations.models import is_mixture, refuse_model
from model_cases import FAMILIES, NEW, Family, known_kind, tiny_config, tiny_model
from pool import WorkerPool
from training import LINKS
from transformers import PreTrainedModel

from deepspeed_cad.errors import CADUnsupportedError

LENGTHS = [[150, 3, 39], [20, 40, 1, 30, 37]]
"""Documents of each rank: the first has most of the attention."""
SPANNING = ([20, 190, 17, 13], 120)
"""Documents of one stream, and its rows per rank: the second document lies on both ranks."""


def _need(family: Family) -> None:
    """Skip a family that an older version of transformers does not have, or does not run through its interfaces."""
    if not known_kind(family.kind):
        pytest.skip(f"this version of transformers has no {family.kind}")
    if not NEW:
        try:
            refuse_model(tiny_model(family.kind, **family.changes))
        except (CADUnsupportedError, ValueError) as error:
            pytest.skip(str(error))


def _document(number: int, length: int) -> torch.Tensor:
    return torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(number))


def _weights(number: int, logits: torch.Tensor) -> torch.Tensor:
    """What the loss weighs a document's logits with, so that every logit has a gradient of its own."""
    generator = torch.Generator().manual_seed(1000 + number)
    return torch.randn(logits.shape[-2:], generator=generator, dtype=torch.float64).to(logits.dtype)


def _dtype(family: Family) -> torch.dtype:
    """fp64 where the model can: mixtures of experts mix dtypes in older versions of transformers."""
    return torch.float64 if NEW or not is_mixture(tiny_config(family.kind, **family.changes)) else torch.float32


def _build(family: Family, checkpoint: str | None) -> PreTrainedModel:
    model = tiny_model(family.kind, _dtype(family), **family.changes).train()
    for module in model.modules():
        if family.still and any(part in type(module).__name__ for part in family.still.split(",")):
            module.eval()
    if checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": checkpoint == "reentrant"})
    return model


def _alone(model: PreTrainedModel, numbered: list[tuple[int, int]]) -> list[torch.Tensor]:
    """Logits of each document alone, through the unmodified model; gradients are left on its parameters."""
    found = []
    for number, length in numbered:
        positions = torch.arange(length).unsqueeze(0)
        ids = _document(number, length).unsqueeze(0)
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        (logits[0] * _weights(number, logits)).sum().backward()
        found.append(logits.detach()[0])
    return found


def _difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max().clamp(min=1e-3))


def _gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def _settings(overlap: str) -> dict[str, Any]:
    return {"overlap": overlap, "granularity": 16, "tolerance": 0.02, "links": LINKS}


def _whole_documents(rank: int, world: int, family: Family, overlap: str, checkpoint: str | None) -> dict[str, Any]:
    """Documents that stay on their rank: logits and this rank's gradients against the documents alone."""
    import deepspeed_cad

    reference = _build(family, None)
    model = deepspeed_cad.apply(_build(family, checkpoint), _settings(overlap))
    numbered = [(10 * rank + place, length) for place, length in enumerate(LENGTHS[rank])]
    for _ in range(2):  # the second forward finds its plans made ahead of the layers
        model.zero_grad()
        ids = torch.cat([_document(*one) for one in numbered]).unsqueeze(0)
        positions = torch.cat([torch.arange(length) for _, length in numbered]).unsqueeze(0)
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        parts = logits[0].split(LENGTHS[rank])
        sum((part * _weights(one[0], logits)[: len(part)]).sum() for one, part in zip(numbered, parts)).backward()
    expected = _alone(reference, numbered)
    return {"logits": _difference(logits.detach()[0], torch.cat(expected)), **_compare(model, reference), **_figures()}


def _spanning_documents(rank: int, world: int, family: Family) -> dict[str, Any]:
    """A stream cut into equal rank parts: logits, and gradients summed over ranks."""
    import deepspeed_cad

    lengths, rows = SPANNING
    reference = _build(family, None)
    model = deepspeed_cad.apply(_build(family, None), _settings("local_first"))
    numbered = list(enumerate(lengths))
    here = slice(rank * rows, (rank + 1) * rows)
    ids = torch.cat([_document(*one) for one in numbered])[here].unsqueeze(0)
    positions = torch.cat([torch.arange(length) for length in lengths])[here].unsqueeze(0)
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    expected = torch.cat(_alone(reference, numbered))[here]
    weights = torch.cat([_weights(number, torch.zeros(length, 96, dtype=logits.dtype)) for number, length in numbered])
    (logits[0] * weights[here]).sum().backward()
    for gradient in (p.grad for _, p in sorted(model.named_parameters()) if p.grad is not None):
        dist.all_reduce(gradient)
    return {"logits": _difference(logits.detach()[0], expected), **_compare(model, reference), **_figures()}


def _compare(model: PreTrainedModel, reference: PreTrainedModel) -> dict[str, float]:
    got, expected = _gradients(model), _gradients(reference)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    return {"gradients": max(float((got[name] - expected[name]).abs().max()) for name in got) / largest}


def _figures() -> dict[str, Any]:
    import deepspeed_cad

    session = deepspeed_cad.current_session()
    assert session is not None and session.transport is not None
    figures = session.statistics.copy()
    return {
        "sent": session.transport.bytes_sent,
        "before": figures.imbalance_before,
        "after": figures.imbalance,
        "calls": (session.counts.forwards, session.counts.backwards, session.counts.replays),
    }


def _check(found: list[dict[str, Any]], family: Family) -> None:
    tolerance = family.tolerance if _dtype(family) is torch.float64 else 1e-4
    for one in found:
        assert one["logits"] < tolerance and one["gradients"] < tolerance, found
    assert sum(one["sent"] for one in found) > 0, "nothing was moved"
    assert found[0]["after"] < found[0]["before"], "balance did not improve"


INTERLEAVED = (
    "llama", "qwen3", "gemma2", "gemma3_text", "gpt2", "opt", "phi3", "cohere2", "mixtral", "qwen3_moe", "gpt_oss",
    "deepseek_v3", "qwen3_5_text", "lfm2", "nemotron_h", "llama4_text",
)  # fmt: skip
"""Families whose decoders differ in what such a cut must mind. All that can be checkpointed passed by hand."""
ALONE = (
    "olmo3", "gpt_neox", "longcat_flash", "gemma4_text", "smollm3", "granitemoehybrid", "jamba", "kimi_linear", "zamba",
    "falcon_h1",
)  # fmt: skip
"""Further families whose attention, or what lies beside it, is like no other's."""


def _often(family: Family) -> Any:
    """With the fast tests, with all, or with the long ones."""
    marks = [pytest.mark.slow] if family.kind in INTERLEAVED + ALONE else [pytest.mark.slow, pytest.mark.long]
    return pytest.param(family, id=family.kind, marks=() if family.fast else marks)


@pytest.mark.parametrize("family", map(_often, FAMILIES))
def test_family(workers: WorkerPool, family: Family) -> None:
    _need(family)
    _check(workers.run(_whole_documents, 2, family, "local_first", None), family)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("family", [f for f in FAMILIES if f.kind in INTERLEAVED], ids=lambda family: family.kind)
def test_family_interleaved(workers: WorkerPool, family: Family) -> None:
    """Nano-batches that alternate over the decoder; the decoder's output is joined."""
    _need(family)
    _check(workers.run(_whole_documents, 2, family, "interleave", "plain"), family)


LLAMA_4 = next(family for family in FAMILIES if family.kind == "llama4_text")
"""One layer in chunks of 32 tokens, and one with all keys whose temperature changes every 16."""


def test_chunks_of_a_document_on_two_ranks(workers: WorkerPool) -> None:
    """Its positions go beyond a rank's rows. gpt_oss and deepseek_v3 are streams of test_loops.py."""
    _need(LLAMA_4)
    _check(workers.run(_spanning_documents, 2, LLAMA_4), LLAMA_4)


def _verified(rank: int, world: int) -> str:
    import deepspeed_cad

    with pytest.raises(CADUnsupportedError) as error:
        deepspeed_cad.apply(_build(LLAMA_4, None), {**_settings("local_first"), "verify": 1})
    return str(error.value)


def test_what_cannot_be_had_beside_chunks(workers: WorkerPool) -> None:
    _need(LLAMA_4)
    words = 'layers of this model attend in chunks, beside which "verify" cannot be had'
    assert workers.run(_verified, 2) == [words] * 2


def test_table_is_what_is_tested() -> None:
    assert {family.kind for family in FAMILIES} == SUPPORTED
    assert not SUPPORTED & REFUSED.keys()
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    assert not [kind for kind in SUPPORTED | REFUSED.keys() | SEEING if f"`{kind}`" not in page]
