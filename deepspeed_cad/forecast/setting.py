"""What is simulated: a model and the seconds of all in it but attention, a cluster, how the ranks are split, and how it
is trained.

Seats: of `ranks` GPUs, `tensor` together hold one part of a layer's weights and `pipeline` hold the layers one after
the other; what is left are the seats, `ranks ÷ tensor ÷ pipeline`, each with a row of tokens of its own. Data and
context parallelism are both among seats.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from deepspeed_cad.cost import CostModel
from deepspeed_cad.errors import CADConfigError
from deepspeed_cad.forecast.machine import Cluster, Machine
from deepspeed_cad.forecast.step import Run
from deepspeed_cad.layout import Ints
from deepspeed_cad.planner.constants import TRAVELS, WAVES
from deepspeed_cad.planner.plan import Floats, HeadShape


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
    hands_on: bool
    """Whether the kernel takes a state and gives one; else heads part where documents span ranks."""


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
    batch_rope: str = ""
    """Its RoPE type, where that rotates every document of a row by the longest one."""

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

    def flops(self, pairs: float) -> float:
        """Forward work of one token, which has so many query-key pairs in each head of a layer."""
        linear = 2.0 * (self.layers * self.layer_parameters + self.hidden * self.vocabulary)
        return linear + 4.0 * self.attending * self.heads * self.head_dim * pairs


SHAPES = {
    "llama-8b": ModelShape(),
    "llama-34b": ModelShape(layers=48, hidden=8192, intermediate=22016, vocabulary=32000, heads=64, kv_heads=8),
    "llama-70b": ModelShape(layers=80, hidden=8192, intermediate=28672, vocabulary=128256, heads=64, kv_heads=8),
    "qwen3.5-9b": ModelShape(
        layers=32, hidden=4096, intermediate=12288, vocabulary=248320, heads=16, kv_heads=4, head_dim=256,
        state=StateLayers(24, 8, 4096 * (8192 + 2 * 4096 + 2 * 32), 8192, 4096, True),
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


@dataclass(frozen=True)
class Setting:
    model: ModelShape
    cluster: Cluster
    cost: CostModel
    """Attention of one head group, in seconds: `Profile.cost_for(seat_shape(model, sharing))`."""
    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1
    """Ranks that Ulysses divides each row among, inside whose attention modes run: `tensor` or this is 1."""
    sharding: Literal["zero1", "zero2", "zero3", "fsdp"] = "zero1"
    checkpointing: bool = True
    """Whether layers are recomputed in backward."""
    recompute_attention: bool = False
    """Whether CAD repeats attention and its exchange in the recompute, as other modes do."""
    keep: Literal["device", "host"] = "device"
    """Where what CAD's attention keeps for its backward waits. Copies are taken for hidden, and the host's memory for
    enough."""
    waves: tuple[int, ...] = WAVES
    """In how many waves what CAD moves may go where there are several hosts: plans choose among them."""
    believed: CostModel | None = None
    """What the planner takes for the cost; None: `cost`. For planners that count pairs alone."""
    tolerance: float = 0.05
    deals: bool = False
    """Whether CAD may deal documents out to seats before each step."""
    forwards: int = 0
    """Passes of a step without backward over the same micro-batches, beside the one that trains: as many models, or
    as often, as a trainer of rollouts asks for log-probabilities, values or rewards."""
    forward_only: bool = False
    """Whether this setting describes one such pass."""
    loss: Literal["chunked", "whole"] = "chunked"
    """Whether the logits of a row are there at once, in fp32, as transformers' own loss has them. The last stage of a
    pipeline always has them so."""
    offload_optimizer: bool = False
    """Whether the optimizer's state lies in the host's memory, which is taken for enough, and works there."""
    optimizer: bool = True
    """Whether a step ends with the optimizer."""
    held: tuple[float, float] | None = None
    """Bytes of a weight with its gradient and optimizer state: on every rank, and shared by all. None: bf16 with AdamW
    in fp32, as `sharding` shares them."""

    def __post_init__(self) -> None:
        """Raise CADConfigError for what cannot be; put the links' speeds into the cost, which plans heed."""
        check_split(self.model, self.cluster.ranks, self.tensor, self.pipeline, self.sequence)
        if self.pipeline > 1 and self.sharding != "zero1":
            raise CADConfigError(
                f"sharding is {self.sharding!r} with {self.pipeline} pipeline stages; expected zero1, as pipelines need"
            )
        if self.pipeline > 1 and self.model.state is not None:
            raise CADConfigError("CAD refuses pipelines of models with layers that carry state; expected 1 stage")
        if self.cost.unit != "seconds":
            raise CADConfigError(f"the cost {self.cost.name!r} is in {self.cost.unit}; expected a profile in seconds")
        inside, between = TRAVELS / self.machine.copies, TRAVELS / self.machine.between
        object.__setattr__(self, "cost", replace(self.cost, byte_inside=inside, byte_between=between))

    @property
    def machine(self) -> Machine:
        return self.cluster.machine

    def kind_of_run(self, mode: str) -> Run:
        """What a run of a mode must have in common with this for its prediction to count as compared."""
        # Which no run did.
        shared = f", {self.sharing} share heads" * (self.sharing > 1) + ", more passes" * (self.forwards > 0)
        return Run(self.machine.name, mode + shared, self.cluster.ranks, self.sharding, self.pipeline)

    @property
    def repeats_attention(self) -> bool:
        """Whether CAD's attention runs again in backward."""
        return self.checkpointing and self.recompute_attention

    @property
    def sharing(self) -> int:
        """Ranks of a seat: each has a share of the heads of the same tokens."""
        return self.tensor * self.sequence

    @property
    def seats(self) -> int:
        """Parts of a micro-batch that are trained side by side."""
        return self.cluster.ranks // (self.sharing * self.pipeline)

    @property
    def layers(self) -> int:
        return self.model.layers // self.pipeline

    @property
    def attending(self) -> int:
        return self.model.attending // self.pipeline

    @property
    def shape(self) -> HeadShape:
        """Heads of a layer on one rank of a seat."""
        return seat_shape(self.model, self.sharing)

    @property
    def work(self) -> Work:
        """Linear layers shared by the ranks of a seat, norms too (as with sequence parallelism inside the group)."""
        model, machine, state = self.model, self.machine, self.model.state
        turned = model.head_dim * (model.heads + model.kv_heads) * model.attending / model.layers
        carried = 0.0 if state is None else (state.taken + state.given) * state.count / model.layers
        forward, backward = (
            model.hidden * (2 * norm + residual) + turned * rotation + model.intermediate * activation + carried * step
            for norm, residual, rotation, activation, step in zip(NORM, RESIDUAL, ROTATION, ACTIVATION, STATE)
        )
        product = 2.0 * model.layer_parameters / machine.matrix_flops
        of_logit = WHOLE_LOSS if self.pipeline > 1 or self.loss == "whole" else LOSS
        logits = of_logit * model.vocabulary / machine.memory_rate
        return Work(
            (product + forward / machine.memory_rate) / self.sharing,
            (2.0 * product + backward / machine.memory_rate) / self.sharing,
            (6.0 * model.hidden * model.vocabulary / machine.matrix_flops + logits) / self.sharing,
        )

    @property
    def head(self) -> Floats:
        """[2] seconds per token of head and loss; of a forward alone one of the head's three matrix products."""
        return np.array([self.work.loss / 3, 0.0] if self.forward_only else [0.0, self.work.loss])

    def in_pass(self, seconds: Floats, kept: bool = False) -> Floats:
        """What a pass runs of forward and backward, [2, …]: both, and the forward twice where checkpointing repeats
        what is not `kept`."""
        forward, backward = seconds
        again = forward * (self.checkpointing and not kept)
        return np.stack([forward, 0.0 * backward if self.forward_only else backward + again])

    @property
    def of_forward(self) -> Setting:
        return replace(self, forward_only=True, forwards=0, recompute_attention=False, optimizer=False)

    @property
    def seats_per_host(self) -> int:
        """Seats whose ranks share a host."""
        return min(self.seats, max(1, self.cluster.per_host // self.sharing))

    @property
    def hosts(self) -> Ints | None:
        """Number of each seat's host, of all pipeline stages one behind the other; None where all share one."""
        hosts = self.cluster.hosts[:: self.sharing][: self.seats * self.pipeline]
        return hosts if (hosts != hosts[0]).any() else None

    @property
    def stage_parameters(self) -> float:
        """Weights that one rank computes with: its layers, and embedding or head of the first and last stage."""
        ends = 2 if self.pipeline == 1 else 1
        own = self.layers * self.model.layer_parameters + ends * self.model.hidden * self.model.vocabulary
        return own / self.tensor


def seat_shape(model: ModelShape, sharing: int) -> HeadShape:
    """Heads of a layer on one of the ranks that share them; KV heads are repeated where they are fewer."""
    return HeadShape(model.heads // sharing, max(1, model.kv_heads // sharing), model.head_dim, model.head_dim, 2)


def check_split(model: ModelShape, ranks: int, tensor: int, pipeline: int, sequence: int = 1) -> None:
    """Raise CADConfigError where ranks or heads or layers cannot be divided, or not in two ways."""
    sizes = {"ranks": ranks, "tensor parallelism": tensor, "pipeline stages": pipeline, "Ulysses": sequence}
    parts = tensor * pipeline
    name, low = min(sizes.items(), key=lambda one: one[1])
    if low < 1:
        raise CADConfigError(f"{name} is {low}; expected at least 1")
    other, kv_heads = "tensor parallelism" if tensor > 1 else "pipeline stages", model.kv_heads
    heads = f"{model.heads} query and {kv_heads} KV heads cannot be divided by {tensor} tensor-parallel ranks"
    for wrong, words in (
        (sequence > 1 and parts > 1, f"Ulysses together with {other}, which CAD refuses: set one of them to 1"),
        (
            ranks % sequence or model.heads % sequence,
            f"{ranks} ranks and {model.heads} heads cannot be divided by {sequence} ranks of Ulysses",
        ),
        (
            ranks % parts,
            f"{ranks} ranks cannot be divided into {tensor} tensor-parallel × {pipeline} pipeline parts: give a "
            f"multiple of {parts}",
        ),
        (model.heads % tensor or (kv_heads % tensor and tensor % kv_heads), heads),
        (model.layers % pipeline, f"{model.layers} layers cannot be divided into {pipeline} pipeline stages"),
    ):
        if wrong:
            raise CADConfigError(words)
