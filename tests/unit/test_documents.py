"""The one reader of documents: every way to say where they are, alone and beside the others, against what is meant."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from deepspeed_cad.integrations.positions import compare_later
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DataCollatorWithFlattening

from deepspeed_cad.ahead import documents
from deepspeed_cad.ahead.announced import StepMessage
from deepspeed_cad.ahead.documents import Announcement, read_documents
from deepspeed_cad.errors import CADDataError, CADUnsupportedError
from deepspeed_cad.layout import segments_from_positions
from deepspeed_cad.pipeline.data import read_micro_batch

WIDTH = 8
POSITIONS = ("start again", "go on", "absent", "three axes", "three that start again", "four axes")
LENGTHS = {"absent": [], "q": ["cu_seq_lens_q"], "q and k": ["cu_seq_lens_q", "cu_seq_lens_k"], "cu": ["cu_seqlens"]}
MASKS = ("absent", "ones", "zeros", "numbers", "block-diagonal", "block-diagonal bool")


def visible(numbers: np.ndarray) -> np.ndarray:
    """[batch, WIDTH, WIDTH] which key each query sees, by numbers of documents; 0 is padding."""
    return (numbers[:, :, None] == numbers[:, None, :]) & (numbers[:, :, None] > 0) & np.tri(WIDTH, dtype=bool)


def batch(truth: np.ndarray, positions: str, cumulative: str, mask: str) -> dict[str, Any]:
    """What the model is given."""
    given: dict[str, Any] = {"input_ids": torch.zeros(truth.shape, dtype=torch.long)}
    begins = np.diff(truth, axis=1, prepend=0) != 0
    row, column = np.indices(truth.shape)
    again = torch.from_numpy((column - np.maximum.accumulate(begins * column, axis=1)) * (truth > 0))
    on = torch.from_numpy(column)
    axes = {
        "start again": again, "go on": on, "four axes": torch.stack([again, on, on, on]),
        "three axes": on.expand(3, -1, -1), "three that start again": again.expand(3, -1, -1),
    }  # fmt: skip
    if positions != "absent":
        given["position_ids"] = axes[positions]
    counts = np.unique_counts((100 * row + truth)[truth > 0]).counts
    given |= {name: torch.from_numpy(np.r_[0, np.cumsum(counts)]).int() for name in LENGTHS[cumulative]}
    shown = torch.from_numpy(visible(truth))[:, None]
    masks = {
        "ones": torch.ones(truth.shape), "zeros": torch.from_numpy(truth > 0).long(),
        "numbers": torch.from_numpy(truth), "block-diagonal bool": shown,
        "block-diagonal": torch.zeros(shown.shape).masked_fill(~shown, torch.finfo(torch.float32).min),
    }  # fmt: skip
    return given | ({} if mask == "absent" else {"attention_mask": masks[mask]})


def seen_by(local: Any) -> np.ndarray:
    """[batch, WIDTH, WIDTH] who sees whom by segments."""
    numbers = np.zeros(local.tokens, np.int64)
    for number, (begin, end, offset) in enumerate(local.to_array()):
        assert begin == 0 and (numbers[offset : offset + end] == 0).all()
        numbers[offset : offset + end] = number + 1
    return visible(numbers.reshape(-1, WIDTH))


@st.composite
def documents_of_rows(draw: st.DrawFn, cumulative: str, mask: str) -> np.ndarray:
    """[batch, WIDTH] the documents, numbered from 1 in each batch row; padding only where all that is told tells it."""
    rows = draw(st.integers(1, 3))
    truth, left = np.zeros((rows, WIDTH), np.int64), cumulative == "absent" and draw(st.booleans())
    for row in range(rows):
        parts = np.diff([0, *sorted(draw(st.sets(st.integers(1, WIDTH - 1), max_size=3))), WIDTH]).tolist()
        # Lengths tell of padding behind the last document only, a mask of ones of none.
        may = mask not in ("absent", "ones") if cumulative == "absent" else row == rows - 1
        if may and draw(st.booleans()):
            parts = parts[:-1] or [WIDTH]
        tokens = np.repeat(np.arange(1, len(parts) + 1), parts)
        truth[row, WIDTH - len(tokens) if left and may else 0 :][: len(tokens)] = tokens
    return truth


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("cumulative", LENGTHS)
@settings(max_examples=15)
@given(st.data())
def test_every_combination_means_what_it_says(cumulative: str, mask: str, data: st.DataObject) -> None:
    truth, positions = data.draw(documents_of_rows(cumulative, mask)), data.draw(st.sampled_from(POSITIONS))
    given = batch(truth, positions, cumulative, mask)
    elsewhere = cumulative != "absent" or mask in ("numbers", "block-diagonal", "block-diagonal bool")
    if positions == "three that start again" and not elsewhere and truth.max() > 1:
        with pytest.raises(CADDataError, match="three axes"):
            read_documents(given)
        return
    told = elsewhere or positions in ("start again", "four axes")
    assert (seen_by(read_documents(given).local) == visible(truth if told else np.minimum(truth, 1))).all()


ON, LENGTHS_16 = torch.arange(16)[None], torch.tensor([0, 7, 10, 16], dtype=torch.int32)
NUMBERS = torch.tensor([[1] * 7 + [2] * 3 + [3] * 6])
BLOCKS = torch.from_numpy(np.tri(16, dtype=bool))[None, None] & (NUMBERS[:, None, None] == NUMBERS[:, None, :, None])


def read(tokens: int = 16, rows: int = 1, **arguments: Any) -> list[list[int]]:
    """Begin, end and offset of each segment."""
    ids = torch.zeros(rows, tokens, dtype=torch.long)
    return read_documents({"input_ids": ids, **arguments}).local.to_array().tolist()


@pytest.mark.parametrize("told", [{"cu_seq_lens_q": torch.tensor([0, 3, 5])}, {"attention_mask": [[1, 1, 1, 2, 2]]}])
def test_documents_that_span_ranks(told: dict[str, Any]) -> None:
    """Positions say where in its document the first row lies, and other sources where the next one begins."""
    told = {name: torch.as_tensor(value) for name, value in told.items()}
    for positions in ([4, 5, 6, 0, 1], [4, 5, 6, 7, 8]):
        assert read(5, **told, position_ids=torch.tensor([positions])) == [[4, 7, 0], [0, 2, 3]]
    # Pieces of one document, dealt out.
    assert read(5, **told, position_ids=torch.tensor([[4, 8, 9, 0, 1]])) == [[4, 5, 0], [8, 10, 1], [0, 2, 3]]


def test_a_batch_without_tokens_is_one_of_padding() -> None:
    for shape in (0, 8), (2, 0):
        found = read_documents({"input_ids": torch.zeros(shape)}).local
        assert (found.tokens, len(found.begin)) == (1, 0)


def test_what_is_announced_arrives() -> None:
    rows, row = (replace(read_documents({"input_ids": torch.zeros(n, 6)}), loaded=9 + n, ids=77 * n) for n in (2, 1))
    told = StepMessage.from_array(StepMessage([rows, row], 5, np.array([3, 4])).to_array())
    assert (told.fields, told.padding.tolist()) == (5, [3, 4])
    said = [(one.local.tokens, one.unit, one.loaded, one.ids) for one in told.micro_batches]
    assert said == [(12, 6, 11, 154), (6, 1, 10, 77)]
    assert [one.local.to_array().tolist() for one in told.micro_batches] == [[[0, 6, 0], [0, 6, 6]], [[0, 6, 0]]]


def _shown(query: int, key: int) -> torch.Tensor:
    mask = BLOCKS.clone()
    mask[0, 0, query, key] ^= True
    return mask


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "lengths and positions": (
        {"cu_seq_lens_q": LENGTHS_16, "position_ids": torch.tensor([[*range(9), *range(7)]])},
        "cu_seq_lens_q and position_ids disagree: token 7 of batch row 0 is the first token of a document by "
        "cu_seq_lens_q, and a token of the same document as the one before by position_ids",
    ),
    "lengths and numbers": (
        {"cu_seq_lens_q": torch.tensor([0, 8, 16]), "attention_mask": NUMBERS},
        "cu_seq_lens_q and attention_mask disagree: token 7 of batch row 0",
    ),
    "lengths and zeros": (
        {"cu_seq_lens_q": LENGTHS_16, "attention_mask": (ON > 1).long()},
        "disagree: token 0 of batch row 0 is a token by cu_seq_lens_q, and padding by attention_mask",
    ),
    "lengths and batch rows": (
        {"rows": 2, "tokens": 8, "cu_seq_lens_q": LENGTHS_16},
        r"cu_seq_lens_q and the shape of the micro-batch, \[2, 8\], disagree: a document goes on from batch row 0 to 1",
    ),
    "mask and positions": (
        {"attention_mask": BLOCKS, "position_ids": torch.tensor([[*range(10), *range(6)]])},
        "attention_mask and position_ids disagree: token 7 of batch row 0",
    ),
    "lengths beyond the row": ({"cu_seqlens": torch.tensor([0, 17])}, r"cu_seqlens \[0, 17\] must start at 0"),
    "holes": ({"attention_mask": (ON % 6 != 5).long()}, "hides tokens before token 6 of batch row 0.*at position 6"),
    "a number twice": ({"attention_mask": NUMBERS % 2 + 1}, r"attention_mask\[0, 10\] goes back to document 2"),
    "a negative number": ({"attention_mask": NUMBERS - 2}, r"attention_mask\[0, 0\] is -1: expected 0 for padding"),
    "zeros and numbers": (
        {"seq_idx": NUMBERS, "attention_mask": (ON > 1).long()}, "seq_idx and attention_mask disagree: token 0",
    ),
    "a fraction in bf16": ({"attention_mask": (NUMBERS / 2).bfloat16()}, r"attention_mask\[0, 0\] is 0.5"),
    "a fraction": ({"attention_mask": NUMBERS / 2}, r"attention_mask\[0, 0\] is 0.5"),
    "a mask of another size": ({"attention_mask": torch.ones(1, 17)}, r"shape \(1, 17\), but .* a prefix"),
    "positions of another size": ({"position_ids": ON[:, 1:]}, r"position_ids has shape \(1, 15\)"),
    "positions below 0": ({"position_ids": ON - 1}, "positions start at 0"),
    "axes that begin above 0": (
        {"position_ids": torch.stack([ON, ON, ON + 1])}, r"are \[0, 0, 1\] at token 0 .* a first of four axes",
    ),
    "two axes": ({"position_ids": torch.stack([ON, ON])}, r"has shape \(2, 1, 16\), but .* time, height and width"),
    "three axes that start again": ({"position_ids": torch.stack([ON % 8] * 3)}, "three axes.*first of four axes"),
    "later tokens": (
        {"attention_mask": _shown(2, 4)},
        r"ready-made.*\[0, 0, 2, 4\] is True, but documents would hide that key. Pass position_ids.*cu_seq_lens_q",
    ),
    "a hidden token": ({"attention_mask": _shown(5, 1)}, r"\[0, 0, 5, 1\] is False"),
    "a window": ({"attention_mask": BLOCKS & ~BLOCKS.tril(-3)}, r"\[0, 0, 3, 0\] is False"),
    "heads that differ": ({"attention_mask": torch.cat([BLOCKS, _shown(5, 1)], 1)}, r"\[0, 1, 5, 1\] is False"),
    "biases": ({"attention_mask": torch.zeros(1, 1, 16, 16).masked_fill(~BLOCKS, -3.0)}, r"\[0, 0, 0, 1\] is -3.0"),
    "whole numbers": ({"attention_mask": BLOCKS.long()}, "type is torch.int64"),
    "keys of a prefix": ({"attention_mask": torch.ones(1, 1, 16, 20)}, r"the micro-batch is \[1, 16\]"),
    "two masks for three rows": ({"rows": 3, "attention_mask": torch.cat([BLOCKS] * 2)}, r"micro-batch is \[3, 16\]"),
    "three axes of a mask": ({"attention_mask": BLOCKS[0]}, "two and of four axes"),
    "a mask for each kind of layer": ({"attention_mask": {"full_attention": BLOCKS}}, "a dict"),
}  # fmt: skip
SEEN = torch.stack([(ON % 8).clamp(max=3), ON % 8, ON % 8])
"""Positions of two documents of 8 tokens whose last four are a row of an image."""


@pytest.mark.parametrize("told, lengths", [
    ({"position_ids": torch.cat([(ON % 8)[None], SEEN])}, [8, 8]),
    ({"position_ids": SEEN, "cu_seq_lens_q": torch.tensor([0, 8, 16])}, [8, 8]),
    ({"position_ids": SEEN, "attention_mask": 1 + (ON >= 8).long()}, [8, 8]),
    ({"position_ids": SEEN[:, :, :8].expand(3, 1, 8), "tokens": 8}, [8]),
    ({"position_ids": SEEN[:, :, :8].expand(3, 2, 8), "tokens": 8, "rows": 2}, [8, 8]),
    ({"position_ids": torch.nn.functional.pad(SEEN[:, :, :8], (8, 0)), "attention_mask": (ON >= 8).long()}, [8]),
], ids=["text axis", "lengths", "numbers", "one document", "rows", "padded on the left"])  # fmt: skip
def test_documents_with_images(told: dict[str, Any], lengths: list[int]) -> None:
    assert [(begin, end) for begin, end, _ in read(**told)] == [(0, length) for length in lengths]


@pytest.mark.parametrize("name", list(REFUSED))
def test_refusals_say_what_and_where(name: str) -> None:
    """Both sources and the first token at which they differ, or the place in a mask, and what to pass instead."""
    arguments, words = REFUSED[name]
    with pytest.raises((CADDataError, CADUnsupportedError), match=words):
        read(**arguments)


@pytest.mark.parametrize("position_ids", [True, False])
def test_what_collators_of_transformers_make(position_ids: bool) -> None:
    """With lengths for flash attention, and with or without position ids: the same for models and for pipelines."""
    collator = DataCollatorWithFlattening(return_position_ids=position_ids, return_flash_attn_kwargs=True)
    made = collator([{"input_ids": list(range(length))} for length in (7, 3, 6)])
    assert ("position_ids" in made) == position_ids
    for local in (read_documents(made).local, read_micro_batch(made, has_loss=True).documents.local):
        assert local.to_array().tolist() == [[0, 7, 0], [0, 3, 7], [0, 6, 10]]


@pytest.mark.parametrize("told", [
    {"attention_mask": (ON < 12).long()},
    {"attention_mask": NUMBERS - 1},
    {"attention_mask": BLOCKS & (ON < 12)[:, None, :, None]},
    {"cu_seq_lens_q": LENGTHS_16[:3]},
], ids=["zeros", "numbers", "four axes", "lengths"])  # fmt: skip
def test_pipelines_take_no_padding(told: dict[str, Any]) -> None:
    ids = torch.zeros(1, 16, dtype=torch.long)
    with pytest.raises(CADUnsupportedError, match="tokens of a micro-batch are padding"):
        read_micro_batch({"input_ids": ids, "labels": ids, **told}, has_loss=True)
    numbered = read_micro_batch({"input_ids": ids, "labels": ids, "attention_mask": NUMBERS}, has_loss=True)
    assert numbered.documents.local.to_array().tolist() == [[0, 7, 0], [0, 3, 7], [0, 6, 10]]


def test_large_masks_are_looked_at_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_PAIRS", 48)
    assert read(attention_mask=BLOCKS) == [[0, 7, 0], [0, 3, 7], [0, 6, 10]]
    with pytest.raises(CADUnsupportedError, match=r"\[0, 0, 12, 1\]"):
        read(attention_mask=_shown(12, 1))


ON_GPU: Any = type("OnGPU", (torch.Tensor,), {"device": SimpleNamespace(type="cuda")})
ROWS = torch.tensor([[0, 1, 2, 0], [0, 1, 0, 1]])


@pytest.mark.parametrize("on_gpu, changed, differs", [
    (ROWS, {}, False), (ROWS.flip(0), {}, True), (torch.stack([ROWS, *[ROWS + 1] * 3]), {}, False),
    (ROWS.expand(3, -1, -1), {}, None), (ROWS.reshape(1, 8), {}, None), (ROWS, {"cu_seqlens": ROWS}, None),
    (ROWS, {"attention_mask": ROWS}, None), (ROWS, {"position_ids": ROWS}, None), (ROWS, {"position_ids": None}, None),
    (ROWS.repeat(2, 1), {"input_ids": ROWS.repeat(2, 1)}, None),
])  # fmt: skip
def test_positions_on_a_gpu_are_compared_later(
    on_gpu: torch.Tensor, changed: dict[str, Any], differs: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what was announced, where they can be the same, and nothing waits for the GPU; None: they are read now."""
    event, empty, copy = MagicMock(), torch.empty, torch.Tensor.copy_
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, pin_memory: empty(shape, dtype=dtype) if pin_memory else 0)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device, non_blocking: non_blocking and self)
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, x, non_blocking: copy(self, x, non_blocking or None))
    given = {"input_ids": ROWS, "position_ids": on_gpu.as_subclass(ON_GPU), **changed}
    found = compare_later(given, Announcement(segments_from_positions(ROWS.numpy())))
    assert (None if found is None else bool(found.differs)) is differs
    assert event.record.called == (found is not None) and (found is None or found.event is event)
