"""Which models `to_pipeline` cuts: those that are embedding, layers, norm and head, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed_cad.integrations.pipeline_model import layer_work, refuse_uncut
from transformers import AutoConfig, AutoModelForCausalLM

from deepspeed_cad.errors import CADUnsupportedError

SIZES: dict[str, Any] = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


def _skeleton(kind: str, **changes: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **changes}))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "qwen2", "phi3", "olmo2"])
def test_models_that_can_be_cut(kind: str) -> None:
    refuse_uncut(_skeleton(kind, pad_token_id=0))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("granite", {"embedding_multiplier": 12.0}),
        ("granite", {"logits_scaling": 8.0}),
        ("gemma2", {"final_logit_softcapping": 1.0}),
        ("cohere", {"logit_scale": 0.25}),
    ],
)
def test_models_that_do_more_are_refused(kind: str, changes: dict[str, Any]) -> None:
    with pytest.raises(CADUnsupportedError, match="cannot be cut into stages: it does more"):
        refuse_uncut(_skeleton(kind, pad_token_id=0, **changes))


def test_routers_that_report_are_refused() -> None:
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "output_router_logits": True}
    with pytest.raises(CADUnsupportedError, match="output_router_logits"):
        refuse_uncut(_skeleton("qwen3_moe", **moe))


def test_work_of_layers_counts_visited_experts_only() -> None:
    moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "tie_word_embeddings": False}
    work = layer_work(_skeleton("qwen3_moe", **moe))
    dense = layer_work(_skeleton("qwen3", tie_word_embeddings=False))
    assert len(work) == SIZES["num_hidden_layers"] + 3
    assert work[0] == work[-2] == 0 and work[-1] == SIZES["vocab_size"] * SIZES["hidden_size"]
    # Two experts as wide as the dense layer's, and the router.
    assert work[1] - dense[1] == 3 * 48 * 32 + 8 * 32
