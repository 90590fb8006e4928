"""Padding: rows whose labels count are computed as transformers' own sdpa and eager attention compute them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import training
from padded import assert_same, loss_and_gradients, padded
from transformers import MistralConfig, MistralForCausalLM, set_seed

import deepspeed_cad
from deepspeed_cad.errors import CADDataError


@pytest.mark.parametrize("labels", ["copied", "masked", "none"])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_as_without_cad(attention: str, side: str, labels: str) -> None:
    batch = padded([24, 9, 1], side, labels)
    # transformers' eager attention computes its softmax in fp32, also of masks that hold the lowest fp64.
    dtype = torch.float32 if attention == "eager" else torch.float64
    expected = loss_and_gradients(training.tiny_llama(dtype, attn_implementation=attention), batch)
    model = deepspeed_cad.apply(training.tiny_llama(dtype, attn_implementation=attention), {})
    assert_same(loss_and_gradients(model, batch), expected, 1e-5 if attention == "eager" else 1e-9)


@pytest.mark.parametrize("lengths", [[13], [20, 24]])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_one_row_and_rows_without_padding(checkpoint: bool, lengths: list[int]) -> None:
    """Rows without padding are left as they are; checkpointing computes padding again."""
    batch = padded(lengths, "right", "copied")
    expected = loss_and_gradients(training.tiny_llama(attn_implementation="sdpa"), batch)
    model = deepspeed_cad.apply(training.tiny_llama(attn_implementation="sdpa"), {})
    if checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(loss_and_gradients(model, batch), expected, 1e-9)


@pytest.mark.parametrize("side", ["right", "left"])
def test_windows(side: str) -> None:
    """A row of padding sees no further back than others."""

    def model() -> Any:
        set_seed(0)
        config = MistralConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, sliding_window=5, attn_implementation="sdpa",
        )  # fmt: skip
        return MistralForCausalLM(config).to(torch.float64)

    batch = padded([24, 9, 22], side, "copied")
    expected = loss_and_gradients(model(), batch)
    assert_same(loss_and_gradients(deepspeed_cad.apply(model(), {}), batch), expected, 1e-9)


def _seen(model: Any, batch: dict[str, torch.Tensor]) -> Any:
    """What is kept for padding in a forward of the model."""
    session = deepspeed_cad.current_session()
    assert session is not None
    found: list[Any] = []
    count = session.count
    session.count = lambda micro_batch, *more: (found.append(micro_batch), count(micro_batch, *more))[1]  # type: ignore[method-assign, func-returns-value]
    model(**batch, use_cache=False)
    return found[-1].padding


def test_nothing_is_computed_where_nothing_counts() -> None:
    """Labels that are -100 behind the mask, shifted or not, and FlashAttention, which gives padding zeros as well."""
    model = training.tiny_llama(attn_implementation="sdpa").train()
    deepspeed_cad.apply(model, {})
    right = padded([24, 9], "right", "masked")
    assert _seen(model, right) is None
    shifted = torch.nn.functional.pad(right["labels"][:, 1:], (0, 1), value=-100)
    assert _seen(model, {**right, "shift_labels": shifted}) is None
    shifted[1, 20] = 5
    assert _seen(model, {**right, "shift_labels": shifted}) is not None
    assert _seen(model, padded([24, 9], "right", "copied")) is not None
    assert _seen(model, padded([24, 9], "right", "none")) is not None
    # The last row of left padding predicts the first token.
    assert _seen(model, padded([24, 9], "left", "masked")) is not None
    model.config.output_router_logits = True  # a router counts every row
    assert _seen(model, right) is not None
    model.config.output_router_logits = False
    binding = deepspeed_cad.current_session().bindings[model]
    binding.original = "flash_attention_2"
    assert _seen(model, padded([24, 9], "right", "copied")) is None


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
