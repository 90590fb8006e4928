"""Every refusal of a model with its reason, and what is accepted with a warning."""

import copy
import logging
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.activation_checkpointing.checkpointing import non_reentrant_checkpoint
from deepspeed_cad.integrations.models import describe, is_reentrant, refuse_model, refuse_spanning
from model_cases import NEW, family, known_kind, meta_model, tiny_config, tiny_model
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

import deepspeed_cad
from deepspeed_cad.errors import CADUnsupportedError

REFUSALS: list[tuple[str, str, dict[str, Any], str]] = [
    ("attention dropout", "llama", {"attention_dropout": 0.1}, r"attention_dropout is 0\.1.*attention_dropout=0\.0"),
    ("attention dropout of GPT-2", "gpt2", {"attn_pdrop": 0.1}, r"attn_pdrop is 0\.1"),
    ("chunks of no known layer", "llama", {"attention_chunk_size": 32}, "attention_chunk_size is 32: chunked"),
    ("linear attention alone", "qwen3_next", {}, "2 layers carry state from token to token and none attends"),
    ("state space", "mamba", {}, "layers carry state|layer_types has|state-space|is a Conv1d"),
    ("lightning attention", "minimax", {}, "layer_types has linear_attention"),
    ("recurrence", "recurrent_gemma", {}, "(layer_types|layers_block_type) has|is a Conv1d"),
    ("bidirectional", "bert", {}, "is_causal is False|_supports_attention_backend"),
    ("bidirectional Gemma", "gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention is"),
    ("cross-attention", "gpt2", {"add_cross_attention": True}, "add_cross_attention is True"),
    ("shared keys", "gemma3n_text", {
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "intermediate_size": 48,
        "activation_sparsity_pattern": [0.0] * 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
    }, "num_kv_shared_layers is 2"),
    ("ALiBi", "bloom", {}, "_supports_attention_backend is False"),
    ("own attention", "xglm", {}, "_supports_attention_backend is False"),
    ("sparse attention", "deepseek_v32", {"num_key_value_heads": 4}, "(indexed|sparse)_attention|Indexer"),
    ("differential attention", "diffllama", {}, 'model_type is "diffllama".*twice'),
    ("content-dependent mask", "doge", {}, 'model_type is "doge"'),
    ("prefix and loops", "hrm_text", {}, 'model_type is "hrm_text"'),
]  # fmt: skip


@pytest.mark.parametrize("kind, changes, reason", [pytest.param(*one[1:], id=one[0]) for one in REFUSALS])
def test_refusal(kind: str, changes: dict[str, Any], reason: str) -> None:
    if not known_kind(kind):
        pytest.skip(f"this version of transformers has no {kind}")
    model = meta_model(kind, **changes)
    with pytest.raises(CADUnsupportedError, match=rf"\): [^:]*({reason})") as caught:  # what was found, then why
        refuse_model(model)
    assert type(model).__name__ in str(caught.value) and f"({kind})" in str(caught.value)


class Attention(nn.Module):
    """Of somebody's own."""


class CrossAttention(Attention):
    """It has the name."""


BIASES = ("alibi", "use_alibi", "relative_attention_num_buckets")


def _unscaled(model: Any) -> Any:
    for layer in model.model.layers:
        del layer.self_attn.scaling
    return model


def _change(part: Any, **changes: Any) -> None:
    for name, value in changes.items():
        setattr(part, name, value)


@pytest.mark.parametrize("change, said", [
    (lambda model: _change(model.config, attention_dropout=0.0), r"layers\.0\.self_attn\.attention_dropout is 0\.1"),
    (lambda model: _change(model.config, vision_config={"a": 4}), "vision_config: models of several modalities.*text"),
    (
        lambda model: _change(model.config, vision_config=copy.copy(model.config), model_type="gemma3"),
        "vision_config: tokens of an image see each other, later ones too.*text decoder alone",
    ),
    (lambda model: _change(model.config, is_encoder_decoder=True), "is_encoder_decoder is True"),
    (
        lambda model: _change(model.model.layers[1], self_attn=model.model.layers[0].self_attn),
        r"layers\.1\.self_attn is the same module as model\.layers\.0",
    ),
    (lambda model: _change(model.model, layerdrop=0.1), r"model\.layerdrop is 0\.1: each rank.*layerdrop=0\.0"),
    (lambda model: _change(model.model.layers[1], self_attn=CrossAttention()), r"layers\.1.* is cross-attention"),
    (lambda model: _change(model.config, is_causal=False), "is_causal is False: tokens would see later"),
    (lambda model: _change(model.model.layers[1].self_attn, is_causal=False), r"layers\.1\.self_attn\.is_causal is F"),
    (lambda model: _change(model.model, A_log=nn.Parameter(torch.ones(2))), r"model\.A_log of shape \(2,\): a state"),
    (lambda model: _change(model.model, conv=nn.Conv2d(1, 1, 1)), "model.conv is a Conv2d: it mixes"),
    (lambda model: _change(model.model, rnn=nn.GRU(1, 1)), "model.rnn is a GRU: it mixes"),
    (lambda model: _change(model.model, x=type("Indexer", (nn.Module,), {})()), "model.x is a Indexer: s"),
    *((lambda model, key=key: _change(model.config, **{key: True}), f"{key} is True: it adds") for key in BIASES),
    (lambda model: _change(model.config, position_embedding_type="relative_key"), "_type is 'relative_key': it adds a"),
    (lambda model: _change(_unscaled(model).config, scale_attn_weights=False), "scale_attn_weights is False: this ve"),
    (lambda model: _change(_unscaled(model).config, scale_attn_by_inverse_layer_idx=True), "scale_attn_by_.*: this ve"),
])  # fmt: skip
def test_what_was_changed_is_refused(change: Any, said: str) -> None:
    """Also what only modules remember: the config was changed after loading."""
    model = meta_model("llama", attention_dropout=0.1 if "dropout" in said else 0.0)
    change(model)
    with pytest.raises(CADUnsupportedError, match=rf"\): [^:]*{said}"):
        refuse_model(model)


