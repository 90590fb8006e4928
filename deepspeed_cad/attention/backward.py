"""The backward of one call, the mirror of its forward, in three steps:

    start_backward ─► BackwardStarted ─► serve_backward ─► BackwardServed ─► collect_backward ─► dQ, dK, dV

States and shapes as in forward.py.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed_cad.attention.device_schedule import Batches
from deepspeed_cad.attention.forward import Kept, ServedOutputs
from deepspeed_cad.attention.overlap import Return, run_tasks
from deepspeed_cad.attention.serve import (
    HomeRows,
    as_received,
    by_group,
    lse_dtype,
    new_gradients,
    run_local_backward,
    run_served_backward,
)
from deepspeed_cad.attention.setup import CallSetup, WavesOut
from deepspeed_cad.exchange.transport import Outgoing, Returned, Returning
from deepspeed_cad.schedule import KEY, QUERY


class Gradients(NamedTuple):
    """dQ in the dtype of Q; dK and dV wider where local batches add to the same keys."""

    dq_THD: Tensor
    dk_UKD: Tensor
    dv_UKV: Tensor


@dataclass(frozen=True, eq=False)
class BackwardStarted:
    """dO, Q, K and V are on their way."""

    do_THV: Tensor
    q_THD: Tensor
    k_UKD: Tensor
    v_UKV: Tensor
    kept: Kept
    out: WavesOut


@dataclass(frozen=True, eq=False)
class BackwardServed:
    """This rank's tasks run, and dQ, dK, dV of served ones are on their way home."""

    started: BackwardStarted
    own: Gradients
    """Of local batches; dQ also takes what other ranks send."""
    landing: tuple[Tensor, Tensor]
    """dK and dV that take what other ranks send: those of `own`, or others to copy them to where they are wider."""
    back: Return | None


def start_backward(
    setup: CallSetup, kept: Kept, do_THV: Tensor, q_THD: Tensor, k_UKD: Tensor, v_UKV: Tensor, at_once: bool = True
) -> BackwardStarted:
    """Start sending dO, Q, K, V once more, and O and LSE where servers keep none; `at_once` as in start_forward."""
    travel = setup.modes.results_travel
    rows = [by_group(x, k_UKD) for x in (do_THV, q_THD, *([kept.o_THV] if travel else []))]
    if travel:
        # Of a row a slice takes one head group: laid out group by group, those few bytes of LSE lie side by side.
        rows.append(kept.lse_TH.unflatten(1, (k_UKD.shape[1], -1)).transpose(0, 1).contiguous().transpose(0, 1))
    fields = [Outgoing(QUERY, x) for x in rows] + [Outgoing(KEY, x) for x in (k_UKD, v_UKV)]
    out = setup.dispatch(fields, backward=True)
    if at_once:
        setup.begin(out, backward=True)
    return BackwardStarted(do_THV, q_THD, k_UKD, v_UKV, kept, out)


def with_packed_heads(do_THV: Tensor) -> Tensor:
    """dO as slices are taken from it: each row's heads side by side. Autograd's gradients may be views, or one row for
    all tokens."""
    packed = do_THV.stride(-1) == 1 and do_THV.stride(-2) == do_THV.shape[-1] and do_THV.stride(0) > 0
    return do_THV if packed else do_THV.contiguous()


def sinks_gradient(setup: CallSetup, kept: Kept, do_THV: Tensor) -> Tensor | None:
    """[H], from this rank's own rows; needs no other rank."""
    if kept.sinks_H is None:
        return None
    weight_TH = torch.exp(kept.sinks_H.to(kept.lse_TH.dtype) - kept.lse_TH)
    if len(setup.schedule.padding):
        weight_TH[setup.schedule.padding] = 0
    total = torch.zeros_like(kept.sinks_H, dtype=weight_TH.dtype)
    # The product is wider than O: not of all rows at once.
    for do, o, weight in zip(*(one.split(4096) for one in (do_THV, kept.o_THV, weight_TH))):
        total -= (weight * (do.to(weight.dtype) * o.to(weight.dtype)).sum(-1)).sum(0)
    return total.to(kept.sinks_H.dtype)


