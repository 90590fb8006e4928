"""One layer's core attention where forward and backward tick have plans of their own, as in a pipeline.

The server of a row's backward need not be the server of its forward, and may run another layer itself. So the home
keeps O and LSE of all its rows and sends all that a backward needs: dO, Q, K, V, O and LSE. A server keeps nothing, and
knows of the layer only its kind; sinks, which are a layer's parameters, are folded in at home.

In: `CallSetup`s of the two ticks. Out: O; in the backward dQ, dK, dV. `serve_tick` is the same for a rank that has no
rows of its own. `T` query rows and key rows at home; other shapes as in serve.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deepspeed_cad.attention.backward import Gradients, finish_back, new_landing, sinks_gradient, with_packed_heads
from deepspeed_cad.attention.call import AttentionCall, Unused, is_saved_plainly
from deepspeed_cad.attention.device_schedule import Batches
from deepspeed_cad.attention.forward import Kept, version_of
from deepspeed_cad.attention.layer import LayerKind
from deepspeed_cad.attention.overlap import run_tasks
from deepspeed_cad.attention.serve import (
    HomeRows,
    as_received,
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
from deepspeed_cad.exchange.transport import Outgoing, Returned, Returning
from deepspeed_cad.schedule import KEY, QUERY


def run_forward(
    setup: CallSetup, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKV: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """O [T, H, V] and LSE [T, H] of this rank's rows, without sinks; runs what this rank serves in this tick."""
    o, lse = new_outputs(setup.schedule, q_THD, v_TKV)
    groups = k_TKD.shape[1]
    fields = [Outgoing(QUERY, by_group(q_THD, k_TKD)), Outgoing(KEY, k_TKD), Outgoing(KEY, v_TKV)]
    out = setup.dispatch(fields)
    setup.begin(out)

    def run(batches: Batches) -> None:
        run_local(setup, batches, q_THD, k_TKD, v_TKV, o, lse)

    def serve(wave: int, arrived: list[torch.Tensor]) -> tuple[None, Returned]:
        part = setup.schedule.waves[wave]
        with setup.span("served", aside=setup.aside is not None):
            o_RGV, lse_RG = run_served(setup, part, as_received(arrived, q_THD), q_THD, o, lse)
        back = [
            Returning(QUERY, o_RGV.flatten(1), o.unflatten(1, (groups, -1)).flatten(2)),
            Returning(QUERY, lse_RG.contiguous(), lse.unflatten(1, (groups, -1))),
        ]
        return None, setup.give_back(wave, back)

    _, back = run_tasks(setup, out, run, serve)
    if back is not None:
        back.finish(setup)
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

    O and LSE are those of the forward, sinks folded in.
    """
    own = Gradients(*new_gradients(setup.schedule, q_THD, k_TKD, v_TKV))
    landing = new_landing(setup, own, k_TKD, v_TKV)
    home = HomeRows(do_THV, q_THD, o_THV, lse_TH, own.dq_THD)
    groups = k_TKD.shape[1]
    # Of a row a slice takes one head group: laid out group by group, those few bytes of LSE lie side by side.
    lse_TKG = lse_TH.unflatten(1, (groups, -1)).transpose(0, 1).contiguous().transpose(0, 1)
    rows = [by_group(x, k_TKD) for x in (do_THV, q_THD, o_THV)]
    fields = [Outgoing(QUERY, x) for x in (*rows, lse_TKG)] + [Outgoing(KEY, x) for x in (k_TKD, v_TKV)]
    out = setup.dispatch(fields, backward=True)
    setup.begin(out, backward=True)

    def run(batches: Batches) -> None:
        run_local_backward(setup, batches, home, k_TKD, v_TKV, own.dk_UKD, own.dv_UKV)

    def serve(wave: int, arrived: list[torch.Tensor]) -> tuple[None, Returned]:
        do_RW, q_RW, o_RW, lse_RG, k_SD, v_SV = arrived
        do_RGV, o_RGV = (x.unflatten(1, (-1, v_TKV.shape[2])) for x in (do_RW, o_RW))
        with setup.span("served", backward=True, aside=setup.aside is not None):
            dq_RGD, dk_S1D, dv_S1V = run_served_backward(
                setup, setup.schedule.waves[wave], do_RGV, as_received([q_RW, k_SD, v_SV], q_THD), o_RGV, lse_RG, home
            )  # fmt: skip
        back = [
            Returning(QUERY, dq_RGD.flatten(1), by_group(own.dq_THD, k_TKD)),
            Returning(KEY, dk_S1D.flatten(1), landing[0], add=True),
            Returning(KEY, dv_S1V.flatten(1), landing[1], add=True),
        ]
        return None, setup.give_back(wave, back, backward=True)

    _, back = run_tasks(setup, out, run, serve, backward=True)
    found = finish_back(setup, back, own, landing)
    setup.counts.backwards += 1
    return Gradients(found.dq_THD, found.dk_UKD.to(k_TKD.dtype), found.dv_UKV.to(v_TKV.dtype))


def serve_tick(setup: CallSetup, kind: LayerKind, backward: bool) -> None:
    """A tick on a rank that has no layer in it, or in whose layer no gradient is wanted."""
    shape, rows = kind.shape, setup.schedule.query_tokens
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


class TickCall(AttentionCall):
    """One layer of one micro-batch on this rank: its forward tick, what it leaves, and its backward tick.

    From the forward until the backward ran it keeps, or parks, O, LSE and sinks, and nothing of what it served.
    """

    def __init__(self, forward: CallSetup, backward: Callable[[], CallSetup]) -> None:
        """`backward` begins this layer's backward tick; called when its gradient is there."""
        super().__init__(forward)
        self.backward = backward

    def __call__(
        self, q_THD: torch.Tensor, k_UKD: torch.Tensor, v_UKV: torch.Tensor, sinks_H: torch.Tensor | None = None
    ) -> torch.Tensor:
        """O [T, H, V]. A second call is that of a checkpointed layer: it gets the O of the first, and no tick runs."""
        self._saved_plainly = is_saved_plainly()
        o: torch.Tensor = _Attend.apply(self, q_THD, k_UKD, v_UKV, sinks_H)
        return o

    def attend(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKV: torch.Tensor, sinks_H: torch.Tensor | None
    ) -> torch.Tensor:
        """O of the forward, which this call keeps with its LSE."""
        if not isinstance(self.state, Unused):
            kept = self.take()
            self.setup.counts.replays += 1
            return kept.o_THV
        if self.parking is not None:
            self.parking.settle()
        o, lse = run_forward(self.setup, q_THD, k_TKD, v_TKV)
        if sinks_H is not None:
            o, lse = fold_sinks(o, lse, sinks_H)
        kept = Kept(o, lse, (), None if sinks_H is None else sinks_H.clone(), version_of(o))
        # Saved plainly, O stays for the layer behind attention, and LSE alone is not worth the way.
        if self._saved_plainly:
            self.state = kept
        else:
            self.keep(kept, ())
        return o


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: TickCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.call = call
        o = call.attend(q.detach(), k.detach(), v.detach(), None if sinks is None else sinks.detach())
        ctx.save_for_backward(q, k, v)
        return o.detach()

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: TickCall = ctx.call
        q, k, v = ctx.saved_tensors
        kept, parked = call.take(), call.parked
        call.end()
        kept.check_unchanged(call.setup.label)
        if parked is not None:
            parked.fetch()
        do = with_packed_heads(do)
        dq, dk, dv = run_backward(call.backward(), do, q.detach(), k.detach(), v.detach(), kept.o_THV, kept.lse_TH)
        dsinks = sinks_gradient(call.setup, kept, do) if ctx.needs_input_grad[4] else None
        return None, dq, dk, dv, dsinks
