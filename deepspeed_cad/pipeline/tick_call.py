"""One layer's core attention where forward and backward tick have plans of their own, as in a pipeline.

The server of a row's backward need not be the server of its forward, and may run another layer itself. So the home
keeps O and LSE of all its rows and sends all that a backward needs: dO, Q, K, V, O and LSE. A server keeps nothing, and
knows of the layer only its kind; sinks, which are a layer's parameters, are folded in at home. The steps are those of
forward.py and backward.py but for that. `serve_tick` is the same for a rank that has no rows of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from deepspeed_cad.attention.backward import (
    BackwardServed,
    BackwardStarted,
    Gradients,
    collect_backward,
    gradients_back,
    new_landing,
    serve_arrived_backward,
)
from deepspeed_cad.attention.call import AttentionCall
from deepspeed_cad.attention.device_schedule import Batches
from deepspeed_cad.attention.forward import (
    ForwardServed,
    ForwardStarted,
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


def _serve_forward(setup: CallSetup, started: ForwardStarted) -> ForwardServed:
    """Run local and served batches, start sending O and LSE back, without sinks."""
    q, k, v = started.q_THD, started.k_UKD, started.v_UKV
    o, lse = new_outputs(setup.schedule, q, v)

    def run(batches: Batches) -> None:
        run_local(setup, batches, q, k, v, o, lse)

    def serve(wave: int, arrived: list[torch.Tensor]) -> tuple[None, Returned]:
        served = serve_arrived(setup, wave, started, arrived, o, lse)
        lse_back = Returning(QUERY, served.lse_RG.contiguous(), lse.unflatten(1, (k.shape[1], -1)))
        return None, setup.give_back(wave, [*outputs_back(started, served, o, lse), lse_back])

    _, back = run_tasks(setup, started.out, run, serve)
    return ForwardServed(started, o, lse, (), back)


def _start_backward(
    setup: CallSetup, kept: Kept, do_THV: torch.Tensor, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKV: torch.Tensor
) -> BackwardStarted:
    """Start sending dO, and all that the forward had and found."""
    # Of a row a slice takes one head group: laid out group by group, those few bytes of LSE lie side by side.
    lse_TKG = kept.lse_TH.unflatten(1, (k_TKD.shape[1], -1)).transpose(0, 1).contiguous().transpose(0, 1)
    rows = [by_group(x, k_TKD) for x in (do_THV, q_THD, kept.o_THV)]
    fields = [Outgoing(QUERY, x) for x in (*rows, lse_TKG)] + [Outgoing(KEY, x) for x in (k_TKD, v_TKV)]
    out = setup.dispatch(fields, backward=True)
    setup.begin(out, backward=True)
    return BackwardStarted(do_THV, q_THD, k_TKD, v_TKV, kept, out)


def _serve_backward(setup: CallSetup, started: BackwardStarted) -> BackwardServed:
    """Run the backward of local and served batches, start sending dQ, dK, dV back."""
    do, q, k, v, kept = started.do_THV, started.q_THD, started.k_UKD, started.v_UKV, started.kept
    own = Gradients(*new_gradients(setup.schedule, q, k, v))
    landing = new_landing(setup, own, k, v)
    home = HomeRows(do, q, kept.o_THV, kept.lse_TH, own.dq_THD)

    def run(batches: Batches) -> None:
        run_local_backward(setup, batches, home, k, v, own.dk_UKD, own.dv_UKV)

    def serve(wave: int, arrived: list[torch.Tensor]) -> tuple[None, Returned]:
        do_RW, q_RW, o_RW, lse_RG, *keys = arrived
        served = ServedOutputs(o_RW.unflatten(1, (-1, v.shape[2])), lse_RG)
        made = serve_arrived_backward(setup, wave, started, served, [do_RW, q_RW, *keys], own)
        return None, setup.give_back(wave, gradients_back(made, own, landing), backward=True)

    _, back = run_tasks(setup, started.out, run, serve, backward=True)
    return BackwardServed(started, own, landing, back)


def serve_tick(setup: CallSetup, kind: LayerKind, backward: bool) -> None:
    """A tick on a rank that has no layer in it, or in whose layer no gradient is wanted."""
    shape, rows = kind.shape, setup.schedule.query_tokens

    def zeros(*size: int, dtype: torch.dtype = kind.dtype) -> torch.Tensor:
        return torch.zeros(rows, *size, dtype=dtype, device=setup.device)

    # In a backward, rows of a layer whose gradient nobody wants are in the plan all the same: they have none.
    q, k = (zeros(heads, shape.head_dim) for heads in (shape.query_heads, shape.groups))
    o, v = (zeros(heads, shape.value_dim) for heads in (shape.query_heads, shape.groups))
    if not backward:
        collect_forward(setup, _serve_forward(setup, start_forward(setup, q, k, v, None)))
        return
    kept = Kept(o, zeros(shape.query_heads, dtype=lse_dtype(kind.dtype)), (), None, 0)
    collect_backward(setup, _serve_backward(setup, _start_backward(setup, kept, torch.zeros_like(o), q, k, v)))


class TickCall(AttentionCall):
    """One layer of one micro-batch on this rank: its forward tick, what it leaves, and its backward tick.

    From the forward until the backward ran it keeps, or parks, O, LSE and sinks, and nothing of what it served.
    """

    def __init__(self, forward: CallSetup, backward: Callable[[], CallSetup]) -> None:
        """`backward` begins this layer's backward tick; called when its gradient is there."""
        super().__init__(forward)
        self.enter_backward = backward
        self.backward_setup: CallSetup | None = None
        self.sinks_H: torch.Tensor | None = None

    def start_forward(
        self, q_THD: torch.Tensor, k_UKD: torch.Tensor, v_UKV: torch.Tensor, sinks_H: torch.Tensor | None
    ) -> None:
        self.sinks_H = None if sinks_H is None else sinks_H.clone()
        self.state = start_forward(self.setup, q_THD, k_UKD, v_UKV, None)

    def serve_forward(self) -> None:
        self.state = _serve_forward(self.setup, self.expect(ForwardStarted))

    def collect_forward(self) -> Kept:
        kept = collect_forward(self.setup, self.expect(ForwardServed))
        if self.sinks_H is None:
            return kept
        o, lse = fold_sinks(kept.o_THV, kept.lse_TH, self.sinks_H)
        return Kept(o, lse, (), self.sinks_H, version_of(o))

    def keep(self, kept: Kept, inputs: tuple[torch.Tensor, ...]) -> None:
        # Saved plainly, O stays for the layer behind attention, and LSE alone is not worth the way.
        if self._saved_plainly:
            self.state = kept
        else:
            super().keep(kept, ())

    def start_backward(
        self, kept: Kept, do_THV: torch.Tensor, q_THD: torch.Tensor, k_UKD: torch.Tensor, v_UKV: torch.Tensor
    ) -> None:
        self.backward_setup = self.enter_backward()
        self.state = _start_backward(self.backward_setup, kept, do_THV, q_THD, k_UKD, v_UKV)

    def serve_backward(self) -> None:
        assert self.backward_setup is not None  # its start has run
        self.state = _serve_backward(self.backward_setup, self.expect(BackwardStarted))

    def collect_backward(self) -> Gradients:
        assert self.backward_setup is not None
        gradients = collect_backward(self.backward_setup, self.expect(BackwardServed))
        self.end()
        return gradients
