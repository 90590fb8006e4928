"""Models that see: packed documents with and without images and videos, against each document alone."""

from __future__ import annotations

from typing import Any

import pytest
import training
from deepspeed_cad.integrations.model_table import SEEING
from model_cases import NEW, known_kind
from pool import WorkerPool
from vision_cases import MODELS, Document, Seeing, alone, make_document, pack, tiny_seeing

import deepspeed_cad
from deepspeed_cad.errors import CADError

DOCUMENTS = [[(150, 2, 1), (3, 0, 0), (39, 1, 0)], [(20, 0, 0), (40, 0, 0), (1, 0, 0), (60, 0, 0)]]
"""Of each rank: tokens of text, images, videos. The second rank sees nothing."""
SETTINGS = {"granularity": 16, "tolerance": 0.02, "links": training.LINKS}


def _train(rank: int, world: int, case: Seeing, form: str, overlap: str, checkpoint: bool) -> dict[str, Any]:
    reference, model = tiny_seeing(case), tiny_seeing(case)
    if checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    deepspeed_cad.apply(model, {**SETTINGS, "overlap": overlap})
    of_rank: list[Document] = []
    for place, (length, images, videos) in enumerate(DOCUMENTS[rank % 2]):
        of_rank.append(make_document(case, reference, 10 * rank + place, length, images, videos))
    found = training.as_alone(model, reference, pack(case, of_rank, form), list(map(alone, of_rank)), forwards=2)
    seen = [p for name, p in reference.named_parameters() if "vis" in name and p.grad is not None]
    assert bool(seen) == (rank % 2 == 0), "the first rank sees, and the second does not"
    towers = (module for name, module in model.named_modules() if "visual" in name or "vision" in name)
    assert all(getattr(one.config, "_attn_implementation", "") != "cad" for one in towers if hasattr(one, "config"))
    return found | training.figures()


def _often(case: Seeing) -> Any:
    return pytest.param(case, id=case.kind, marks=() if case.fast else pytest.mark.slow)


def _need(case: Seeing) -> None:
    if not known_kind(case.kind) or not NEW:
        pytest.skip("this version of transformers has another interface to models that see")


@pytest.mark.parametrize("case", [_often(case) for case in MODELS])
def test_images_in_some_documents(workers: WorkerPool, case: Seeing) -> None:
    """As ms-swift packs: positions of text, before those of the other axes where there are any."""
    _need(case)
    training.assert_moved(workers.run(_train, 2, case, "text", "local_first", False), case.tolerance)


OF_AXES = next(case for case in MODELS if case.kind == "qwen2_5_vl")
DEEPSTACK = next(case for case in MODELS if case.kind == "qwen3_vl")


@pytest.mark.parametrize(
    ("case", "form", "overlap", "checkpoint"),
    [
        (OF_AXES, "numbers", "local_first", True), (OF_AXES, "lengths", "local_first", False),
        (OF_AXES, "text", "interleave", True), (DEEPSTACK, "text", "interleave", False),
    ],
    ids=["numbers", "lengths", "interleave", "deepstack"],
)  # fmt: skip
def test_other_ways(workers: WorkerPool, case: Seeing, form: str, overlap: str, checkpoint: bool) -> None:
    """As LLaMA-Factory packs (a mask that numbers documents), by cumulative lengths, and nano-batches."""
    _need(case)
    training.assert_moved(workers.run(_train, 2, case, form, overlap, checkpoint), case.tolerance)


def _no_text_axis(rank: int, world: int) -> str:
    model = tiny_seeing(OF_AXES)
    deepspeed_cad.apply(model, SETTINGS)
    documents = [make_document(OF_AXES, model, place, 30, 1 - rank, 0) for place in range(2)]
    with pytest.raises(CADError) as error:
        model(**pack(OF_AXES, documents, "none"), use_cache=False)
    return str(error.value)


def test_positions_without_a_text_axis_are_one_error_everywhere(workers: WorkerPool) -> None:
    _need(OF_AXES)
    for said in workers.run(_no_text_axis, 2):
        assert "three axes (time, height, width) start again" in said and "first of four axes" in said


def test_table_is_what_is_tested() -> None:
    assert {case.kind for case in MODELS} == SEEING
