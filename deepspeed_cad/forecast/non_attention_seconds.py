"""Work outside core attention: seconds per token of linear layers, norms, activations and the loss.

Matrix products are counted in floating-point operations, everything else in passes over memory as eager kernels of
transformers make them. Bytes below are per element in bf16, read and written, with fp32 where the model goes there.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed_cad.forecast.machine import Machine
from deepspeed_cad.forecast.model_shape import ModelShape

NORM = (36, 60)
"""Forward and backward, per element of the hidden size: RMSNorm goes to fp32 and back in six kernels."""
ROTATION = (18, 24)
"""Per element of Q and K: rotary positions."""
ACTIVATION = (10, 18)
"""Per element of the width of the MLP: SiLU and the product with the other half."""
RESIDUAL = (12, 12)
"""Per element of the hidden size: two sums."""
STATE = (169, 338)
"""Per element that a recurrent kernel takes or gives of a token: convolution, kernel, gates and norm of a delta net.
From one run, the step without attention (benchmarks/results/h200x2/hybrid_prolong_64k_2r_b064ed1.json:
flash-linear-attention, no causal-conv1d); that backward takes twice as long as forward is assumed."""
LOSS = 40
"""Per logit: a cross entropy over pieces of rows, in fp32."""
WHOLE_LOSS = 60
"""The same where all logits of a micro-batch are there at once, as in the last stage of a pipeline: to fp32,
log-softmax, its gradient, that of leaving out the last row, and back."""
OPTIMIZER = 40
"""Per parameter of a shard: AdamW on fp32 state, the gradient to fp32, the weight back to bf16."""
ON_HOST = 36
"""Likewise of an optimizer on the host, in its memory: fp32 weight and moments read and written, the gradient written
and read, the weight in bf16 written and read."""
HOST_RATE = 4.0e10
"""Bytes a second of a GPU's share of its host's memory: assumed, two sockets of 300 GB/s for eight GPUs, half of it
reached."""


@dataclass(frozen=True)
class Work:
    """Seconds per token on one rank of a tensor-parallel group."""

    forward: float
    """One layer; of a hybrid in the mean."""
    backward: float
    """The same, without a recompute."""
    loss: float
    """Head and loss, forward and backward."""


def work_per_token(model: ModelShape, machine: Machine, tensor: int = 1, whole_loss: bool = False) -> Work:
    """Linear layers shared by `tensor` ranks, norms too (as with sequence parallelism inside the group)."""
    turned = model.head_dim * (model.heads + model.kv_heads) * model.attending / model.layers
    state = model.state
    carried = 0.0 if state is None else (state.taken + state.given) * state.count / model.layers
    forward, backward = (
        (
            model.hidden * (2 * NORM[way] + RESIDUAL[way])
            + turned * ROTATION[way]
            + model.intermediate * ACTIVATION[way]
            + carried * STATE[way]
        )
        / machine.memory_rate
        for way in range(2)
    )
    product = 2.0 * model.layer_parameters / machine.matrix_flops
    head = model.hidden * model.vocabulary
    logits = (WHOLE_LOSS if whole_loss else LOSS) * model.vocabulary
    loss = 6.0 * head / machine.matrix_flops + logits / machine.memory_rate
    return Work((product + forward) / tensor, (2.0 * product + backward) / tensor, loss / tensor)


def before_attention(model: ModelShape) -> float:
    """Of a layer's linear part the share that lies before its attention: the projections to Q, K and V."""
    return model.hidden * model.head_dim * (model.heads + 2 * model.kv_heads) / model.layer_parameters


def optimizer_seconds(machine: Machine, parameters: float, shards: int, on_host: bool = False) -> float:
    """Seconds of one optimizer step: its own shard, and setting all gradients of the rank to zero."""
    own = ON_HOST / HOST_RATE if on_host else OPTIMIZER / machine.memory_rate
    return own * parameters / shards + 2.0 * parameters / machine.memory_rate
