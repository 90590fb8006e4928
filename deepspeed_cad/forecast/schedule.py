"""From seconds of micro-batches to a step: who waits for whom, and what collectives add.

In: for every micro-batch and group of seats, seconds of attention and of its exchange. Out: `Foreseen`.

Where ranks meet decides what they wait for. ZeRO-1 meets at the end of a step, so that micro-batches of one rank make
up for each other; ZeRO-2, ZeRO-3 and FSDP meet in every micro-batch; pipeline stages meet at every hand-over.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deepspeed_cad.forecast.attention_seconds import Both, Floats
from deepspeed_cad.forecast.bytes_held import state_bytes
from deepspeed_cad.forecast.non_attention_seconds import optimizer_seconds
from deepspeed_cad.forecast.one_forward_one_backward import one_forward_one_backward
from deepspeed_cad.forecast.setting import Setting
from deepspeed_cad.forecast.step import Foreseen, Seconds


@dataclass(frozen=True, eq=False)
class Rows:
    """What groups of seats train in a step, one micro-batch after the other; arrays are [micro-batches, groups]."""

    tokens: Floats
    """Of a micro-batch at one seat."""
    attention: Both
    """Seconds at a seat of one stage, as often as layers run it."""
    exchange: Both
    """Seconds of exchanges that nothing hides."""


@dataclass(frozen=True)
class Figures:
    """What a mode is foreseen to need beside its seconds; fields as those of `Foreseen`."""

    moved: tuple[float, float]
    """Bytes that a rank sends inside its host and to others."""
    peak: float
    degree: int = 1
    measured: bool = True
    holders: int | None = None
    """Seats that hold the model, where others only serve."""


def linear_seconds(setting: Setting, tokens: Floats) -> Both:
    """Of one stage: layers, recompute where layers are checkpointed; head and loss too where it is the only one."""
    work, layers = setting.work, setting.layers
    forward = layers * tokens * work.forward
    backward = layers * tokens * work.backward + (tokens * work.loss if setting.pipeline == 1 else 0.0)
    return Both(forward, backward).repeated(setting.checkpointing)


def last_stage_seconds(setting: Setting, tokens: Floats) -> Floats:
    """Head and loss, which the last of several stages has beside its layers."""
    return tokens * setting.work.loss if setting.pipeline > 1 else 0.0 * tokens


def hop_seconds(setting: Setting, tokens: Floats) -> Floats:
    """What a stage waits for the activations of a micro-batch, or for their gradient, once they are made."""
    each, once = setting.hop
    return np.where(tokens > 0, tokens * each + once, 0.0) if setting.pipeline > 1 else 0.0 * tokens


def tensor_seconds(setting: Setting, tokens: Floats) -> Both:
    """What tensor parallelism gathers and scatters of the activations of one stage: twice each way around a layer."""
    if setting.tensor == 1:
        return Both(0.0 * tokens, 0.0 * tokens)
    each = setting.cluster.gather(2.0 * setting.model.hidden, setting.tensor) - setting.machine.latency
    once = setting.layers * 4.0 * (tokens * each + setting.machine.latency)
    return Both(once, once).repeated(setting.checkpointing)


def weight_seconds(setting: Setting, passes: int, layer: Both, seats: int) -> float:
    """What gathering weights and scattering gradients adds to a step in which `passes` micro-batches run.

    `layer`: seconds of one layer's forward and backward, behind which the next layer's weights are fetched. `seats`:
    how many share the model's state.
    """
    cluster, tensor = setting.cluster, setting.tensor
    whole = cluster.gather(2.0 * setting.stage_parameters, seats, tensor)
    if setting.sharding == "zero1":
        return 2.0 * whole
    forward, backward = float(np.mean(layer.forward)), float(np.mean(layer.backward))
    if setting.sharding == "zero2":
        return passes * max(0.0, whole - setting.layers * backward) + whole
    weights = cluster.gather(2.0 * setting.model.layer_parameters / tensor, seats, tensor)
    # FSDP reduces gradients in fp32, DeepSpeed in bf16.
    gradients = weights * (2.0 if setting.sharding == "fsdp" else 1.0)
    late = max(0.0, weights - forward) + max(0.0, weights + gradients - backward)
    return passes * (setting.layers * late + weights + gradients)


def finish(setting: Setting, mode: str, rows: Rows, figures: Figures) -> Foreseen:
    """The step that these micro-batches make."""
    linear, tensor = linear_seconds(setting, rows.tokens), tensor_seconds(setting, rows.tokens)
    each = linear + tensor + rows.attention + rows.exchange
    if setting.pipeline > 1:
        hop, last = hop_seconds(setting, rows.tokens), last_stage_seconds(setting, rows.tokens)
        ran = float(one_forward_one_backward(each.forward + hop, each.backward + hop, setting.pipeline, last).max())
    elif setting.sharding == "zero1":
        ran = float(each.total.sum(0).max())
    else:
        ran = float(each.total.max(1).sum())
    return compose(
        setting,
        mode,
        ran,
        Seconds(
            linear=float((linear.total + last_stage_seconds(setting, rows.tokens) / setting.pipeline).sum(0).mean()),
            attention=float(rows.attention.total.sum(0).mean()),
            exchange=float(rows.exchange.total.sum(0).mean()),
            collectives=float(tensor.total.sum(0).mean()),
        ),
        len(rows.tokens),
        float(rows.tokens.sum()) * setting.seats / rows.tokens.shape[1],
        figures,
    )


def compose(
    setting: Setting, mode: str, ran: float, mean: Seconds, passes: int, tokens: float, figures: Figures
) -> Foreseen:
    """A step of micro-batches that took `ran` seconds, of which the mean rank worked as `mean` says.

    `passes`: micro-batches one after the other; `tokens`: of all of them at all seats.
    """
    layer = Both(
        np.array([(mean.linear / 4 + mean.attention / 4) / passes / setting.layers]),
        np.array([(mean.linear + mean.attention) * 0.75 / passes / setting.layers]),
    )
    holders = setting.seats if figures.holders is None else figures.holders
    weights = weight_seconds(setting, passes, layer, holders)
    optimizer = optimizer_seconds(setting.machine, setting.stage_parameters, holders) if setting.optimizer else 0.0
    if not setting.optimizer and setting.sharding == "zero1":
        weights = 0.0
    seconds = Seconds(
        linear=mean.linear,
        attention=mean.attention,
        exchange=mean.exchange,
        collectives=mean.collectives + weights,
        optimizer=optimizer,
        waiting=max(0.0, ran - mean.linear - mean.attention - mean.exchange - mean.collectives),
    )
    return Foreseen(
        mode=mode,
        seconds=seconds,
        tokens=tokens,
        ranks=setting.cluster.ranks,
        inside=figures.moved[0],
        between=figures.moved[1],
        peak=figures.peak,
        state=state_bytes(setting, holders),
        capacity=setting.machine.memory,
        degree=figures.degree,
        measured=figures.measured,
    )
