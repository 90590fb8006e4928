"""The backward of one call, the mirror of its forward, in three steps:

    start_backward ─► BackwardStarted ─► serve_backward ─► BackwardServed ─► collect_backward ─► dQ, dK, dV

States and shapes as in forward.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from deepspeed_cad.attention.device_schedule import Batches
from deepspeed_cad.attention.forward import Kept, ServedOutputs, as_received
from deepspeed_cad.attention.overlap import Return, run_alone, run_tasks
from deepspeed_cad.attention.serve import (
    by_group,
    new_gradients,
    run_local_backward,
    run_served_backward,
)
from deepspeed_cad.attention.setup import CallSetup
from deepspeed_cad.exchange.transport import Dispatched, Outgoing, Returned, Returning
from deepspeed_cad.schedule import KEY, QUERY


class Gradients(NamedTuple):
    """dQ in the dtype of Q; dK and dV wider where local batches add to the same keys."""

    dq_THD: torch.Tensor
    dk_UKD: torch.Tensor
    dv_UKV: torch.Tensor


@dataclass(frozen=True, eq=False)
class BackwardStarted:
    """dO, and Q, K, V where servers do not keep them, are on their way."""

    do_THV: torch.Tensor
    q_THD: torch.Tensor
    k_UKD: torch.Tensor
    v_UKV: torch.Tensor
    kept: Kept
    out: tuple[Dispatched, ...]


@dataclass(frozen=True, eq=False)
class BackwardServed:
    """This rank's tasks run, and dQ, dK, dV of served ones are on their way home."""

    started: BackwardStarted
    """Held as in `ForwardServed`."""
    own: Gradients
    """Of local batches; dQ also takes what other ranks send."""
    landing: tuple[torch.Tensor, torch.Tensor]
    """dK and dV that take what other ranks send: those of `own`, or others to copy them to where they are wider."""
    back: Return | None


def start_backward(
    setup: CallSetup,
    kept: Kept,
    do_THV: torch.Tensor,
    q_THD: torch.Tensor,
    k_UKD: torch.Tensor,
    v_UKV: torch.Tensor,
) -> BackwardStarted:
    """Start sending dO, and Q, K, V if they were not kept."""
    what, fields = "dO out", [Outgoing(QUERY, by_group(do_THV, k_UKD))]
    if kept.served and kept.served[0].received is None:
        what = "dO, Q, K, V out"
        fields += [Outgoing(QUERY, by_group(q_THD, k_UKD)), Outgoing(KEY, k_UKD), Outgoing(KEY, v_UKV)]
    out = setup.dispatch(what, fields, backward=True)
    return BackwardStarted(do_THV, q_THD, k_UKD, v_UKV, kept, out)


def sinks_gradient(setup: CallSetup, kept: Kept, do_THV: torch.Tensor) -> torch.Tensor | None:
    """[H], from this rank's own rows; needs no other rank."""
    if kept.sinks_H is None:
        return None
    o, lse = kept.o_THV, kept.lse_TH
    weight_TH = torch.exp(kept.sinks_H.to(lse.dtype) - lse)
    if len(setup.schedule.padding):
        weight_TH[setup.schedule.padding] = 0
    return -(weight_TH * (do_THV.to(lse.dtype) * o.to(lse.dtype)).sum(-1)).sum(0).to(kept.sinks_H.dtype)


def serve_backward(setup: CallSetup, started: BackwardStarted) -> BackwardServed:
    """Run the backward of local and served batches, start sending dQ, dK, dV back."""
    do, q, k, v, kept = started.do_THV, started.q_THD, started.k_UKD, started.v_UKV, started.kept
    own = Gradients(*new_gradients(setup.schedule, q, k, v))
    same = own.dk_UKD.dtype == k.dtype
    landing = (own.dk_UKD, own.dv_UKV) if same else (torch.empty_like(k), torch.empty_like(v))

    def run(batches: Batches) -> None:
        run_local_backward(
            batches, setup.kernel, setup.rule, do, q, k, v, kept.o_THV, kept.lse_TH, own,
            add=setup.schedule.local_keys_overlap,
        )  # fmt: skip

    def serve(wave: int, arrived: list[torch.Tensor]) -> tuple[None, Returned]:
        made = serve_arrived_backward(setup, wave, started, kept.served[wave], arrived)
        return None, setup.give_back("dQ, dK, dV back", wave, gradients_back(made, own, landing), backward=True)

    if not started.out:
        run_alone(setup, run, backward=True)
        return BackwardServed(started, own, landing, None)
    _, back = run_tasks(setup, started.out, run, serve, backward=True)
    return BackwardServed(started, own, landing, back)


def serve_arrived_backward(
    setup: CallSetup, wave: int, started: BackwardStarted, served: ServedOutputs, arrived: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dQ, dK and dV of what was served in a wave, from the dO that arrived."""
    do_RW, *resent = arrived
    received = served.received or as_received(resent, started.q_THD)
    with setup.span("served", backward=True, aside=setup.aside is not None):
        return run_served_backward(
            setup.schedule.waves[wave], setup.kernel, setup.rule,
            do_RW.unflatten(1, (-1, started.v_UKV.shape[2])), *received, served.o_RGV, served.lse_RG,
        )  # fmt: skip


def gradients_back(
    made: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    own: Gradients,
    landing: tuple[torch.Tensor, torch.Tensor],
) -> list[Returning]:
    """Gradients of served tasks, to be placed in dQ of `own` and added to `landing` at home."""
    dq_RGD, dk_S1D, dv_S1V = made
    return [
        Returning(QUERY, dq_RGD.flatten(1), by_group(own.dq_THD, own.dk_UKD)),
        Returning(KEY, dk_S1D.flatten(1), landing[0], add=True),
        Returning(KEY, dv_S1V.flatten(1), landing[1], add=True),
    ]


def collect_backward(setup: CallSetup, done: BackwardServed) -> Gradients:
    """dQ, dK, dV, complete."""
    dq, dk, dv = done.own
    if done.back is not None:
        # Where these differ all local batches ran on this stream. What other ranks found is added to the rounded sums.
        for landing, own in zip(done.landing, (dk, dv), strict=True):
            if landing is not own:
                landing.copy_(own)
        dk, dv = done.landing
        done.back.finish(setup, backward=True)
    setup.mark("attention ends", backward=True)
    setup.counts.backwards += 1
    return Gradients(dq, dk.to(done.started.k_UKD.dtype), dv.to(done.started.v_UKV.dtype))
