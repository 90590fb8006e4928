"""Memory of the fullest rank: weights and their state, activations, and what attention's exchanges hold.

Counts are per token and rank in bf16; peaks are what torch allocates. The working set of a layer that is being
recomputed was measured in plain training (277 KB a token at hidden 4096 and FFN 14336): the MLP's backward holds four
tensors of its width and three gradients of them; what is left is nine and a half of the hidden size, in part fp32.
"""

import numpy as np

from deepspeed_cad.forecast.setting import Setting
from deepspeed_cad.planner.plan import O_RECEIVED, QKV_SENT, Flows

MLP_TENSORS = 7.0
HIDDEN_TENSORS = 9.4
"""Bytes of the working set over 2 bytes × the hidden size, and of its width; see above."""
STATE_BYTES = 11.0
"""Of the working set of a layer that carries state, beside what one that attends has: for each element that its kernel
takes or gives of a token. From the run that STATE (setting.py) is from."""
SAVED_MLP = 4.0
SAVED_HIDDEN = 12.0
"""Tensors that autograd keeps of a layer without checkpointing: counted in transformers' Llama, not measured."""
LOGITS = 18.0
"""Bytes of a logit in the last stage of a pipeline, where all of a micro-batch are there at once: one in bf16, four in
fp32 (the logits, log-softmax, its gradient, and that of all rows). As measured (benchmarks/results)."""
WHOLE_LOGITS = 12.0
"""The same with transformers' own loss: log-softmax, and in its backward two gradients, in fp32. Counted
(tests/unit/test_simulator.py); 14 where a script holds the model's output, and so the logits, through the backward."""
OFFLOADED = 12.0
"""Bytes of a weight that an offloaded optimizer takes to the host: the weight and AdamW's two moments, in fp32."""
HEADROOM = 1.25
"""Of a landing area over what it must hold: as in schedule/waves.py, where no limit binds."""
LSE = 4.0
"""Bytes, of a row and head."""


def state_bytes(setting: Setting, shards: int) -> float:
    """Weights, gradients and the fp32 state of AdamW, sharded over so many ranks."""
    weights = setting.stage_parameters
    whole = {"zero1": 4.0, "zero2": 2.0, "zero3": 0.0, "fsdp": 0.0}[setting.sharding]
    whole, sharded = setting.held or (whole, 16.0 - whole - OFFLOADED * setting.offload_optimizer)
    gathered = 0.0
    if setting.sharding in ("zero3", "fsdp"):
        # The layer at work and the one that is fetched, and the gradient of one.
        gathered = 3 * 2.0 * setting.model.layer_parameters / setting.tensor
        gathered += 2.0 * setting.model.hidden * setting.model.vocabulary / setting.tensor
    return weights * (whole + sharded / (shards * setting.sequence)) + gathered


def loss_bytes(setting: Setting) -> float:
    """Of a token at most, while head and loss run: 0.0 where they do so in chunks."""
    each = LOGITS if setting.pipeline > 1 else WHOLE_LOGITS if setting.loss == "whole" else 0.0
    return each * setting.model.vocabulary


def activation_bytes(
    setting: Setting, tokens: float, in_flight: tuple[int, int] = (1, 1), kept: bool = False, waiting: float = 0.0
) -> float:
    """Of `tokens` of a micro-batch on a rank; in a pipeline, of the fuller of its first and its last stage.

    `in_flight`: micro-batches between forward and backward at these stages; at the last all logits of one are there at
    once before the layers' backward begins. `kept`: with O and LSE that are kept over the recompute. `waiting`: tokens
    of a part that is being attended, and holds nothing of the MLP, while the other part runs."""
    model = setting.model
    active = 1.0 - waiting / max(tokens, 1.0)
    state = model.state
    carried = 0.0 if state is None else STATE_BYTES * (state.taken + state.given)
    work = 2.0 * (MLP_TENSORS * model.intermediate * active + HIDDEN_TENSORS * model.hidden) + carried
    saved = 2.0 * model.hidden
    if not setting.checkpointing:
        saved = 2.0 * (SAVED_MLP * model.intermediate + SAVED_HIDDEN * model.hidden)
        saved += carried * (1.0 - model.attending / model.layers)
    return max(
        tokens * (saved * setting.layers * count + most) / setting.sharing
        + (kept_output_bytes(setting, tokens, count) if kept else 0.0)
        for count, most in zip(in_flight, (work, max(work, loss_bytes(setting))))
    )


def kept_output_bytes(setting: Setting, tokens: float, in_flight: int = 1) -> float:
    """O and LSE of a rank's own rows that are kept over the recompute: of all layers but the one that is recomputed,
    which the working set counts. With `keep` "host" of the one at work and of the one before it, which is on its way
    back; the last layer of a forward never leaves."""
    if not setting.checkpointing or setting.recompute_attention:
        return 0.0
    row = setting.shape.query_heads * (2.0 * setting.shape.value_dim + LSE)
    layers = setting.attending * in_flight
    return tokens * row * (min(layers, 2 if setting.keep == "host" else layers) - 1)


def key_bytes(setting: Setting, tokens: float) -> float:
    """K and V of `tokens` of a first part that the second one reads: of all layers from their forward to their
    backward, which autograd keeps anyway without checkpointing; and while the second part attends, a copy of one
    layer's, and their gradients."""
    row = setting.shape.groups * setting.shape.key_value_bytes
    return tokens * row * (setting.attending * setting.checkpointing + 2)


def served_bytes(setting: Setting, flows: Flows, seats: slice = slice(None)) -> float:
    """What the fullest of some servers keeps until its backward: O and LSE of what it served; without checkpointing Q,
    K and V too, which do not travel again then. With `keep` "host" all that is away while other layers work, which need
    most."""
    if setting.keep == "host":
        return 0.0
    rows, keys, shape = *flows.served, setting.shape
    held = rows * (shape.output_bytes * (1.0 + LSE / (2.0 * shape.value_dim)))
    if not setting.checkpointing:
        held = held + rows * shape.query_bytes + keys * shape.key_value_bytes
    layers = 1 if setting.repeats_attention else setting.attending
    return float(held[seats].max(initial=0.0)) * layers


def landing_bytes(setting: Setting, flows: Flows, with_outputs: bool = False) -> float:
    """Landing areas: of what a server gets in backward, dO too, and of what comes home. As large on all ranks.

    `with_outputs`: O and LSE travel as well, as where another rank runs the backward (pipelines)."""
    rows, keys, shape = *flows.served, setting.shape
    more = 1.0 + LSE / (2.0 * shape.value_dim) if with_outputs else 0.0
    row = shape.query_bytes + shape.output_bytes * (1.0 + more)
    there = float((rows * row + keys * shape.key_value_bytes).max(initial=0.0))
    return HEADROOM * (there + float(np.maximum(flows.bytes[QKV_SENT], flows.bytes[O_RECEIVED]).sum(0).max(initial=0)))
