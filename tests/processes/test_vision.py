"""Models that see: packed documents with and without images and videos, against each document alone."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import training
from deepspeed_cad.integrations.model_table import SEEING
from model_cases import DELTA as PLAIN_DELTA
from model_cases import FP32, NEW, known_kind, randomized
from pool import WorkerPool
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

import deepspeed_cad

IMAGE, VIDEO = 5, 6
"""Ids of the tokens that stand for a part of an image, or of a video."""

TEXT: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "attention_dropout": 0.0,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
EYE: dict[str, Any] = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32,
    "num_position_embeddings": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
"""A vision tower of the Qwen family."""
CLIP: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4, "projection_dim": 16, "attention_dropout": 0.0,
}  # fmt: skip
AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
NARROW = {"head_dim": 8, "rope_parameters": {**AXES, "mrope_section": [2, 1, 1]}}
DELTA = {**PLAIN_DELTA, "rope_parameters": {**AXES, "partial_rotary_factor": 1.0, "mrope_interleaved": True}}
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
INTERLEAVED = {"rope_parameters": {**AXES, "mrope_interleaved": True}}


@dataclass(frozen=True)
class Seeing:
    """A model type with images, and what its config needs."""

    kind: str
    text: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    axes: bool = False
    """Its positions have several axes, and it takes videos."""
    tolerance: float = 1e-10
    """As in model_cases."""
    fast: bool = False
    pixels: tuple[int, ...] = ()
    """Shape of an image's pixels, of models without axes."""
    sizes: bool = False
    """Sizes of images go along."""


MODELS: tuple[Seeing, ...] = (
    Seeing("qwen2_5_vl", NARROW, {**EYE, "fullatt_block_indexes": [1], "window_size": 16}, axes=True, fast=True),
    Seeing("qwen2_vl", NARROW, {
        "depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 1, "patch_size": 4,
    }, axes=True),
    Seeing("qwen3_vl", INTERLEAVED, {**EYE, "deepstack_visual_indexes": [0]}, axes=True, fast=True),
    Seeing("qwen3_vl_moe", {**INTERLEAVED, **EXPERTS}, {**EYE, "deepstack_visual_indexes": [0]}, axes=True),
    Seeing("qwen3_5", DELTA, {**EYE, "deepstack_visual_indexes": []}, axes=True, tolerance=FP32),
    Seeing("qwen3_5_moe", {**DELTA, **EXPERTS}, {**EYE, "deepstack_visual_indexes": []}, axes=True, tolerance=FP32),
    Seeing("internvl", {"model_type": "qwen2"}, {
        **CLIP, "image_size": [16, 16], "patch_size": [4, 4], "hidden_dropout_prob": 0.0, "projection_dropout": 0.0,
        "use_mask_token": False,
    }, pixels=(3, 16, 16), fast=True),
    Seeing("llava", {"model_type": "llama"}, {**CLIP, "model_type": "clip_vision_model"}, pixels=(3, 8, 8)),
    Seeing("llava_next", {"model_type": "mistral", "sliding_window": 12}, {**CLIP, "model_type": "clip_vision_model"},
           {"image_grid_pinpoints": [[8, 8]]}, pixels=(2, 3, 8, 8), sizes=True),
    Seeing("mistral3", {"model_type": "mistral", "sliding_window": None}, {
        **CLIP, "model_type": "pixtral", "image_size": 16, "head_dim": 8, "num_hidden_layers": 1,
    }, pixels=(3, 16, 8), sizes=True),
)  # fmt: skip


