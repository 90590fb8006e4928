"""Memory of the fullest rank: weights and their state, activations, and what attention's exchanges hold.

Counts are per token and rank in bf16. The working set of a layer that is being recomputed was found by measuring plain
training (benchmarks/results: 277 KB a token at hidden 4096 and FFN 14336): the MLP's backward holds four tensors of its
width and three gradients of them, and what is left is nine and a half of the hidden size, norms in fp32 among them.
"""

from __future__ import annotations

from deepspeed_cad.forecast.bytes_moved import Traffic
from deepspeed_cad.forecast.setting import Setting

MLP_TENSORS = 7.0
HIDDEN_TENSORS = 9.4
"""Bytes of the working set over 2 bytes × the hidden size, and of its width; see above."""
SAVED_MLP = 4.0
SAVED_HIDDEN = 12.0
"""Tensors that autograd keeps of a layer without checkpointing: counted in transformers' Llama, not measured."""
LOGITS = 18.0
"""Bytes of a logit in the last stage of a pipeline, where all of a micro-batch are there at once: one in bf16, four in
fp32 (the logits, log-softmax, its gradient, and that of all rows). As measured (benchmarks/results)."""
HEADROOM = 1.25
"""Of a landing area over what it must hold: as in schedule/room.py, where no limit binds."""
LSE = 4.0
"""Bytes, of a row and head."""


def state_bytes(setting: Setting, shards: int) -> float:
    """Weights, gradients and the fp32 state of AdamW, sharded over so many ranks."""
    weights = setting.stage_parameters
    whole = {"zero1": 4.0, "zero2": 2.0, "zero3": 0.0, "fsdp": 0.0}[setting.sharding]
    whole, sharded = (whole, 16.0 - whole) if setting.held is None else setting.held
    gathered = 0.0
    if setting.sharding in ("zero3", "fsdp"):
        # The layer at work and the one that is fetched, and the gradient of one.
        gathered = 3 * 2.0 * setting.model.layer_parameters / setting.tensor
        gathered += 2.0 * setting.model.hidden * setting.model.vocabulary / setting.tensor
    return weights * (whole + sharded / shards) + gathered


def activation_bytes(
    setting: Setting, tokens: float, in_flight: int = 1, logits: bool = False, waiting: float = 0.0
) -> float:
    """Of `tokens` on a rank, with so many micro-batches between their forward and their backward.

    `logits`: all of them are there at once before the layers' backward begins. `waiting`: how many of the tokens are in
    a part that is being attended, and hold nothing of the MLP, while the other part runs its layers.
    """
    model = setting.model
    active = 1.0 - waiting / max(tokens, 1.0)
    work = 2.0 * (MLP_TENSORS * model.intermediate * active + HIDDEN_TENSORS * model.hidden)
    kept = 2.0 * model.hidden
    if not setting.checkpointing:
        kept = 2.0 * (SAVED_MLP * model.intermediate + SAVED_HIDDEN * model.hidden)
    if logits:
        work = max(work, LOGITS * model.vocabulary)
    return tokens * (kept * setting.layers * in_flight + work) / setting.tensor


def kept_output_bytes(setting: Setting, tokens: float, in_flight: int = 1) -> float:
    """O and LSE of a rank's own rows that CAD keeps over the recompute: of all layers but the one that is recomputed,
    which the working set counts."""
    if not setting.checkpointing or setting.recompute_attention:
        return 0.0
    row = setting.shape.query_heads * (2.0 * setting.shape.value_dim + LSE)
    return tokens * row * (_layers_kept(setting, setting.layers * in_flight) - 1)


def stage_bytes(setting: Setting, tokens: float, in_flight: tuple[int, int], kept: bool = False) -> float:
    """Activations of the fuller of the first and the last stage, with so many micro-batches in flight.

    `kept`: with O and LSE that are kept over the recompute.
    """
    ends = zip(in_flight, (False, True), strict=True)
    return max(
        activation_bytes(setting, tokens, count, logits) + (kept_output_bytes(setting, tokens, count) if kept else 0.0)
        for count, logits in ends
    )


def served_bytes(setting: Setting, traffic: Traffic) -> float:
    """What the fullest server keeps until its backward: O and LSE of what it served; without checkpointing Q, K and V
    too, which do not travel again then. With `keep` "host" all that is away while linear layers work, which need most.
    """
    if setting.keep == "host":
        return 0.0
    queries, keys, outputs = traffic.served
    kept = outputs * (1.0 + LSE / (2.0 * setting.shape.value_dim))
    if not setting.checkpointing:
        kept = kept + queries + keys
    layers = 1 if setting.checkpointing and setting.recompute_attention else setting.layers
    return float(kept.max(initial=0.0)) * layers


def _layers_kept(setting: Setting, layers: int) -> int:
    """Of how many layers a GPU holds what attention keeps: with `keep` "host" of the one at work and of the one before
    it, which is on its way back; the last layer of a forward never leaves."""
    return min(layers, 2) if setting.keep == "host" else layers


def landing_bytes(setting: Setting, traffic: Traffic, with_outputs: bool = False) -> float:
    """Landing areas: of what a server gets in backward, dO too, and of what comes home. As large on all ranks.

    `with_outputs`: O and LSE travel as well, as where another rank runs the backward (pipelines).
    """
    queries, keys, outputs = traffic.served
    more = 1.0 + LSE / (2.0 * setting.shape.value_dim) if with_outputs else 0.0
    there = float((queries + keys + outputs * (1.0 + more)).max(initial=0.0))
    areas = 2 if setting.copies_own_rows else 1
    return HEADROOM * (areas * there + traffic.comes_home)
