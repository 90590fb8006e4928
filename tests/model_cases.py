"""Tiny random models of every family that test_models.py tries, and what their configs must say to be tiny."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
NEW = VERSION >= (5,)
"""Transformers 5 or newer."""

SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "attention_dropout": 0.0,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    # Names that older families use
    "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 256, "n_inner": 48, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "hidden_dropout": 0.0,
    "residual_dropout": 0.0, "embedding_dropout": 0.0, "layerdrop": 0.0, "attention_probs_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0, "dff": 48,
    # Mixtures of experts
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "moe_layer_start_index": 0, "moe_k": 2,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "num_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 16, "moe_topk": 2, "shared_intermediate_size": 16,
    "output_router_logits": False,
    # Multi-head latent attention
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 4, "v_head_dim": 6,
}  # fmt: skip
"""Field to value, applied where the family's config has the field."""

WINDOW = {"sliding_window": 12}
MIXED = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
MLA = {"num_key_value_heads": 4}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}
EXACT = 1e-10


@dataclass(frozen=True)
class Family:
    """A model type with what its config needs besides SMALL."""

    kind: str
    changes: dict[str, Any] = field(default_factory=dict)
    tolerance: float = EXACT
    """How far outputs and gradients may be from the reference, relative; more where the model computes in fp32."""
    fast: bool = False
    """Runs with the fast tests."""
    still: str = ""
    """Part of a class name: modules that draw random numbers in training and are put into evaluation mode."""


FP32 = 2e-5
"""For models that compute part of a layer (softmax, router, norms, position scaling) in fp32 whatever their dtype."""

ALIKE: tuple[tuple[str, dict[str, Any], float], ...] = (
    (
        "apertus arcee aria_text bitnet ctrl ernie4_5 flex_olmo glm glm4 gpt2 gpt_bigcode gpt_neox granite granitemoe "
        "granitemoeshared hyperclovax internlm3 iquestcoder jais2 jetmoe nanochat olmo olmo2 olmoe opt persimmon phi "
        "qwen2_moe qwen3 qwen3_moe seed_oss", {}, EXACT),
    ("cohere ernie4_5_moe gemma glm4_moe helium hy_v3 minimax_m2 solar_open", {}, FP32),
    ("ministral3 mixtral modernbert-decoder phi3 starcoder2", WINDOW, EXACT),
    ("beam mimo_v2_flash vaultgemma", WINDOW, FP32),
    ("cwm exaone4 mellum olmo3", MIXED, EXACT),
    ("afmoe cohere2 cohere2_moe exaone_moe flint gemma3_text granite_swa granitemoe_swa kolibri1 laguna", MIXED, FP32),
    ("minicpm3 youtu", MLA, EXACT), ("axk1 glm4_moe_lite", MLA, FP32),
    ("olmo_hybrid qwen3_5_moe_text qwen3_next", DELTA, FP32),
)  # fmt: skip
"""Model types that need the same, and how far they may be from the reference."""

FAMILIES: tuple[Family, ...] = (
    *(Family(kind, changes, within) for kinds, changes, within in ALIKE for kind in kinds.split()),
    Family("llama", fast=True), Family("mistral", WINDOW, fast=True),
    Family("gemma2", WINDOW, FP32 if VERSION >= (5, 24) else 5 * FP32, fast=True),
    Family("gpt_oss", WINDOW, fast=True), Family("deepseek_v3", MLA, FP32, fast=True),
    Family("dbrx", {
        "d_model": 32, "n_heads": 4, "n_layers": 2,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    }),
    Family("deepseek_v2", {**MLA, "num_experts_per_tok": 2, "q_lora_rank": None, "topk_method": "greedy"}, FP32),
    Family("dots1", {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, **MIXED}, FP32),
    Family("gemma4_text", {**MIXED, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}, FP32),
    Family("granitemoehybrid", {"layer_types": ["mamba", "attention"], **MAMBA}),
    Family("hunyuan_v1_dense", {"head_dim": 8}), Family("hunyuan_v1_moe", {"head_dim": 8, "num_experts": 4}),
    Family("llama4_text", {
        "attention_chunk_size": 32, "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0],
        "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2, "moe_layers": [1],
        "attn_temperature_tuning": True, "floor_scale": 16, "attn_scale": 0.1,
    }, FP32, fast=True),
    Family("longcat_flash", {
        **MLA, "num_layers": 2, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "zero_expert_num": 2,
    }, FP32),
    Family("ministral", {"head_dim": 8, **MIXED}), Family("nemotron", {"head_dim": 8, "num_key_value_heads": 2}),
    Family("phimoe", WINDOW, FP32, still="MoeBlock,Router"),
    Family("qwen2", {"use_sliding_window": True, "max_window_layers": 1, **WINDOW}),
    Family("smollm3", {"use_sliding_window": True, "no_rope_layers": [1, 0], **WINDOW}),
    # With layers that carry state
    Family("bamba", {"attn_layer_indices": [1], **MAMBA}), Family("falcon_h1", {"mamba_d_ssm": 64, **MAMBA}),
    Family("jamba", {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "mamba_d_state": 8, "mamba_dt_rank": 4,
    }),
    Family("kimi_linear", {
        "layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"], **MLA,
        "num_experts": 4, "num_experts_per_token": 2, "linear_num_heads": 4, "linear_head_dim": 8,
    }, FP32),
    Family("lfm2", {"layer_types": ["conv", "full_attention"]}, fast=True),
    Family("lfm2_moe", {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
    Family("lfm3", {"layer_types": ["conv", "full_attention"]}),
    Family("nemotron_h", {
        "hybrid_override_pattern": "M*-E", "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2,
        "ssm_state_size": 8}, FP32), Family("qwen3_5_text", DELTA, FP32, fast=True),
    Family("zamba", {
        "num_hidden_layers": 5, "layer_types": ["linear_attention", "hybrid", "linear_attention", "hybrid", "hybrid"],
        "n_mamba_heads": 2, "num_key_value_heads": 4,
    }),
)  # fmt: skip
BY_KIND = {one.kind: one for one in FAMILIES}


def tiny_config(kind: str, **changes: Any) -> Any:
    """A two-layer config of a model type."""
    known = AutoConfig.for_model(kind).to_dict()
    fields = {name: value for name, value in SMALL.items() if known.get(name) is not None}
    return AutoConfig.for_model(kind, **{**fields, **changes})


def tiny_model(kind: str, dtype: torch.dtype = torch.float64, **changes: Any) -> PreTrainedModel:
    """A model of a type with random weights, the same in every process; its sinks and biases are not zero."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(tiny_config(kind, **changes))
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    return randomized(model).to(dtype)


def randomized(model: Any, scale: Callable[[Any], float] = lambda _: 0.2, sinks: float = 0.0) -> Any:
    """Give it other values, of which none is zero; with experts that know fp64. `sinks`: what theirs are about."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 or name.endswith(("sinks", "bias")):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale(parameter))
                parameter.add_(sinks * name.endswith("sinks"))
    return model


def family(kind: str, dtype: torch.dtype = torch.float64, **sizes: Any) -> Any:
    """The tiny model of a family in training mode; `sizes`: what differs in its config."""
    return tiny_model(kind, dtype, **BY_KIND[kind].changes | sizes).train()


def known_kind(kind: str) -> bool:
    """Whether this version of transformers has the model type."""
    return kind in transformers.CONFIG_MAPPING


def meta_model(kind: str, **changes: Any) -> PreTrainedModel:
    """A tiny model without values."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny_config(kind, **changes))
