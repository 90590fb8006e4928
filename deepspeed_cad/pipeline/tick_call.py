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

from deepspeed_cad.attention.backward import (
    BackwardServed,
    BackwardStarted,
    Gradients,
    collect_backward,
    gradients_back,
    new_landing,
    serve_arrived_backward,
    sinks_gradient,
    with_packed_heads,
)
from deepspeed_cad.attention.call import AttentionCall, Unused, is_saved_plainly
from deepspeed_cad.attention.device_schedule import Batches
from deepspeed_cad.attention.forward import (
    ForwardServed,
    Kept,
    ServedOutputs,
    collect_forward,
    outputs_back,
    serve_arrived,
    start_forward,
    version_of,
)
from deepspeed_cad.attention.layer import LayerKind
from deepspeed_cad.attention.overlap import run_tasks
from deepspeed_cad.attention.serve import (
    HomeRows,
    by_group,
    fold_sinks,
    lse_dtype,
    new_gradients,
    new_outputs,
    run_local,
    run_local_backward,
)
from deepspeed_cad.attention.setup import CallSetup
from deepspeed_cad.exchange.transport import Outgoing, Returned, Returning
from deepspeed_cad.schedule import KEY, QUERY


def run_forward(setup: CallSetup, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKV: torch.Tensor) -> Kept:
    """O [T, H, V] and LSE [T, H] of this rank's rows, without sinks; runs what this rank serves in this tick."""
    o, lse = new_outputs(setup.schedule, q_THD, v_TKV)
    started = start_forward(setup, q_THD, k_TKD, v_TKV, None)

    def run(batches: Batches) -> None:
        run_local(setup, batches, q_THD, k_TKD, v_TKV, o, lse)

    def serve(wave: int, arrived: list[torch.Tensor]) -> tuple[None, Returned]:
        served = serve_arrived(setup, wave, started, arrived, o, lse)
        lse_back = Returning(QUERY, served.lse_RG.contiguous(), lse.unflatten(1, (k_TKD.shape[1], -1)))
        return None, setup.give_back(wave, [*outputs_back(started, served, o, lse), lse_back])

    _, back = run_tasks(setup, started.out, run, serve)
    return collect_forward(setup, ForwardServed(started, o, lse, (), back))


def run_backward(
    setup: CallSetup, kept: Kept, do_THV: torch.Tensor, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKV: torch.Tensor
) -> Gradients:
    """dQ, dK and dV of this rank's rows; runs the backward of what this rank serves in this tick.

    O and LSE in `kept` are those of the forward, sinks folded in.
    """
    own = Gradients(*new_gradients(setup.schedule, q_THD, k_TKD, v_TKV))
    landing = new_landing(setup, own, k_TKD, v_TKV)
    home = HomeRows(do_THV, q_THD, kept.o_THV, kept.lse_TH, own.dq_THD)
    # Of a row a slice takes one head group: laid out group by group, those few bytes of LSE lie side by side.
    lse_TKG = kept.lse_TH.unflatten(1, (k_TKD.shape[1], -1)).transpose(0, 1).contiguous().transpose(0, 1)
    rows = [by_group(x, k_TKD) for x in (do_THV, q_THD, kept.o_THV)]
    fields = [Outgoing(QUERY, x) for x in (*rows, lse_TKG)] + [Outgoing(KEY, x) for x in (k_TKD, v_TKV)]
    out = setup.dispatch(fields, backward=True)
    setup.begin(out, backward=True)
    started = BackwardStarted(do_THV, q_THD, k_TKD, v_TKV, kept, out)

    def run(batches: Batches) -> None:
        run_local_backward(setup, batches, home, k_TKD, v_TKV, own.dk_UKD, own.dv_UKV)

    def serve(wave: int, arrived: list[torch.Tensor]) -> tuple[None, Returned]:
        do_RW, q_RW, o_RW, lse_RG, *keys = arrived
        served = ServedOutputs(o_RW.unflatten(1, (-1, v_TKV.shape[2])), lse_RG)
        made = serve_arrived_backward(setup, wave, started, served, [do_RW, q_RW, *keys], own)
        return None, setup.give_back(wave, gradients_back(made, own, landing), backward=True)

    _, back = run_tasks(setup, out, run, serve, backward=True)
    return collect_backward(setup, BackwardServed(started, own, landing, back))


def serve_tick(setup: CallSetup, kind: LayerKind, backward: bool) -> None:
    """A tick on a rank that has no layer in it, or in whose layer no gradient is wanted."""
    shape, rows = kind.shape, setup.schedule.query_tokens

    def zeros(*size: int, dtype: torch.dtype = kind.dtype) -> torch.Tensor:
        return torch.zeros(rows, *size, dtype=dtype, device=setup.device)

    # In a backward, rows of a layer whose gradient nobody wants are in the plan all the same: they have none.
    q, k = (zeros(heads, shape.head_dim) for heads in (shape.query_heads, shape.groups))
    o, v = (zeros(heads, shape.value_dim) for heads in (shape.query_heads, shape.groups))
    if not backward:
        run_forward(setup, q, k, v)
        return
    kept = Kept(o, zeros(shape.query_heads, dtype=lse_dtype(kind.dtype)), (), None, 0)
    run_backward(setup, kept, torch.zeros_like(o), q, k, v)


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
        kept = run_forward(self.setup, q_THD, k_TKD, v_TKV)
        if sinks_H is not None:
            o, lse = fold_sinks(kept.o_THV, kept.lse_TH, sinks_H)
            kept = Kept(o, lse, (), sinks_H.clone(), version_of(o))
        # Saved plainly, O stays for the layer behind attention, and LSE alone is not worth the way.
        if self._saved_plainly:
            self.state = kept
        else:
            self.keep(kept, ())
        return kept.o_THV


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
        dq, dk, dv = run_backward(call.backward(), kept, do, q.detach(), k.detach(), v.detach())
        dsinks = sinks_gradient(call.setup, kept, do) if ctx.needs_input_grad[4] else None
        return None, dq, dk, dv, dsinks
