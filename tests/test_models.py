"""Every supported family against each of its documents run alone, over two processes; every refusal with its reason."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from deepspeed_cad.integrations.model_table import REFUSED, SUPPORTED
from deepspeed_cad.integrations.models import (
    describe,
    is_mixture,
    refuse_arguments,
    refuse_checkpointing,
    refuse_model,
    refuse_spanning,
)
from model_cases import FAMILIES, Family, tiny_config, tiny_model
from pool import WorkerPool
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from deepspeed_cad.errors import CADUnsupportedError

NEW = int(transformers.__version__.split(".")[0]) >= 5
LENGTHS = [[150, 3, 39], [20, 40, 1, 30, 37]]
"""Documents of each rank: the first has most of the attention."""
SPANNING = ([200, 3, 20, 17], 120)
"""Documents of one stream, and its rows per rank: the first document lies on both ranks."""


# Supported


def _known(kind: str) -> bool:
    try:
        AutoConfig.for_model(kind)
    except ValueError:
        return False
    return True


def _need(family: Family) -> None:
    """Skip a family that an older version of transformers does not have, or does not run through its interfaces."""
    if not _known(family.kind):
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
    return {"overlap": overlap, "granularity": 16, "tolerance": 0.02}


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


def _spanning_documents(rank: int, world: int, family: Family, overlap: str) -> dict[str, Any]:
    """A stream cut into equal rank parts: logits, and gradients summed over ranks."""
    import deepspeed_cad

    lengths, rows = SPANNING
    reference = _build(family, None)
    model = deepspeed_cad.apply(_build(family, None), _settings(overlap))
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


@pytest.mark.parametrize(
    "family", [pytest.param(f, id=f.kind, marks=() if f.fast else pytest.mark.slow) for f in FAMILIES]
)
def test_family(workers: WorkerPool, family: Family) -> None:
    """Packed documents, ping-pong, two ranks."""
    _need(family)
    _check(workers.run(_whole_documents, 2, family, "pingpong", None), family)


MODES = [("none", None), ("local_first", "plain"), ("pingpong", "plain"), ("pingpong", "reentrant")]
DENSE, MIXTURE = ("llama", "gemma2", "gpt2"), ("mixtral", "gpt_oss", "deepseek_v3")


@pytest.mark.slow
@pytest.mark.parametrize("overlap, checkpoint", MODES, ids=lambda value: str(value))
@pytest.mark.parametrize("kind", DENSE + MIXTURE)
def test_overlap_and_checkpointing(workers: WorkerPool, kind: str, overlap: str, checkpoint: str | None) -> None:
    """Without ping-pong, and under both kinds of checkpointing, which adds no attention calls."""
    family = next(one for one in FAMILIES if one.kind == kind)
    _need(family)
    if checkpoint == "reentrant" and kind in MIXTURE:
        pytest.skip("refused, see test_reentrant_checkpointing_of_a_mixture_is_refused")
    plain = workers.run(_whole_documents, 2, family, overlap, None)
    found = workers.run(_whole_documents, 2, family, overlap, checkpoint)
    _check(found, family)
    assert found[0]["calls"][:2] == plain[0]["calls"][:2] and found[0]["sent"] >= plain[0]["sent"]


@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gemma2", "gpt_oss", "deepseek_v3", "qwen3_moe")),
    ],
)
def test_documents_that_span_ranks(workers: WorkerPool, kind: str) -> None:
    """One document over both ranks."""
    family = next(one for one in FAMILIES if one.kind == kind)
    _check(workers.run(_spanning_documents, 2, family, "local_first"), family)


def test_table_is_what_is_tested() -> None:
    """SUPPORTED holds the families above, and nothing is both supported and refused."""
    assert {family.kind for family in FAMILIES} == SUPPORTED
    assert not SUPPORTED & REFUSED.keys()
    page = (Path(__file__).parents[1] / "docs" / "models.md").read_text()
    assert not [kind for kind in SUPPORTED | REFUSED.keys() if f"`{kind}`" not in page]


def test_unknown_model_is_allowed_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A structure that passes, under a name that was never tried."""
    model = tiny_model("llama")
    with caplog.at_level(logging.WARNING, logger="deepspeed_cad"):
        refuse_model(model)
        assert not caplog.records
        model.config.model_type = "llama_of_somebody"
        refuse_model(model)
    assert "never tested" in caplog.text and "llama_of_somebody" in caplog.text


