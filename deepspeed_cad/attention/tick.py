"""One layer's core attention where forward and backward tick have plans of their own, as in a pipeline.

The server of a row's backward need not be the server of its forward, and may run another layer itself. So the home
keeps O and LSE of all its rows and sends all that a backward needs: dO, Q, K, V, O and LSE. A server keeps nothing, and
knows of the layer only its kind; sinks, which are a layer's parameters, are folded in at home.

In: `CallSetup`s of the two ticks. Out: O; in the backward dQ, dK, dV. `serve_tick` is the same for a rank that has no
rows of its own. `T` query rows and key rows at home; other shapes as in serve.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_cad.attention.backward import Gradients
from deepspeed_cad.attention.device_schedule import Batches
from deepspeed_cad.attention.forward import as_received
from deepspeed_cad.attention.overlap import run_alone, run_tasks
from deepspeed_cad.attention.parking import Parcel, Parking
from deepspeed_cad.attention.program import LayerKind
from deepspeed_cad.attention.serve import (
    by_group,
    fold_sinks,
    lse_dtype,
    new_gradients,
    new_outputs,
    run_local,
    run_local_backward,
    run_served,
    run_served_backward,
)
from deepspeed_cad.attention.setup import CallSetup
from deepspeed_cad.attention.thread_state import hooks_save_tensors
from deepspeed_cad.errors import CADError
from deepspeed_cad.exchange.transport import Outgoing, Returned, Returning
from deepspeed_cad.schedule import KEY, QUERY


def run_forward(
    setup: CallSetup, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKV: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """O [T, H, V] and LSE [T, H] of this rank's rows, without sinks; runs what this rank serves in this tick."""
    o, lse = new_outputs(setup.schedule, q_THD, v_TKV)
    groups = k_TKD.shape[1]
    fields = [Outgoing(QUERY, by_group(q_THD, k_TKD)), Outgoing(KEY, k_TKD), Outgoing(KEY, v_TKV)]
    out = setup.dispatch("Q, K, V out", fields)

    def run(batches: Batches) -> None:
        run_local(batches, setup.kernel, setup.rule, q_THD, k_TKD, v_TKV, o, lse)

    def serve(arrived: list[torch.Tensor]) -> tuple[None, Returned]:
        with setup.span("served", aside=setup.aside is not None):
            o_RGV, lse_RG = run_served(setup.schedule, setup.kernel, setup.rule, *as_received(arrived, q_THD))
        back = [
            Returning(QUERY, o_RGV.flatten(1), o.unflatten(1, (groups, -1)).flatten(2)),
            Returning(QUERY, lse_RG.contiguous(), lse.unflatten(1, (groups, -1))),
        ]
        return None, setup.give_back("O, LSE back", back)

    if out is None:
        run_alone(setup, run)
    else:
        _, back = run_tasks(setup, out, run, serve)
        back.finish(setup)
    setup.mark("attention ends")
    setup.counts.forwards += 1
    return o, lse


def run_backward(
    setup: CallSetup,
    do_THV: torch.Tensor,
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKV: torch.Tensor,
    o_THV: torch.Tensor,
    lse_TH: torch.Tensor,
) -> Gradients:
    """dQ, dK and dV of this rank's rows; runs the backward of what this rank serves in this tick.

    Args:
        setup: of the backward tick.
        do_THV: gradient of O.
        q_THD: queries, as in the forward.
        k_TKD: keys.
        v_TKV: values.
        o_THV: the forward's O, sinks folded in.
        lse_TH: the forward's LSE, likewise.
    """
    own = Gradients(*new_gradients(setup.schedule, q_THD, k_TKD, v_TKV))
    landing = (own.dk_UKD, own.dv_UKV)
    if own.dk_UKD.dtype != k_TKD.dtype:
        landing = (torch.empty_like(k_TKD), torch.empty_like(v_TKV))
    groups = k_TKD.shape[1]
    # Of a row a slice takes one head group: laid out group by group, those few bytes of LSE lie side by side.
    lse_TKG = lse_TH.unflatten(1, (groups, -1)).transpose(0, 1).contiguous().transpose(0, 1)
    rows = [by_group(x, k_TKD) for x in (do_THV, q_THD, o_THV)]
    fields = [Outgoing(QUERY, x) for x in (*rows, lse_TKG)] + [Outgoing(KEY, x) for x in (k_TKD, v_TKV)]
    out = setup.dispatch("dO, Q, O, LSE, K, V out", fields, backward=True)

    def run(batches: Batches) -> None:
        run_local_backward(
            batches, setup.kernel, setup.rule, do_THV, q_THD, k_TKD, v_TKV, o_THV, lse_TH, own,
            add=setup.schedule.local_keys_overlap,
        )  # fmt: skip

    def serve(arrived: list[torch.Tensor]) -> tuple[None, Returned]:
        do_RW, q_RW, o_RW, lse_RG, k_SD, v_SV = arrived
        do_RGV, o_RGV = (x.unflatten(1, (-1, v_TKV.shape[2])) for x in (do_RW, o_RW))
        with setup.span("served", backward=True, aside=setup.aside is not None):
            dq_RGD, dk_S1D, dv_S1V = run_served_backward(
                setup.schedule, setup.kernel, setup.rule, do_RGV, *as_received([q_RW, k_SD, v_SV], q_THD),
                o_RGV, lse_RG,
            )  # fmt: skip
        back = [
            Returning(QUERY, dq_RGD.flatten(1), by_group(own.dq_THD, k_TKD)),
            Returning(KEY, dk_S1D.flatten(1), landing[0], add=True),
            Returning(KEY, dv_S1V.flatten(1), landing[1], add=True),
        ]
        return None, setup.give_back("dQ, dK, dV back", back, backward=True)

    if out is None:
        run_alone(setup, run, backward=True)
    else:
        _, back = run_tasks(setup, out, run, serve, backward=True)
        # What other ranks found is added to the sums of local batches, rounded where those are wider.
        for there, here in zip(landing, own[1:], strict=True):
            if there is not here:
                there.copy_(here)
        back.finish(setup, backward=True)
    setup.mark("attention ends", backward=True)
    setup.counts.backwards += 1
    dk, dv = (own.dk_UKD, own.dv_UKV) if out is None else landing
    return Gradients(own.dq_THD, dk.to(k_TKD.dtype), dv.to(v_TKV.dtype))


