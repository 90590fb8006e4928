"""From seconds of micro-batches to a step: what is not attention, who waits for whom, and what collectives add."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from deepspeed_cad.forecast.attention import Floats
from deepspeed_cad.forecast.bytes_held import state_bytes
from deepspeed_cad.forecast.setting import Setting, seat_shape
from deepspeed_cad.forecast.step import RUNS, Foreseen, Seconds
from deepspeed_cad.planner.plan import HeadShape

OPTIMIZER = 40
"""Bytes per parameter of a shard: AdamW on fp32 state, the gradient to fp32, the weight back to bf16."""
ON_HOST = 36
"""Likewise of an optimizer on the host, in its memory: fp32 weight and moments read and written, the gradient written
and read, the weight in bf16 written and read."""
HOST_RATE = 4.0e10
"""Bytes a second of a GPU's share of its host's memory: assumed, two sockets of 300 GB/s for eight GPUs, half of it
reached."""


class NonAttention(NamedTuple):
    """Seconds of one stage outside attention, for some numbers of tokens."""

    layers: Floats
    """[2, …] recompute included; head and loss too where there is one stage."""
    tensor: Floats
    """[2, …] what tensor parallelism gathers and scatters of activations, twice each way around a layer, or what
    Ulysses moves around attention."""
    hop: Floats
    """What a stage waits for the activations of a micro-batch, or for their gradient, once they are made."""
    loss: Floats
    """Head and loss, which the last of several stages has beside its layers."""

    @property
    def each(self) -> Floats:
        """[2, …] layers, with what tensor parallelism adds and the hop to the next stage."""
        return self.layers + self.tensor + self.hop


def non_attention(setting: Setting, tokens: Floats) -> NonAttention:
    """Of `tokens` at a seat, elementwise."""
    work, layers, cluster, nothing = setting.work, setting.layers, setting.cluster, 0.0 * tokens
    staged = setting.pipeline > 1
    own = np.multiply.outer(layers * np.array(work[:2]) + setting.head * (not staged), tokens)
    once = nothing
    if setting.tensor > 1:
        latency = setting.machine.latency
        each = cluster.gather(2.0 * setting.model.hidden, setting.tensor) - latency
        once = layers * 4.0 * (tokens * each + latency)
    if setting.sequence > 1:
        size = tokens / setting.sequence * ulysses_bytes(seat_shape(setting.model, 1), setting.sequence)
        once = layers * cluster.all_to_all(size, setting.sequence)
    hop = nothing
    if staged:
        # Activations, or their gradient.
        rate = setting.machine.collective if cluster.per_host >= cluster.ranks else setting.machine.between
        size = tokens * (2.0 * setting.model.hidden / setting.tensor)
        hop = np.where(tokens > 0, size / rate + setting.machine.latency, 0.0)
    return NonAttention(
        setting.in_pass(own), setting.in_pass(np.stack([once, once])), hop, tokens * (work.loss * staged)
    )


def ulysses_bytes(shape: HeadShape, degree: int) -> float:
    """That leave a rank with a token and layer: Q, K and V, and O back. Where there are fewer KV heads than ranks, each
    is sent to all ranks that need it."""
    return (2.0 * shape.query_heads + 2.0 * max(shape.groups, degree)) * shape.head_dim * shape.bytes_per_element


def meets_at_the_end(setting: Setting) -> bool:
    """Whether ranks meet at the end of a step alone, so that micro-batches of one rank make up for each other. ZeRO-3,
    FSDP and, in backward, ZeRO-2 meet in every micro-batch."""
    return setting.sharding == "zero1" or (setting.forward_only and setting.sharding == "zero2")


def weight_seconds(setting: Setting, passes: int, forward: float, backward: float, seats: int) -> float:
    """What gathering weights and scattering gradients adds to a step in which `passes` micro-batches run.

    `forward`, `backward`: seconds of one layer, behind which the next layer's weights are fetched. `seats`: how many
    share the model's state."""
    cluster, tensor, seats = setting.cluster, setting.tensor, seats * setting.sequence
    whole = cluster.gather(2.0 * setting.stage_parameters, seats, tensor)
    if meets_at_the_end(setting):
        return 2.0 * whole * setting.optimizer
    if setting.sharding == "zero2":
        return passes * max(0.0, whole - setting.layers * backward) + whole
    weights = cluster.gather(2.0 * setting.model.layer_parameters / tensor, seats, tensor)
    late = max(0.0, weights - forward)
    gradients = 0.0
    if not setting.forward_only:
        # FSDP reduces gradients in fp32, DeepSpeed in bf16.
        gradients = weights * (2.0 if setting.sharding == "fsdp" else 1.0)
        late += max(0.0, weights + gradients - backward)
    return passes * (setting.layers * late + weights + gradients)