def serve_backward(setup: CallSetup, started: BackwardStarted) -> BackwardServed:
    """Run the backward of local and served batches, start sending dQ, dK, dV back."""
    do, q, k, v, kept = started.do_THV, started.q_THD, started.k_UKD, started.v_UKV, started.kept
    own = Gradients(*new_gradients(setup.schedule, q, k, v))
    landing = new_landing(setup, own, k, v)
    home = HomeRows(do, q, kept.o_THV, kept.lse_TH, own.dq_THD)

    def run(batches: Batches) -> None:
        run_local_backward(setup, batches, home, k, v, own.dk_UKD, own.dv_UKV)

    def serve(wave: int, arrived: list[Tensor]) -> tuple[None, Returned]:
        if setup.modes.results_travel:
            do_RW, q_RW, o_RW, lse_RG, *keys = arrived
            served, arrived = ServedOutputs(o_RW.unflatten(1, (-1, v.shape[2])), lse_RG), [do_RW, q_RW, *keys]
        else:
            served = kept.served[wave]
        made = serve_arrived_backward(setup, wave, started, served, arrived, own)
        return None, setup.give_back(wave, gradients_back(made, own, landing), backward=True)

    _, back = run_tasks(setup, started.out, run, serve, backward=True)
    return BackwardServed(started, own, landing, back)


def serve_arrived_backward(
    setup: CallSetup, wave: int, started: BackwardStarted, served: ServedOutputs, arrived: list[Tensor], own: Gradients
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV of what was served in a wave, from the dO that arrived; dQ of rows that stayed in place goes into
    `own`."""
    kept = started.kept
    home = HomeRows(started.do_THV, started.q_THD, kept.o_THV, kept.lse_TH, own.dq_THD)
    do_RW, *received = arrived
    with setup.span("served", backward=True, aside=setup.aside is not None):
        return run_served_backward(
            setup, setup.schedule.waves[wave], do_RW.unflatten(1, (-1, started.v_UKV.shape[2])),
            as_received(received, started.q_THD), served.o_RGV, served.lse_RG, home,
        )  # fmt: skip


def gradients_back(
    made: tuple[Tensor, Tensor, Tensor], own: Gradients, landing: tuple[Tensor, Tensor]
) -> list[Returning]:
    """Gradients of served tasks, to be placed in dQ of `own` and added to `landing` at home."""
    dq_RGD, dk_S1D, dv_S1V = made
    return [
        Returning(QUERY, dq_RGD.flatten(1), by_group(own.dq_THD, own.dk_UKD)),
        Returning(KEY, dk_S1D.flatten(1), landing[0], add=True),
        Returning(KEY, dv_S1V.flatten(1), landing[1], add=True),
    ]


def new_landing(setup: CallSetup, own: Gradients, k_UKD: Tensor, v_UKV: Tensor) -> tuple[Tensor, Tensor]:
    """Where dK and dV that come back are added: to what local batches made, or to zeros of their own.

    Early waves come back while local batches still write the same rows. Sums over waves are not rounded in between."""
    if setup.schedule.lands_apart:
        wide = setup.schedule.keys_return_often
        first, second = (torch.zeros_like(x, dtype=lse_dtype(x.dtype) if wide else x.dtype) for x in (k_UKD, v_UKV))
        return first, second
    if own.dk_UKD.dtype == k_UKD.dtype:
        return own.dk_UKD, own.dv_UKV
    return torch.empty_like(k_UKD), torch.empty_like(v_UKV)


def collect_backward(setup: CallSetup, done: BackwardServed) -> Gradients:
    """Wait for what comes back; the sums of it and of what local batches, which are queued on this stream, made."""
    dq, *own = done.own
    if done.back is not None and setup.schedule.lands_apart:
        done.back.finish(setup, backward=True)
        pairs = zip(own, done.landing, strict=True)
        # Into the wider one, in place: rounded once.
        own = [a.add_(b) if a.element_size() >= b.element_size() else b.add_(a) for a, b in pairs]
    elif done.back is not None:
        # Where these differ all local batches ran on this stream. What other ranks found is added to the rounded sums.
        for there, here in zip(done.landing, own, strict=True):
            if there is not here:
                there.copy_(here)
        done.back.finish(setup, backward=True)
        own = [*done.landing]
    setup.counts.backwards += 1
    return Gradients(dq, own[0].to(done.started.k_UKD.dtype), own[1].to(done.started.v_UKV.dtype))
