"""What of a model decides how much of a step is attention, and the seconds of all else in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from deepspeed_cad.forecast.machine import Machine


@dataclass(frozen=True)
class StateLayers:
    """Layers of a hybrid that carry state: delta nets, Mamba, short convolutions."""

    count: int
    attending: int
    """How many layers attend. Some models do both in one layer."""
    parameters: int
    """Weights of the matrices of one."""
    taken: int
    """Elements of a token that its recurrent kernel takes; 0: it has none."""
    given: int
    """Likewise, that it gives."""
    heads: tuple[int, ...]
    """Of the tensors that the kernel takes."""


@dataclass(frozen=True)
class ModelShape:
    layers: int = 32
    hidden: int = 4096
    intermediate: int = 14336
    vocabulary: int = 128256
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    not_counted: str = ""
    """What of the model a forecast takes for a layer of full attention and one MLP, in words."""
    state: StateLayers | None = None
    """Its layers that carry state; None: it has none."""

    @property
    def attending(self) -> int:
        """How many layers attend."""
        return self.layers if self.state is None else self.state.attending

    @property
    def layer_parameters(self) -> int:
        """Weights of the matrices of one layer: Q, K, V and O, and a gated MLP; of a hybrid in the mean."""
        own = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        if self.state is not None:
            own = (own * self.attending + self.state.parameters * self.state.count) // self.layers
        return own + 3 * self.hidden * self.intermediate

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + 2 * self.hidden * self.vocabulary

    @property
    def row_flops(self) -> float:
        """Forward work of one token outside core attention."""
        return 2.0 * (self.layers * self.layer_parameters + self.hidden * self.vocabulary)

    @property
    def pair_flops(self) -> float:
        """Forward work of one query-key pair in all layers and heads."""
        return 4.0 * self.attending * self.heads * self.head_dim


SHAPES = {
    "llama-8b": ModelShape(),
    "llama-34b": ModelShape(layers=48, hidden=8192, intermediate=22016, vocabulary=32000, heads=64, kv_heads=8),
    "llama-70b": ModelShape(layers=80, hidden=8192, intermediate=28672, vocabulary=128256, heads=64, kv_heads=8),
    "qwen3.5-9b": ModelShape(
        layers=32, hidden=4096, intermediate=12288, vocabulary=248320, heads=16, kv_heads=4, head_dim=256,
        state=StateLayers(24, 8, 4096 * (8192 + 2 * 4096 + 2 * 32), 8192, 4096, (16, 32)),
    ),
}  # fmt: skip
"""Usual sizes by name."""


# Work outside core attention. Matrix products are counted in floating-point operations, everything else in passes over
# memory as eager kernels of transformers make them: bytes per element in bf16, read and written, with fp32 where the
# model goes there; in forward and in backward.

NORM = (36, 60)
"""Per element of the hidden size: RMSNorm goes to fp32 and back in six kernels."""
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


class Work(NamedTuple):
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
        model.hidden * (2 * norm + residual) + turned * rotation + model.intermediate * activation + carried * step
        for norm, residual, rotation, activation, step in zip(NORM, RESIDUAL, ROTATION, ACTIVATION, STATE)
    )
    product = 2.0 * model.layer_parameters / machine.matrix_flops
    logits = (WHOLE_LOSS if whole_loss else LOSS) * model.vocabulary / machine.memory_rate
    loss = 6.0 * model.hidden * model.vocabulary / machine.matrix_flops + logits
    return Work(
        (product + forward / machine.memory_rate) / tensor,
        (2.0 * product + backward / machine.memory_rate) / tensor,
        loss / tensor,
    )
