"""Tiny random models of every family that test_models.py tries, and what their configs must say to be tiny."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

NEW = int(transformers.__version__.split(".")[0]) >= 5
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


@dataclass(frozen=True)
class Family:
    """A model type with what its config needs besides SMALL."""

    kind: str
    changes: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-10
    """How far outputs and gradients may be from the reference, relative; more where the model computes in fp32."""
    fast: bool = False
    """Runs with the fast tests."""
    still: str = ""
    """Part of a class name: modules that draw random numbers in training and are put into evaluation mode."""


FP32 = 2e-5
"""For models that compute part of a layer (softmax, router, norms, position scaling) in fp32 whatever their dtype."""

FAMILIES: tuple[Family, ...] = (
    Family("llama", fast=True),
    Family("mistral", WINDOW, fast=True),
    Family("gemma2", WINDOW, FP32, fast=True),
    Family("gpt_oss", WINDOW, fast=True),
    Family("deepseek_v3", MLA, FP32, fast=True),
    Family("afmoe", MIXED, FP32),
    Family("apertus"),
    Family("arcee"),
    Family("aria_text"),
    Family("axk1", MLA, FP32),
    Family("beam", WINDOW, FP32),
    Family("bitnet"),
    Family("cohere", {}, FP32),
    Family("cohere2", MIXED, FP32),
    Family("cohere2_moe", MIXED, FP32),
    Family("ctrl"),
    Family("cwm", MIXED),
    Family("dbrx", {
        "d_model": 32, "n_heads": 4, "n_layers": 2,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    }),
    Family("deepseek_v2", {**MLA, "num_experts_per_tok": 2, "q_lora_rank": None, "topk_method": "greedy"}, FP32),
    Family("dots1", {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, **MIXED}, FP32),
    Family("ernie4_5"),
    Family("ernie4_5_moe", {}, FP32),
    Family("exaone4", MIXED),
    Family("exaone_moe", MIXED, FP32),
    Family("flex_olmo"),
    Family("flint", MIXED, FP32),
    Family("gemma", {}, FP32),
    Family("gemma3_text", MIXED, FP32),
    Family("gemma4_text", {**MIXED, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}, FP32),
    Family("glm"),
    Family("glm4"),
    Family("glm4_moe", {}, FP32),
    Family("glm4_moe_lite", MLA, FP32),
    Family("gpt2"),
    Family("gpt_bigcode"),
    Family("gpt_neox"),
    Family("granite"),
    Family("granite_swa", MIXED, FP32),
    Family("granitemoe"),
    Family("granitemoe_swa", MIXED, FP32),
    Family("granitemoehybrid", {"layer_types": ["mamba", "attention"], **MAMBA}),
    Family("granitemoeshared"),
    Family("helium", {}, FP32),
    Family("hunyuan_v1_dense", {"head_dim": 8}),
    Family("hunyuan_v1_moe", {"head_dim": 8, "num_experts": 4}),
    Family("hy_v3", {}, FP32),
    Family("hyperclovax"),
    Family("internlm3"),
    Family("iquestcoder"),
    Family("jais2"),
    Family("jetmoe"),
    Family("kolibri1", MIXED, FP32),
    Family("laguna", MIXED, FP32),
    Family("llama4_text", {
        "attention_chunk_size": 32, "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0],
        "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2, "moe_layers": [1],
        "attn_temperature_tuning": True, "floor_scale": 16, "attn_scale": 0.1,
    }, FP32, fast=True),
    Family("longcat_flash", {
        **MLA, "num_layers": 2, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "zero_expert_num": 2,
    }, FP32),
    Family("mellum", MIXED),
    Family("mimo_v2_flash", WINDOW, FP32),
    Family("minicpm3", MLA),
    Family("minimax_m2", {}, FP32),
    Family("ministral", {"head_dim": 8, **MIXED}),
    Family("ministral3", WINDOW),
    Family("mixtral", WINDOW),
    Family("modernbert-decoder", WINDOW),
    Family("nanochat"),
    Family("nemotron", {"head_dim": 8, "num_key_value_heads": 2}),
    Family("olmo"),
    Family("olmo2"),
    Family("olmo3", MIXED),
    Family("olmoe"),
    Family("opt"),
    Family("persimmon"),
    Family("phi"),
    Family("phi3", WINDOW),
    Family("phimoe", WINDOW, FP32, still="MoeBlock,Router"),
    Family("qwen2", {"use_sliding_window": True, "max_window_layers": 1, **WINDOW}),
    Family("qwen2_moe"),
    Family("qwen3"),
    Family("qwen3_moe"),
    Family("seed_oss"),
    Family("smollm3", {"use_sliding_window": True, "no_rope_layers": [1, 0], **WINDOW}),
    Family("solar_open", {}, FP32),
    Family("starcoder2", WINDOW),
    Family("vaultgemma", WINDOW, FP32),
    Family("youtu", MLA),
    # With layers that carry state
    Family("bamba", {"attn_layer_indices": [1], **MAMBA}),
    Family("falcon_h1", {"mamba_d_ssm": 64, **MAMBA}),
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
    Family("nemotron_h", {"hybrid_override_pattern": "M*-E"}, FP32),
    Family("olmo_hybrid", DELTA, FP32),
    Family("qwen3_5_moe_text", DELTA, FP32),
    Family("qwen3_5_text", DELTA, FP32, fast=True),
    Family("qwen3_next", DELTA, FP32),
    Family("zamba", {
        "num_hidden_layers": 5, "layer_types": ["linear_attention", "hybrid", "linear_attention", "hybrid", "hybrid"],
        "n_mamba_heads": 2, "num_key_value_heads": 4,
    }),
)  # fmt: skip


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
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the fused ones know no fp64
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 or name.endswith(("sinks", "bias")):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.to(dtype)


def known_kind(kind: str) -> bool:
    """Whether this version of transformers has the model type."""
    try:
        AutoConfig.for_model(kind)
    except ValueError:
        return False
    return True


def meta_model(kind: str, **changes: Any) -> PreTrainedModel:
    """A tiny model without values."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(tiny_config(kind, **changes))
    return model