# Refused


def _meta(kind: str, **changes: Any) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(tiny_config(kind, **changes))
    return model


REFUSALS: list[tuple[str, str, dict[str, Any], str]] = [
    ("attention dropout", "llama", {"attention_dropout": 0.1}, r"attention_dropout is 0\.1.*attention_dropout=0\.0"),
    ("attention dropout of GPT-2", "gpt2", {"attn_pdrop": 0.1}, r"attn_pdrop is 0\.1"),
    ("chunked attention", "llama4_text", {"attention_chunk_size": 32}, "attention_chunk_size is 32: chunked"),
    ("linear attention", "qwen3_next", {}, "layer_types has linear_attention.*state from token to token"),
    ("state space", "mamba", {}, "(layer_types has|state-space|is a Conv1d)"),
    ("state space and attention", "jamba", {}, "(layer_types|layers_block_type) has|state-space|is a Conv1d"),
    ("convolutions", "lfm2", {"layer_types": ["conv", "full_attention"]}, "layer_types has conv"),
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
    ("ALiBi of Falcon", "falcon", {"alibi": True}, "_supports_attention_backend is False"),
    ("ALiBi of MPT", "mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2}, "_supports_attention_backend is False"),
    ("own attention", "gptj", {"rotary_dim": 8}, "_supports_attention_backend is False"),
    ("sparse attention", "deepseek_v32", {"num_key_value_heads": 4}, "(indexed|sparse)_attention|Indexer"),
    ("differential attention", "diffllama", {}, 'model_type is "diffllama".*twice'),
    ("content-dependent mask", "doge", {}, 'model_type is "doge"'),
    ("prefix and loops", "hrm_text", {}, 'model_type is "hrm_text"'),
]  # fmt: skip


@pytest.mark.parametrize("kind, changes, reason", [pytest.param(*one[1:], id=one[0]) for one in REFUSALS])
def test_refusal(kind: str, changes: dict[str, Any], reason: str) -> None:
    """Each refused kind says why."""
    if not _known(kind):
        pytest.skip(f"this version of transformers has no {kind}")
    model = _meta(kind, **changes)
    with pytest.raises(CADUnsupportedError, match=reason) as caught:
        refuse_model(model)
    assert type(model).__name__ in str(caught.value) and f"({kind})" in str(caught.value)


def test_dropout_that_only_the_modules_remember_is_refused() -> None:
    """The config was changed after loading, which changes nothing in the layers."""
    model = _meta("llama", attention_dropout=0.1)
    model.config.attention_dropout = 0.0
    with pytest.raises(CADUnsupportedError, match=r"layers\.0\.self_attn\.attention_dropout is 0\.1"):
        refuse_model(model)


def test_several_modalities_are_refused() -> None:
    """Vision and audio wrappers, whatever their text decoder is."""
    model = _meta("llama")
    model.config.vision_config = {"hidden_size": 4}
    with pytest.raises(CADUnsupportedError, match="vision_config: models of several modalities.*text decoder alone"):
        refuse_model(model)


@pytest.mark.skipif(not NEW, reason="this version of transformers makes no such config without RoPE scaling")
def test_text_decoder_with_cross_attention_is_refused() -> None:
    """The text half of a vision model whose layers read the image."""
    from transformers.models.mllama.modeling_mllama import MllamaForCausalLM, MllamaTextConfig

    config = MllamaTextConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, cross_attention_layers=[1], pad_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        model = MllamaForCausalLM(config)
    with pytest.raises(CADUnsupportedError, match=r"layers\.1.* is cross-attention"):
        refuse_model(model)


def test_encoder_decoder_is_refused() -> None:
    """T5 and its relatives."""
    from transformers import T5Config, T5ForConditionalGeneration

    with torch.device("meta"):
        model = T5ForConditionalGeneration(T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4))
    with pytest.raises(CADUnsupportedError, match="is_encoder_decoder is True"):
        refuse_model(model)