def test_code_that_bypasses_the_interface_is_refused() -> None:
    class Custom(PreTrainedModel):
        _supports_attention_backend = True

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.attention = Attention()

    with pytest.raises(CADUnsupportedError, match="bypasses the attention interface.*trust_remote_code"):
        refuse_model(Custom(tiny_config("llama")))


@pytest.mark.parametrize(
    ("kind", "reentrant", "refused"),
    [("mixtral", True, True), ("mixtral", False, False), ("llama", True, False), ("deepseek_v3", True, True)],
)
def test_reentrant_checkpointing_of_a_mixture_is_refused(kind: str, reentrant: bool, refused: bool) -> None:
    """The router's auxiliary loss would lose its gradient; dense models and non-reentrant checkpointing are fine."""
    model = deepspeed_cad.apply(tiny_model(kind, torch.float32).train(), {"overlap": "none"})
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # after CAD was turned on, as the Trainer does
    with pytest.raises(CADUnsupportedError, match="use_reentrant") if refused else nullcontext():
        model(input_ids=torch.ones(1, 8, dtype=torch.long), use_cache=False)


@pytest.mark.parametrize("function, reentrant", [
    (checkpoint, True), (non_reentrant_checkpoint, False),
    (partial(checkpoint, use_reentrant=False), False), (partial(partial(checkpoint, use_reentrant=False), x=1), False),
    (partial(partial(checkpoint, use_reentrant=False), use_reentrant=True), True),
])  # fmt: skip
def test_which_checkpointing_is_reentrant(function: Any, reentrant: bool) -> None:
    """torch's is where nothing else is said, and of partials the last counts."""
    assert is_reentrant(function) is reentrant


@pytest.mark.skipif(not NEW, reason="transformers 4 runs this model outside of its interfaces")
def test_what_cannot_be_had_beside_chunks() -> None:
    with pytest.raises(CADUnsupportedError, match='attend in chunks, beside which "verify" cannot be had'):
        deepspeed_cad.apply(family("llama4_text", torch.float32), {"verify": 1})


def test_positions_scaled_by_the_batch_must_not_span_ranks() -> None:
    """RoPE whose frequencies depend on the largest position of a rank."""
    refuse_spanning(tiny_config("llama"))
    for rope in ({"rope_type": "dynamic", "factor": 2.0}, {"full_attention": {"rope_type": "longrope"}}):
        config = copy.deepcopy(tiny_config("llama"))
        config.__dict__["rope_parameters"] = rope
        with pytest.raises(CADUnsupportedError, match="spans ranks"):
            refuse_spanning(config)


def test_description_is_of_the_model_not_of_the_machine() -> None:
    """Equal for equal models, whatever path they were loaded from and whatever attention they run."""
    first, second = meta_model("llama"), meta_model("llama")
    second.config._name_or_path = "/somewhere/else"
    second.config._attn_implementation = "eager"
    assert describe(first) == describe(second)
    types = [
        SimpleNamespace(config=SimpleNamespace(to_dict=lambda one=one: {"dtype": one}))
        for one in (torch.half, torch.bfloat16)
    ]
    assert describe(types[0]) != describe(types[1])  # type: ignore[arg-type]
    assert describe(first) != describe(meta_model("llama", num_hidden_layers=3))
    assert describe(first) != describe(meta_model("mistral"))


def test_unknown_model_is_allowed_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A structure that passes, under a name that was never tried."""
    model = tiny_model("llama")
    _change(model.config, **dict.fromkeys(BIASES, 0), position_embedding_type="absolute", scale_attn_weights=False)
    with caplog.at_level(logging.WARNING, logger="deepspeed_cad"):
        refuse_model(model)
        assert not caplog.records
        model.config.model_type = "llama_of_somebody"
        refuse_model(model)
    assert "never tested" in caplog.text and "llama_of_somebody" in caplog.text