def serve_tick(setup: CallSetup, kind: LayerKind, backward: bool) -> None:
    """A tick on a rank that has no layer in it, or in whose layer no gradient is wanted."""
    shape, rows = kind.shape, setup.schedule.host.query_tokens
    # In a backward, rows of a layer whose gradient nobody wants are in the plan all the same: they have none.
    q, o = (
        torch.zeros(rows, shape.query_heads, size, dtype=kind.dtype, device=setup.device)
        for size in (shape.head_dim, shape.value_dim)
    )
    k, v = (
        torch.zeros(rows, shape.groups, size, dtype=kind.dtype, device=setup.device)
        for size in (shape.head_dim, shape.value_dim)
    )
    if not backward:
        run_forward(setup, q, k, v)
        return
    lse = torch.zeros(rows, shape.query_heads, dtype=lse_dtype(kind.dtype), device=setup.device)
    run_backward(setup, torch.zeros_like(o), q, k, v, o, lse)


@dataclass(eq=False)
class TickCall:
    """One layer of one micro-batch on this rank: its forward tick, what it leaves, and its backward tick."""

    forward: CallSetup
    backward: Callable[[], CallSetup]
    """Begins this layer's backward tick; called when its gradient is there."""
    kept: tuple[torch.Tensor, torch.Tensor] | None = None
    """O and LSE, from the forward until the backward ran."""
    parcel: Parcel | None = None
    """The same, while they are parked."""
    released: bool = False
    _parked: int = 0
    """Number of that parcel."""
    _saved_plainly: bool = False
    _version: int = 0
    """Of O when it was given to the model."""

    def __call__(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKV: torch.Tensor, sinks_H: torch.Tensor | None = None
    ) -> torch.Tensor:
        """O [T, H, V]. A second call is that of a checkpointed layer: it gets the O of the first, and no tick runs."""
        # Where activations are neither checkpointed nor offloaded, the layer behind attention saves O, its input.
        self._saved_plainly = torch.is_grad_enabled() and not hooks_save_tensors()
        o: torch.Tensor = _Attend.apply(self, q_THD, k_TKD, v_TKV, sinks_H)
        return o

    def attend(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKV: torch.Tensor, sinks_H: torch.Tensor | None
    ) -> torch.Tensor:
        """O of the forward, which this call keeps with its LSE."""
        if self.released:
            raise CADError(
                f"{self.forward.label}: it ran again after its backward (retain_graph=True?); what attention keeps is "
                "freed as soon as its backward ran"
            )
        self._take()
        if self.kept is not None:
            self.forward.counts.replays += 1
            return self.kept[0]
        if self.parking is not None:
            self.parking.settle()
        o, lse = run_forward(self.forward, q_THD, k_TKD, v_TKV)
        if sinks_H is not None:
            o, lse = fold_sinks(o, lse, sinks_H)
        if self.parking is None or self._saved_plainly:
            self.kept, self._version = (o, lse), o._version
        else:
            self.parcel = self.parking.park((o, lse), self.forward.label)
            self._parked = self.parcel.number
        return o

    @property
    def parking(self) -> Parking | None:
        """Where what is kept goes; None: it stays."""
        return self.forward.modes.parking

    def _take(self) -> None:
        """Have what is parked on the device."""
        if self.parcel is not None:
            o, lse = self.parcel.take()
            self.kept, self.parcel, self._version = (o, lse), None, o._version

    def fetch_before(self) -> None:
        """Bring back what the layer before this one parked."""
        if self.parking is not None:
            self.parking.fetch_before(self._parked)

    def release(self) -> tuple[torch.Tensor, torch.Tensor]:
        """O and LSE, which this call holds no longer. Raises CADError where it holds none."""
        self._take()
        if self.kept is None:
            raise CADError(f"{self.forward.label}: a second backward through the same forward is not supported")
        kept, self.kept, self.released = self.kept, None, True
        return kept


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: TickCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.call = call
        o = call.attend(q.detach(), k.detach(), v.detach(), None if sinks is None else sinks.detach())
        ctx.save_for_backward(q, k, v, sinks)
        return o.detach()

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: TickCall = ctx.call
        q, k, v, sinks = ctx.saved_tensors
        o, lse = call.release()
        if o._version != call._version:
            raise CADError(
                f"{call.forward.label}: its output was changed in place, and its backward needs it as it was. Change a "
                "copy in the model (x = x * y instead of x *= y or x.mul_(y))"
            )
        do = do if do.stride(-1) == 1 and do.stride(-2) == do.shape[-1] else do.contiguous()
        setup = call.backward()
        dq, dk, dv = run_backward(setup, do, q.detach(), k.detach(), v.detach(), o, lse)
        call.fetch_before()
        dsinks = None
        if sinks is not None and ctx.needs_input_grad[4]:
            weight_TH = torch.exp(sinks.to(lse.dtype) - lse)
            if len(call.forward.schedule.padding):
                weight_TH[call.forward.schedule.padding] = 0
            dsinks = -(weight_TH * (do.to(lse.dtype) * o.to(lse.dtype)).sum(-1)).sum(0).to(sinks.dtype)
        return None, dq, dk, dv, dsinks
