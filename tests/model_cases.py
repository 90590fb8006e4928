"""Tiny random models of every family that test_models.py tries, and what their configs must say to be tiny."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "attention_dropout": 0.0,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": 12,
    # Names that older families use
    "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 256, "n_inner": 48, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "hidden_dropout": 0.0,
    "residual_dropout": 0.0, "embedding_dropout": 0.0, "layerdrop": 0.0, "attention_probs_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
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


def tiny_config(kind: str, **overrides: Any) -> Any:
    """A two-layer config of a model type."""
    known = AutoConfig.for_model(kind)
    fields = {name: value for name, value in SMALL.items() if getattr(known, name, None) is not None}
    return AutoConfig.for_model(kind, **{**fields, **overrides})


def tiny_model(kind: str, dtype: torch.dtype = torch.float64, **overrides: Any) -> PreTrainedModel:
    """A model of a type with random weights, the same in every process; its sinks and biases are not zero."""
    torch.manual_seed(0)
    config = tiny_config(kind, **overrides)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the fused ones know no fp64
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 or name.endswith(("sinks", "bias")):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.to(dtype)
