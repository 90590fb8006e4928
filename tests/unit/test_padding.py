"""Padding: attention gives it zeros; labels that count what comes out there are refused."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import training
from deepspeed_cad.integrations.padding import counts
from model_cases import tiny_model
from told import PADDED, loss_and_gradients, padded, told

import deepspeed_cad
from deepspeed_cad.ahead.documents import Announcement
from deepspeed_cad.ahead.move_documents import find_padding
from deepspeed_cad.errors import CADDataError
from deepspeed_cad.layout import segments_from_positions

MISTRAL = partial(tiny_model, "mistral", sliding_window=5)


@pytest.mark.parametrize("lengths", [[24, 9, 1], [13], [20, 24]])
@pytest.mark.parametrize("make, attention, side", [
    (training.tiny_llama, "sdpa", "right"), (training.tiny_llama, "sdpa", "left"),
    (training.tiny_llama, "eager", "right"), (MISTRAL, "sdpa", "right"), (MISTRAL, "sdpa", "left"),
])  # fmt: skip
def test_as_without_cad(make: Any, attention: str, side: str, lengths: list[int]) -> None:
    batch = padded(lengths, side, "masked")
    # transformers' eager attention computes its softmax in fp32, also of masks that hold the lowest fp64.
    dtype = torch.float32 if attention == "eager" else torch.float64
    expected = loss_and_gradients(make(dtype, attn_implementation=attention), batch)
    model = deepspeed_cad.apply(make(dtype, attn_implementation=attention), {})
    within = 1e-5 if attention == "eager" else 1e-9
    torch.testing.assert_close(loss_and_gradients(model, batch), expected, rtol=0, atol=within)


def test_padding_behind_documents_is_left_behind_where_they_travel() -> None:
    """What is behind the documents of a row, of which one token stays if it has none; in packed rows all of it."""
    positions = np.array([[0, 1, 2, 3, -1, -1], [-1, 0, 1, 2, -1, -1], [-1] * 6])
    mine = Announcement(segments_from_positions(positions.clip(0), positions >= 0))
    assert find_padding(mine, 6).tolist() == [4, 5, 10, 11, 13, 14, 15, 16, 17]
    assert find_padding(mine, 0).tolist() == [4, 5, 6, 10, 11, *range(12, 18)]


def _shifted(batch: dict[str, torch.Tensor], *counted: int) -> dict[str, torch.Tensor]:
    labels = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    labels[1, list(counted)] = 5
    return {**batch, "shift_labels": labels}


def test_labels_that_do_not_count_padding(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is said of them; nor of FlashAttention, which gives padding zeros as well."""
    model = deepspeed_cad.apply(training.tiny_llama(attn_implementation="sdpa"), {}).train()
    right = padded([24, 9], "right", "masked")
    for batch in (right, _shifted(right), padded([24, 9], "left", "masked")):
        model(**batch, use_cache=False)
    deepspeed_cad.current_session().bindings[model].original = "flash_attention_2"
    model(**padded([24, 9], "right", "copied"), use_cache=False)
    assert "padding" not in capsys.readouterr().err
    of_token, padding = torch.tensor([[-100, -100, 5]]), np.array([[False, True, False]])
    assert [counts(padding, {name: of_token}) for name in ("shift_labels", "labels")] == [False, True], "behind it"


@pytest.mark.parametrize("case", ["labels", "shift_labels", "eager", "additive"])
def test_labels_that_count_padding(case: str) -> None:
    batch, row, n = padded([24, 9], "right", "copied"), 33, 15
    if case == "shift_labels":
        batch = _shifted(padded([24, 9], "right", "masked"), 20)
    elif case == "eager":
        # It gives a row that sees no token the mean of all values, and the last of them predicts the first token.
        batch, row = padded([24, 9], "left", "masked"), 24
    elif case == "additive":
        batch, row, n = told(training.documents([7, 30, 1, 6], seed=1), "additive, padded"), 44, PADDED
        batch["labels"][0, -1] = 3
    model = training.tiny_llama(torch.float32, attn_implementation="eager" if case == "eager" else "sdpa")
    with pytest.raises(CADDataError, match=f"rank 0: {n} tokens from row {row} on are hidden by attention_mask.*-100"):
        deepspeed_cad.apply(model, {}).train()(**batch, use_cache=False)


def test_one_line_where_nobody_knows(capsys: pytest.CaptureFixture[str]) -> None:
    model = deepspeed_cad.apply(training.tiny_llama(attn_implementation="sdpa"), {}).train()
    for _ in range(2):
        loss_and_gradients(model, padded([24, 9], "right", "none"))
    assert capsys.readouterr().err.count("rows of padding get zeros from attention") == 1


@pytest.mark.parametrize(("lengths", "numbers", "lines"), [([9, 4], False, 1), ([9, 4], True, 0), ([13], False, 0)])
def test_a_mask_of_ones_over_packed_rows_is_told_once(lengths: Any, numbers: bool, lines: int, capsys: Any) -> None:
    """transformers then lets documents see each other, as LLaMA-Factory's packing does without neat_packing."""
    model = deepspeed_cad.apply(training.tiny_llama(), {}).train()
    batch = training.pack(training.documents(lengths, seed=1))
    batch["attention_mask"] = 1 + (batch["position_ids"] == 0).cumsum(-1) * numbers
    for _ in range(2):
        loss_and_gradients(model, batch)
    assert capsys.readouterr().err.count("attention_mask has nothing but ones") == lines


def test_labels_behind_cumulative_lengths() -> None:
    """Such rows are in no document, and kernels leave them undefined."""
    model = deepspeed_cad.apply(training.tiny_llama(), {}).train()
    packed = training.pack(training.documents([12, 8], seed=1))
    lengths = {name: torch.tensor([0, 12], dtype=torch.int32) for name in ("cu_seq_lens_q", "cu_seq_lens_k")}
    copied = packed["labels"].clone()
    packed["labels"][:, 12:] = -100
    model(**packed, **lengths, max_length_q=12, max_length_k=12)
    with pytest.raises(CADDataError, match="8 tokens from row 12 on lie behind cu_seq_lens_q.*-100"):
        model(**{**packed, "labels": copied}, **lengths, max_length_q=12, max_length_k=12)