def test_shared_attention_module_is_refused() -> None:
    """One attention module in two layers."""
    model = _meta("llama")
    model.model.layers[1].self_attn = model.model.layers[0].self_attn
    with pytest.raises(CADUnsupportedError, match=r"layers\.1\.self_attn is the same module as model\.layers\.0"):
        refuse_model(model)


def test_code_that_bypasses_the_interface_is_refused() -> None:
    """Remote code that claims the interface and does not import it."""

    class Attention(nn.Module):
        pass

    class Custom(PreTrainedModel):
        _supports_attention_backend = True

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.attention = Attention()

    with pytest.raises(CADUnsupportedError, match="bypasses the attention interface.*trust_remote_code"):
        refuse_model(Custom(tiny_config("llama")))


def test_subclass_of_a_supported_model_is_not_refused() -> None:
    """A user's class that only adds a head."""

    class Mine(LlamaForCausalLM):
        pass

    refuse_model(Mine(tiny_config("llama")))


def test_reentrant_checkpointing_of_a_mixture_is_refused() -> None:
    """The router's auxiliary loss would lose its gradient; dense models and non-reentrant checkpointing are fine."""
    for kind, reentrant, refused in [
        ("mixtral", True, True), ("mixtral", False, False), ("llama", True, False), ("deepseek_v3", True, True),
    ]:  # fmt: skip
        model = _meta(kind)
        refuse_checkpointing(model.model)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if refused:
            with pytest.raises(CADUnsupportedError, match="use_reentrant"):
                refuse_checkpointing(model.model)
        else:
            refuse_checkpointing(model.model)


def _reentrant_mixture(rank: int, world: int) -> None:
    import deepspeed_cad

    model = tiny_model("mixtral", torch.float32).train()
    deepspeed_cad.apply(model, _settings("none"))
    model.gradient_checkpointing_enable({"use_reentrant": True})  # after CAD was turned on, as the Trainer does
    model(input_ids=torch.ones(1, 8, dtype=torch.long), use_cache=False)


def _span_with_batch_dependent_rope(rank: int, world: int) -> None:
    import deepspeed_cad

    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = tiny_model("llama", torch.float32, **{"rope_parameters" if NEW else "rope_scaling": rope}).train()
    deepspeed_cad.apply(model, _settings("none"))
    positions = torch.arange(8).unsqueeze(0) + 8 * rank
    model(input_ids=torch.ones(1, 8, dtype=torch.long), position_ids=positions, use_cache=False)


@pytest.mark.parametrize(
    "run, reason", [(_reentrant_mixture, "use_reentrant"), (_span_with_batch_dependent_rope, "rope")]
)
def test_refusals_that_only_a_forward_can_see(workers: WorkerPool, run: Any, reason: str) -> None:
    """Every rank raises, none waits for another."""
    errors, _ = workers.try_run(run, 2)
    assert all(error is not None and error[0] == "CADUnsupportedError" and reason in error[1] for error in errors)


def test_arguments_that_change_attention_are_refused() -> None:
    """Arguments of an attention call that CAD would otherwise ignore."""
    refuse_arguments("layer 0", {"position_ids": torch.zeros(1), "is_causal": False, "indices": None})
    for name in ("indices", "block_indices", "position_bias"):
        with pytest.raises(CADUnsupportedError, match=f"layer 0 passes {name}"):
            refuse_arguments("layer 0", {name: torch.zeros(1)})


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
    first, second = _meta("llama"), _meta("llama")
    second.config._name_or_path = "/somewhere/else"
    second.config._attn_implementation = "eager"
    assert describe(first) == describe(second)
    assert describe(first) != describe(_meta("llama", num_hidden_layers=3))
    assert describe(first) != describe(_meta("mistral"))