def tiny_seeing(model: Seeing) -> PreTrainedModel:
    """With random weights, the same in every process."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model.kind, text_config={**TEXT, **model.text}, vision_config=model.vision, image_token_id=IMAGE,
        **({"video_token_id": VIDEO, "vision_start_token_id": 7} if model.axes else {}), **model.changes,
    )  # fmt: skip
    made: PreTrainedModel = AutoModelForImageTextToText.from_config(config)
    made.set_attn_implementation("sdpa")
    return randomized(made).to(torch.float64).train()


@dataclass(frozen=True)
class Document:
    """What a processor gives of one document: [1, tokens], and pixels."""

    ids: torch.Tensor
    seen: dict[str, torch.Tensor]
    positions: torch.Tensor
    """[1, tokens], or [3, 1, tokens] with axes."""


def make_document(model: Seeing, built: Any, number: int, length: int, images: int, videos: int) -> Document:
    """`length` tokens of text with images in them, each behind some text, and videos where positions have axes."""
    generator = torch.Generator().manual_seed(number)
    seen: dict[str, torch.Tensor] = {}
    parts = []
    if model.axes:
        for name, count, token, grid in (("image", images, IMAGE, (1, 4, 8)), ("video", videos, VIDEO, (2, 4, 4))):
            if count:
                rows, ending = grid[0] * grid[1] * grid[2], "" if name == "image" else "_videos"
                seen[f"pixel_values{ending}"] = torch.randn(count * rows, 3 * 2 * 4 * 4, generator=generator).double()
                seen[f"{name}_grid_thw"] = torch.tensor([grid] * count)
                # A model may want every frame of a video on its own, behind a token of its time.
                frames = grid[0] if name == "video" and model.kind.startswith("qwen3") else 1
                parts += [[token] * (rows // 4 // frames)] * frames * count
    elif images:
        seen["pixel_values"] = torch.randn(images, *model.pixels, generator=generator, dtype=torch.float64)
        if model.sizes:
            seen["image_sizes"] = torch.tensor([model.pixels[-2:]] * images)
        dtype = next(built.parameters()).dtype
        with torch.no_grad():
            given = {name: value.to(dtype) if value.is_floating_point() else value for name, value in seen.items()}
            found = built.get_image_features(**given).pooler_output
        parts = [[IMAGE] * (found[0].reshape(-1, found[0].shape[-1]).shape[0])] * images
    text, step = torch.randint(10, 96, (length,), generator=generator).tolist(), max(1, length // (len(parts) + 1))
    ids = text[:step]
    for index, part in enumerate(parts):
        ids += part + text[(index + 1) * step : (index + 2) * step if index + 1 < len(parts) else length]
    tokens, positions = torch.tensor([ids]), torch.arange(len(ids))[None]
    if model.axes:
        positions = positions.expand(3, 1, -1)
        if seen:
            grids = {name: value for name, value in seen.items() if "grid" in name}
            positions, _ = built.model.get_rope_index(tokens, mm_token_type_ids=_types(tokens), **grids)
    return Document(tokens, seen, positions)


def _types(ids: torch.Tensor) -> torch.Tensor:
    return ((ids == IMAGE).int() + 2 * (ids == VIDEO).int()).int()


def alone(document: Document) -> dict[str, torch.Tensor]:
    """What the model is given of a document alone; it numbers its tokens itself."""
    return {"input_ids": document.ids, "mm_token_type_ids": _types(document.ids), **document.seen}


def pack(model: Seeing, documents: Sequence[Document], form: str) -> dict[str, torch.Tensor]:
    """One packed row. `form`, how it says its documents: "text" by positions of text, which with axes stand before them
    (as ms-swift packs); "numbers" by a mask that numbers them (LLaMA-Factory's neat_packing); "lengths" by
    cu_seq_lens_q."""
    lengths = [document.ids.shape[1] for document in documents]
    positions = torch.cat([document.positions for document in documents], -1)
    given = {"input_ids": torch.cat([document.ids for document in documents], 1), "position_ids": positions}
    if form == "text" and model.axes:
        text = torch.cat([torch.arange(length) for length in lengths])
        given["position_ids"] = torch.cat([text[None, None], positions])
    if form == "numbers":
        given["attention_mask"] = torch.cat([torch.full((n,), i + 1) for i, n in enumerate(lengths)])[None]
    if form == "lengths":
        given["cu_seq_lens_q"] = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    for name in dict.fromkeys(name for document in documents for name in document.seen):
        given[name] = torch.cat([document.seen[name] for document in documents if name in document.seen])
    return given


DOCUMENTS = [[(150, 2, 1), (3, 0, 0), (39, 1, 0)], [(20, 0, 0), (40, 0, 0), (1, 0, 0), (60, 0, 0)]]
"""Of each rank: tokens of text, images, videos. The second rank sees nothing."""


def _train(rank: int, world: int, case: Seeing, form: str, overlap: str, checkpoint: bool) -> dict[str, Any]:
    reference, model = tiny_seeing(case), training.checkpointed(tiny_seeing(case), checkpoint)
    deepspeed_cad.apply(model, training.BLOCK | {"overlap": overlap})
    drawn = enumerate(DOCUMENTS[rank % 2], 10 * rank)
    of_rank = [make_document(case, reference, number, *what) for number, what in drawn]
    found = training.as_alone(model, reference, pack(case, of_rank, form), list(map(alone, of_rank)), forwards=2)
    seen = [p for name, p in reference.named_parameters() if "vis" in name and p.grad is not None]
    assert bool(seen) == (rank % 2 == 0), "the first rank sees, and the second does not"
    towers = (module for name, module in model.named_modules() if "visual" in name or "vision" in name)
    assert all(getattr(one.config, "_attn_implementation", "") != "cad" for one in towers if hasattr(one, "config"))
    return found | training.figures()


def _packed(case: Seeing) -> Any:
    """As ms-swift packs: positions of text, before those of the other axes where there are any."""
    return pytest.param(case, "text", "local_first", False, id=case.kind, marks=() if case.fast else pytest.mark.slow)


OF_AXES = next(case for case in MODELS if case.kind == "qwen2_5_vl")
DEEPSTACK = next(case for case in MODELS if case.kind == "qwen3_vl")


@pytest.mark.parametrize("case, form, overlap, checkpoint", [
    *map(_packed, MODELS),
    # As LLaMA-Factory packs (a mask that numbers documents), by cumulative lengths, and nano-batches.
    pytest.param(OF_AXES, "numbers", "local_first", True, id="numbers"),
    pytest.param(OF_AXES, "lengths", "local_first", False, id="lengths"),
    pytest.param(OF_AXES, "text", "interleave", True, id="interleave"),
    pytest.param(DEEPSTACK, "text", "interleave", False, id="deepstack"),
])  # fmt: skip
def test_images_in_some_documents(workers: WorkerPool, case: Seeing, form: str, overlap: str, checkpoint: bool) -> None:
    if not known_kind(case.kind) or not NEW:
        pytest.skip("this version of transformers has another interface to models that see")
    training.assert_moved(workers.run(_train, 2, case, form, overlap, checkpoint), case.tolerance)


def test_table_is_what_is_tested() -> None:
    assert {case.kind for case in MODELS} == SEEING
