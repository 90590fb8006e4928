"""Memory of the fullest rank: weights and their state, activations, and what attention's exchanges hold.

Counts are per token and rank in bf16. The working set of a layer that is being recomputed was found by measuring plain
training (benchmarks/results: 277 KB a token at hidden 4096 and FFN 14336): the MLP's backward holds four tensors of its
width and three gradients of them, and what is left is nine and a half of the hidden size, norms in fp32 among them.
"""

from __future__ import annotations

from deepspeed_cad.simulator.setting import Setting
from deepspeed_cad.simulator.traffic import Traffic

MLP_TENSORS = 7.0
HIDDEN_TENSORS = 9.4
"""Bytes of the working set over 2 bytes × the hidden size, and of its width; see above."""
SAVED_MLP = 4.0
SAVED_HIDDEN = 12.0
"""Tensors that autograd keeps of a layer without checkpointing: counted in transformers' Llama, not measured."""
HEADROOM = 1.25
"""Of a landing area over what it must hold: as in schedule/room.py."""


def state_bytes(setting: Setting, shards: int) -> float:
    """Weights, gradients and the fp32 state of AdamW, sharded over so many ranks."""
    weights = setting.stage_parameters
    whole = {"zero1": 4.0, "zero2": 2.0, "zero3": 0.0, "fsdp": 0.0}[setting.sharding]
    sharded = 16.0 - whole
    gathered = 0.0
    if setting.sharding in ("zero3", "fsdp"):
        # The layer at work and the one that is fetched, and the gradient of one.
        gathered = 3 * 2.0 * setting.model.layer_parameters / setting.tensor
        gathered += 2.0 * setting.model.hidden * setting.model.vocabulary / setting.tensor
    return weights * (whole + sharded / shards) + gathered


def activation_bytes(setting: Setting, tokens: float, in_flight: int = 1) -> float:
    """Of `tokens` on a rank, with so many micro-batches between their forward and their backward."""
    model = setting.model
    work = 2.0 * (MLP_TENSORS * model.intermediate + HIDDEN_TENSORS * model.hidden)
    kept = 2.0 * model.hidden
    if not setting.checkpointing:
        kept = 2.0 * (SAVED_MLP * model.intermediate + SAVED_HIDDEN * model.hidden)
    return tokens * (kept * setting.layers * in_flight + work) / setting.tensor


def kept_output_bytes(setting: Setting, tokens: float, in_flight: int = 1) -> float:
    """O and LSE that CAD keeps over the recompute."""
    if not setting.checkpointing or setting.recompute_attention:
        return 0.0
    row = setting.shape.query_heads * (2.0 * setting.shape.value_dim + 4.0)
    return tokens * row * setting.layers * in_flight


def exchange_bytes(traffic: Traffic) -> float:
    """Landing areas, and what a server makes for others before it is fetched."""
    return HEADROOM * traffic.landing + traffic.served
