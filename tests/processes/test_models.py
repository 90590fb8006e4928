"""Every supported family against each of its documents run alone, over two processes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import training
from deepspeed_cad.integrations.model_table import REFUSED, SEEING, SUPPORTED
from deepspeed_cad.integrations.models import is_mixture, refuse_model
from model_cases import FAMILIES, NEW, Family, known_kind, tiny_config, tiny_model
from pool import WorkerPool
from transformers import PreTrainedModel

import deepspeed_cad
from deepspeed_cad.errors import CADUnsupportedError

LENGTHS = [[150, 3, 39], [20, 40, 1, 30, 37]]
"""Documents of each rank: the first has most of the attention."""


def _need(family: Family) -> None:
    """Skip a family that an older version of transformers does not have, or does not run through its interfaces."""
    if not known_kind(family.kind):
        pytest.skip(f"this version of transformers has no {family.kind}")
    if not NEW:
        try:
            refuse_model(tiny_model(family.kind, **family.changes))
        except (CADUnsupportedError, ValueError) as error:
            pytest.skip(str(error))


def _dtype(family: Family) -> torch.dtype:
    """fp64 where the model can: mixtures of experts mix dtypes in older versions of transformers."""
    return torch.float64 if NEW or not is_mixture(tiny_config(family.kind, **family.changes)) else torch.float32


def _build(family: Family, checkpoint: str | None) -> PreTrainedModel:
    model = tiny_model(family.kind, _dtype(family), **family.changes).train()
    for module in model.modules():
        if family.still and any(part in type(module).__name__ for part in family.still.split(",")):
            module.eval()
    return training.checkpointed(model, checkpoint)


def _train(rank: int, world: int, family: Family, overlap: str, checkpoint: str | None) -> dict[str, Any]:
    reference = _build(family, None)
    model = deepspeed_cad.apply(_build(family, checkpoint), training.BLOCK | {"overlap": overlap})
    docs = [doc + 3 for doc in training.documents(LENGTHS[rank], seed=rank)]
    alone = [{"input_ids": doc[None], "position_ids": torch.arange(len(doc))[None]} for doc in docs]
    given = {name: torch.cat([one[name] for one in alone], 1) for name in alone[0]}
    return training.as_alone(model, reference, given, alone, forwards=2) | training.figures()


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
    marks = pytest.mark.slow if family.kind in INTERLEAVED + ALONE else pytest.mark.long
    return pytest.param(family, "local_first", None, id=family.kind, marks=() if family.fast else marks)


def _interleaved(family: Family) -> Any:
    """Nano-batches that alternate over the decoder; the decoder's output is joined."""
    return pytest.param(family, "interleave", "plain", id=f"{family.kind}, interleaved", marks=pytest.mark.long)


TRAINED = [*map(_often, FAMILIES), *(_interleaved(family) for family in FAMILIES if family.kind in INTERLEAVED)]


@pytest.mark.parametrize(("family", "overlap", "checkpoint"), TRAINED)
def test_family(workers: WorkerPool, family: Family, overlap: str, checkpoint: str | None) -> None:
    _need(family)
    found = workers.run(_train, 2, family, overlap, checkpoint)
    training.assert_moved(found, family.tolerance if _dtype(family) is torch.float64 else 1e-4)


def test_table_is_what_is_tested() -> None:
    assert {family.kind for family in FAMILIES} == SUPPORTED
    assert not SUPPORTED & REFUSED.keys()
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    assert not [kind for kind in SUPPORTED | REFUSED.keys() | SEEING if f"`{kind}`" not in page]
