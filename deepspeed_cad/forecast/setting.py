"""What is simulated: a model on a cluster, how the ranks are split, and how it is trained.

Seats: of `ranks` GPUs, `tensor` together hold one part of a layer's weights and `pipeline` hold the layers one after
the other; what is left are the seats, `ranks ÷ tensor ÷ pipeline`, each with a row of tokens of its own. Data and
context parallelism are both among seats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from deepspeed_cad.cost import CostModel
from deepspeed_cad.errors import CADConfigError
from deepspeed_cad.forecast.attention_seconds import Floats
from deepspeed_cad.forecast.machine import Cluster, Machine
from deepspeed_cad.forecast.model_shape import ModelShape, Work, work_per_token
from deepspeed_cad.forecast.step import Run
from deepspeed_cad.layout import Ints, Layout
from deepspeed_cad.planner.constants import TRAVELS, WAVES
from deepspeed_cad.planner.plan import HeadShape, Plan


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
    """Whether CAD deals documents out to seats before each step."""
    forwards: int = 0
    """Passes of a step without backward over the same micro-batches, beside the one that trains: as many models, or
    as often, as a trainer of rollouts asks for log-probabilities, values or rewards."""
    forward_only: bool = False
    """Whether this is one of them."""
    made: Mapping[int, tuple[Layout, Plan]] = field(default_factory=dict, compare=False, repr=False)
    """Plans in place that were made already, each with its layout, by the layout's `id`."""
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
        """Layers that attend."""
        return self.model.attending // self.pipeline

    @property
    def shape(self) -> HeadShape:
        """Heads of a layer on one rank of a seat."""
        return seat_shape(self.model, self.sharing)

    @property
    def work(self) -> Work:
        """Seconds per token outside attention."""
        return work_per_token(self.model, self.machine, self.sharing, self.pipeline > 1 or self.loss == "whole")

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
        """Of a pass without backward."""
        return replace(self, forward_only=True, forwards=0, recompute_attention=False, optimizer=False, made={})

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
    groups = max(1, model.kv_heads // sharing)
    return HeadShape(model.heads // sharing, groups, model.head_dim, model.head_dim, 2)


def check_split(model: ModelShape, ranks: int, tensor: int, pipeline: int, sequence: int = 1) -> None:
    """Raise CADConfigError where ranks or heads or layers cannot be divided, or not in two ways."""
    for name, value in (
        ("ranks", ranks), ("tensor parallelism", tensor), ("pipeline stages", pipeline), ("Ulysses", sequence)
    ):  # fmt: skip
        if value < 1:
            raise CADConfigError(f"{name} is {value}; expected at least 1")
    if sequence > 1 and tensor * pipeline > 1:
        other = "tensor parallelism" if tensor > 1 else "pipeline stages"
        raise CADConfigError(f"Ulysses together with {other}, which CAD refuses: set one of them to 1")
    if sequence > 1 and (ranks % sequence or model.heads % sequence):
        raise CADConfigError(f"{ranks} ranks and {model.heads} heads cannot be divided by {sequence} ranks of Ulysses")
    if ranks % (tensor * pipeline):
        raise CADConfigError(
            f"{ranks} ranks cannot be divided into {tensor} tensor-parallel × {pipeline} pipeline parts: "
            f"give a multiple of {tensor * pipeline}"
        )
    if model.heads % tensor or (model.kv_heads % tensor and tensor % model.kv_heads):
        raise CADConfigError(
            f"{model.heads} query and {model.kv_heads} KV heads cannot be divided by {tensor} tensor-parallel ranks"
        )
    if model.layers % pipeline:
        raise CADConfigError(f"{model.layers} layers cannot be divided into {pipeline} pipeline stages")