def one_forward_one_backward(each: Floats, stages: int, last: Floats | float = 0.0) -> Floats:
    """[pipelines]: seconds of a step; `each` is [2, micro-batches, pipelines], forward and backward of one stage.

    A stage runs forwards until the pipeline is full, then one backward and one forward in turn (1F1B). `last`: what the
    last stage does before each backward: head and loss. CAD's stages share attention and run in lockstep rounds."""
    done = np.zeros((2, stages, *each.shape[1:]))
    free = np.zeros((stages, each.shape[2]))
    loss = np.broadcast_to(last, each.shape[1:])
    # By the turns at which passes begin where all take equally long, each after what it waits for.
    turns = [(2 * m + s, 0, s, m) for s in range(stages) for m in range(each.shape[1])]
    turns += [(2 * (stages + m) - 1 - s, 1, s, m) for _, _, s, m in turns]
    for _, way, s, m in sorted(turns):
        end = s == stages - 1
        before = done[0, s, m] if way and end else done[1, s + 1, m] if way else done[0, s - 1, m] if s else 0.0
        free[s] = done[way, s, m] = np.maximum(free[s], before) + each[way, m] + loss[m] * (way and end)
    return np.asarray(free.max(0))


def compose(
    setting: Setting, mode: str, ran: float, mean: Seconds, passes: int, tokens: float, moved: Floats,
    holders: int | None = None, **figures: Any,
) -> Foreseen:  # fmt: skip
    """A step of micro-batches that took `ran` seconds, of which the mean rank worked as `mean` says, which has no
    weights, optimizer and waiting.

    `passes`: micro-batches one after the other; `tokens` of all of them at all seats. `moved`: [2] bytes that a rank
    sends inside its host and to others. `holders`: seats that hold the model, where others only serve. `figures`: peak,
    degree and the like, as in `Foreseen`."""
    machine, parameters = setting.machine, setting.stage_parameters
    layer = (mean.non_attention + mean.attention) / passes / setting.layers
    holders = setting.seats if holders is None else holders
    forward = 1.0 if setting.forward_only else 0.25
    weights = weight_seconds(setting, passes, layer * forward, layer * (1.0 - forward), holders)
    # Its own shard, and setting all gradients of the rank to zero.
    shard = ON_HOST / HOST_RATE if setting.offload_optimizer else OPTIMIZER / machine.memory_rate
    optimizer = parameters * (shard / (holders * setting.sequence) + 2.0 / machine.memory_rate)
    state = state_bytes(setting, holders)
    repeats = setting.recompute_attention if mode.startswith("cad") else not mode.endswith(" kept")
    return Foreseen(
        mode,
        mean._replace(
            collectives=mean.collectives + weights,
            optimizer=setting.optimizer * optimizer,
            waiting=max(0.0, ran - mean.total),
        ),
        tokens,
        setting.cluster.ranks,
        inside=float(moved[0]),
        between=float(moved[1]),
        state=state,
        offloadable=state - state_bytes(replace(setting, offload_optimizer=setting.sharding != "fsdp"), holders),
        capacity=machine.memory,
        measured=setting.kind_of_run(mode) in RUNS,
        repeats=setting.checkpointing and repeats,
        **figures,
    )
