"""The forward of one call in three steps, each a function from one state to the next:

    start_forward ─► ForwardStarted ─► serve_forward ─► ForwardServed ─► collect_forward ─► Kept

A state is held by the call until the next one is there, and what it names stays in memory as long. `T` query rows at
home, `U` key rows at home; other shapes as in serve.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from deepspeed_cad.attention.device_schedule import Batches
from deepspeed_cad.attention.overlap import Return, run_tasks
from deepspeed_cad.attention.serve import Outputs, as_received, by_group, lse_dtype, new_outputs, run_local, run_served
from deepspeed_cad.attention.setup import CallSetup, WavesOut
from deepspeed_cad.errors import CADError
from deepspeed_cad.exchange.transport import Outgoing, Returned, Returning
from deepspeed_cad.schedule import KEY, QUERY


class ServedOutputs(NamedTuple):
    """Results of served tasks, which their server keeps for their backward."""

    o_RGV: Tensor
    lse_RG: Tensor


@dataclass(frozen=True, eq=False)
class ForwardStarted:
    """Q, K and V are on their way."""

    q_THD: Tensor
    k_UKD: Tensor
    v_UKV: Tensor
    sinks_H: Tensor | None
    """A copy: the parameter itself may be sharded again by backward."""
    out: WavesOut


@dataclass(frozen=True, eq=False)
class ForwardServed:
    """This rank's tasks run, and O of served ones is on its way home."""

    started: ForwardStarted
    """Held: kernels and copies that were queued read it until what comes back has been waited for."""
    o_THV: Tensor
    lse_TH: Tensor
    served: tuple[ServedOutputs, ...]
    """By waves; none in a group of one rank."""
    back: Return | None


@dataclass(frozen=True, eq=False)
class Kept:
    """What backward needs besides Q, K and V."""

    o_THV: Tensor
    lse_TH: Tensor
    served: Sequence[ServedOutputs]
    sinks_H: Tensor | None
    version: int
    """Of O when it was given to the model: whoever changes O in place raises it."""

    def check_unchanged(self, label: str) -> None:
        """Raise CADError where the model changed O in place: backward, and a layer that runs again, need it as it was.
        Autograd compares versions of what `save_for_backward` holds, but not where checkpointing keeps that."""
        # What offloading brings back is another tensor, which was changed once at most: by what filled it.
        if self.o_THV._version > self.version:
            raise CADError(
                f"{label}: its output was changed in place, and its backward needs it as it was. Change a "
                "copy in the model (x = x * y instead of x *= y or x.mul_(y))"
            )

    def tensors(self) -> tuple[Tensor, ...]:
        """All that is as large as activations, for autograd to hold."""
        return self.o_THV, self.lse_TH, *(tensor for served in self.served for tensor in served)


class HeldByAutograd(NamedTuple):
    """What is left where others hold the tensors of `Kept`: autograd, for checkpointing to free, or host memory."""

    sinks_H: Tensor | None
    version: int


def pair_up(tensors: Sequence[Tensor]) -> tuple[ServedOutputs, ...]:
    """O and LSE of served tasks, by waves, of `Kept.tensors`."""
    return tuple(map(ServedOutputs, tensors[::2], tensors[1::2]))


def start_forward(
    setup: CallSetup, q_THD: Tensor, k_UKD: Tensor, v_UKV: Tensor, sinks_H: Tensor | None, at_once: bool = True
) -> ForwardStarted:
    """Start sending Q, K, V; without `at_once` nothing goes out before its first wave is started."""
    fields = [Outgoing(QUERY, by_group(q_THD, k_UKD)), Outgoing(KEY, k_UKD), Outgoing(KEY, v_UKV)]
    if sinks_H is not None and setup.modes.sinks_travel:
        # One row per token: transports take rows of all fields alike.
        rows_TH = sinks_H.to(lse_dtype(q_THD.dtype)).expand(q_THD.shape[0], -1)
        fields.append(Outgoing(QUERY, rows_TH.unflatten(1, (k_UKD.shape[1], -1)).contiguous()))
    out = setup.dispatch(fields)
    if at_once:
        setup.begin(out)
    return ForwardStarted(q_THD, k_UKD, v_UKV, None if sinks_H is None else sinks_H.clone(), out)


def serve_forward(setup: CallSetup, started: ForwardStarted) -> ForwardServed:
    """Run local and served batches, start sending O back."""
    q, k, v, sinks = started.q_THD, started.k_UKD, started.v_UKV, started.sinks_H
    into = new_outputs(setup.schedule, q, v)

    def run(batches: Batches) -> None:
        run_local(setup, batches, (q, k, v), into, sinks)

    def serve(wave: int, arrived: list[Tensor]) -> tuple[ServedOutputs | None, Returned]:
        served = serve_arrived(setup, wave, started, arrived, into)
        back = setup.give_back(wave, outputs_back(setup, started, served, into))
        return (None if setup.modes.results_travel else served), back

    made, back = run_tasks(setup, started.out, run, serve)
    return ForwardServed(started, *into, tuple(one for one in made if one is not None), back)


def serve_arrived(
    setup: CallSetup, wave: int, started: ForwardStarted, arrived: list[Tensor], into: Outputs
) -> ServedOutputs:
    """Run what arrived of a wave from other ranks, and this rank's own rows of its tasks, `into` where these stay."""
    part, sinks_H = setup.schedule.waves[wave], started.sinks_H
    received = as_received(arrived[:3], started.q_THD)
    sinks_RG = None
    if sinks_H is not None:
        sinks_RG = arrived[3] if setup.modes.sinks_travel else sinks_H.view(-1, received[0].shape[1])[part.group]
    with setup.span("served", aside=setup.aside is not None):
        # All of it before the return starts: that tells the others that what landed has been read.
        return ServedOutputs(*run_served(setup, part, received, started.q_THD, into, sinks_RG, sinks_H))


def outputs_back(setup: CallSetup, started: ForwardStarted, served: ServedOutputs, into: Outputs) -> list[Returning]:
    """O of served tasks, and LSE where backward at home needs it, to be placed `into` there."""
    groups = started.k_UKD.shape[1]
    fields = [Returning(QUERY, served.o_RGV.flatten(1), into.o_THV.unflatten(1, (groups, -1)).flatten(2))]
    if started.sinks_H is not None or setup.modes.results_travel:
        # A kernel may give LSE transposed. The server keeps that: the kernel takes it back without a copy.
        fields.append(Returning(QUERY, served.lse_RG.contiguous(), into.lse_TH.unflatten(1, (groups, -1))))
    return fields


def collect_forward(setup: CallSetup, done: ForwardServed) -> Kept:
    """Wait until O is complete at home."""
    if done.back is not None:
        done.back.finish(setup)
    setup.counts.forwards += 1
    return Kept(done.o_THV, done.lse_TH, done.served, done.started.sinks_H, version_of(done.o_THV))


def version_of(o_THV: Tensor) -> int:
    """How often O was changed in place, at least once from now on; 0 where torch does not count."""
    if torch.is_inference_mode_enabled():
        return 0
    increment_version(o_THV)
    return o_THV._version
