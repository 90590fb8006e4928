"""From seconds of micro-batches to a step: what is not attention, who waits for whom, and what collectives add.

Where ranks meet decides what they wait for. ZeRO-1 meets at the end of a step, so that micro-batches of one rank make
up for each other; ZeRO-2, ZeRO-3 and FSDP meet in every micro-batch; pipeline stages meet at every hand-over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from deepspeed_cad.forecast.attention_seconds import Both, Floats
from deepspeed_cad.forecast.bytes_held import state_bytes
from deepspeed_cad.forecast.compared import RUNS
from deepspeed_cad.forecast.non_attention_seconds import optimizer_seconds
from deepspeed_cad.forecast.setting import Setting, seat_shape
from deepspeed_cad.forecast.step import Foreseen, Seconds
from deepspeed_cad.planner.plan import HeadShape


class NonAttention(NamedTuple):
    """Seconds of one stage outside attention, for some numbers of tokens."""

    layers: Both
    """Recompute included; head and loss too where there is one stage."""
    tensor: Both
    """What tensor parallelism gathers and scatters of activations, twice each way around a layer, or what Ulysses moves
    around attention."""
    hop: Floats
    """What a stage waits for the activations of a micro-batch, or for their gradient, once they are made."""
    loss: Floats
    """Head and loss, which the last of several stages has beside its layers."""

    @property
    def each(self) -> Both:
        """Layers, with what tensor parallelism adds and the hop to the next stage."""
        return self.layers + self.tensor + Both(self.hop, self.hop)


def non_attention(setting: Setting, tokens: Floats) -> NonAttention:
    """Of `tokens` at a seat, elementwise."""
    work, layers, staged = setting.work, setting.layers, setting.pipeline > 1
    loss = tokens * work.loss
    head = setting.head * (not staged)
    forward = layers * tokens * work.forward + tokens * head.forward
    own = setting.in_pass(Both(forward, layers * tokens * work.backward + tokens * head.backward))
    once = 0.0 * tokens
    if setting.tensor > 1:
        latency = setting.machine.latency
        each = setting.cluster.gather(2.0 * setting.model.hidden, setting.tensor) - latency
        once = layers * 4.0 * (tokens * each + latency)
    if setting.sequence > 1:
        size = tokens / setting.sequence * ulysses_bytes(seat_shape(setting.model, 1), setting.sequence)
        once = layers * for_each(size, lambda one: setting.cluster.all_to_all(one, setting.sequence))
    per_token, at_least = setting.hop
    hop = np.where(tokens > 0, tokens * per_token + at_least, 0.0) if staged else 0.0 * tokens
    return NonAttention(own, setting.in_pass(Both(once, once)), hop, loss if staged else 0.0 * tokens)


def ulysses_bytes(shape: HeadShape, degree: int) -> float:
    """That leave a rank with a token and layer: Q, K and V, and O back. Where there are fewer KV heads than ranks, each
    is sent to all ranks that need it."""
    heads = 2.0 * shape.query_heads + 2.0 * max(shape.groups, degree)
    return heads * shape.head_dim * shape.bytes_per_element


def for_each(sizes: Floats, seconds: Callable[[float], float]) -> Floats:
    """A link's seconds for each of some sizes."""
    return np.vectorize(seconds, otypes=[float])(sizes)


def weight_seconds(setting: Setting, passes: int, layer: Both, seats: int) -> float:
    """What gathering weights and scattering gradients adds to a step in which `passes` micro-batches run.

    `layer`: seconds of one layer's forward and backward, behind which the next layer's weights are fetched. `seats`:
    how many share the model's state.
    """
    cluster, tensor, seats = setting.cluster, setting.tensor, seats * setting.sequence
    whole = cluster.gather(2.0 * setting.stage_parameters, seats, tensor)
    if setting.sharding == "zero1" or (setting.forward_only and setting.sharding == "zero2"):
        return 2.0 * whole if setting.optimizer else 0.0
    forward, backward = float(np.mean(layer.forward)), float(np.mean(layer.backward))
    if setting.sharding == "zero2":
        return passes * max(0.0, whole - setting.layers * backward) + whole
    weights = cluster.gather(2.0 * setting.model.layer_parameters / tensor, seats, tensor)
    # FSDP reduces gradients in fp32, DeepSpeed in bf16.
    gradients = weights * (2.0 if setting.sharding == "fsdp" else 1.0)
    late = max(0.0, weights - forward)
    if setting.forward_only:
        return passes * (setting.layers * late + weights)
    late += max(0.0, weights + gradients - backward)
    return passes * (setting.layers * late + weights + gradients)


def finish(
    setting: Setting, mode: str, tokens: Floats, attention: Both, exchange: Both, moved: Floats, **figures: Any
) -> Foreseen:
    """The step that groups of seats make of micro-batches, one after the other.

    Args:
        setting: model, cluster, how it is trained.
        mode: its name.
        tokens: [micro-batches, groups] of a micro-batch at one seat.
        attention: [micro-batches, groups] seconds at a seat of one stage, as often as layers run it.
        exchange: likewise, of exchanges that nothing hides.
        moved: [2] bytes that a rank sends inside its host and to others.
        figures: peak and degree, as in `Foreseen`.
    """
    other = non_attention(setting, tokens)
    each = other.each + attention + exchange
    if setting.pipeline > 1:
        ran = one_forward_one_backward(each.forward, each.backward, setting.pipeline, other.loss).max()
    elif setting.sharding == "zero1" or (setting.forward_only and setting.sharding == "zero2"):
        ran = each.total.sum(0).max()
    else:
        ran = each.total.max(1).sum()
    parts = (other.layers.total + other.loss / setting.pipeline, attention.total, exchange.total, other.tensor.total)
    mean = Seconds(*(float(part.sum(0).mean()) for part in parts))
    trained = float(tokens.sum()) * setting.seats / tokens.shape[1]
    return compose(setting, mode, float(ran), mean, len(tokens), trained, moved, **figures)


def one_forward_one_backward(forward: Floats, backward: Floats, stages: int, last: Floats | float = 0.0) -> Floats:
    """[pipelines]: seconds of a step; `forward` and `backward` are [micro-batches, pipelines], of one stage.

    A stage runs forwards until the pipeline is full, then one backward and one forward in turn (1F1B). `last`: what the
    last stage does before each backward: head and loss. CAD's stages share attention and run in lockstep rounds.
    """
    count, backwards = len(forward), [backward] * (stages - 1) + [backward + last]
    done = np.full((2, stages, *forward.shape), np.nan)
    free = np.zeros((stages, forward.shape[1]))
    queues = []
    for stage in range(stages):
        early = min(stages - stage, count)
        turns = ((1, m) if way else (0, early + m) for m in range(count) for way in (1, 0))
        queues.append(deque([*((0, m) for m in range(early)), *(turn for turn in turns if turn[1] < count)]))
    while any(queues):
        for stage, queue in enumerate(queues):
            while queue:
                way, m = queue[0]
                if way:
                    before = done[0, stage, m] if stage == stages - 1 else done[1, stage + 1, m]
                else:
                    before = done[0, stage - 1, m] if stage else 0.0 * forward[m]
                if np.isnan(before).any():
                    break
                free[stage] = done[way, stage, m] = (
                    np.maximum(free[stage], before) + (backwards[stage] if way else forward)[m]
                )
                queue.popleft()
    return np.asarray(free.max(0))


def compose(
    setting: Setting,
    mode: str,
    ran: float,
    mean: Seconds,
    passes: int,
    tokens: float,
    moved: Floats,
    holders: int | None = None,
    **figures: Any,
) -> Foreseen:
    """A step of micro-batches that took `ran` seconds, of which the mean rank worked as `mean` says.

    `passes`: micro-batches one after the other; `tokens`: of all of them at all seats; `holders`: seats that hold the
    model, where others only serve; for the others see `finish`.
    """
    work = np.array([(mean.non_attention + mean.attention) / passes / setting.layers])
    holders = setting.seats if holders is None else holders
    forward = 1.0 if setting.forward_only else 0.25
    weights = weight_seconds(setting, passes, Both(work * forward, work * (1.0 - forward)), holders)
    seconds = mean._replace(
        collectives=mean.collectives + weights,
        optimizer=setting.optimizer
        * optimizer_seconds(
            setting.machine, setting.stage_parameters, holders * setting.sequence, setting.offload_optimizer
        ),
        waiting=max(0.0, ran - mean.total),
    )
    inside, between = map(float, moved)
    state = state_bytes(setting, holders)
    return Foreseen(
        mode,
        seconds,
        tokens,
        setting.cluster.ranks,
        inside,
        between,
        state=state,
        offloadable=state - state_bytes(replace(setting, offload_optimizer=setting.sharding != "fsdp"), holders),
        capacity=setting.machine.memory,
        measured=setting.kind_of_run(mode) in RUNS,
        repeats=setting.checkpointing
        and (setting.recompute_attention if mode.startswith("cad") else not mode.endswith(" kept")),
        **figures,
    )
