"""One layer's core attention in one tick, as autograd sees it: dispatch, serve, collect.

Three nodes per call, so that two nano-batches can alternate and the backward is the mirror of the forward:

    forward    Dispatch: start Q, K, V out │ Serve: run tasks, start O back      │ Collect: wait for O
    backward   Collect: start dO (Q, K, V) │ Serve: run tasks, start dQ dK dV    │ Dispatch: wait for dQ, dK, dV

Results live on the `AttentionCall`, not in `save_for_backward`: under activation checkpointing the second forward
of a layer finds O there and neither attends nor exchanges. `T` query rows at home, `U` key rows at home; other shapes
as in serve.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from deepspeed_cad.attention.serve import (
    Batches,
    Prepared,
    by_group,
    new_gradients,
    new_outputs,
    run_local,
    run_local_backward,
    run_served,
    run_served_backward,
)
from deepspeed_cad.errors import CADError
from deepspeed_cad.exchange.identity import Moment
from deepspeed_cad.exchange.transport import Dispatched, Outgoing, Returned, Returning, Transport
from deepspeed_cad.exchange.waits import Waits
from deepspeed_cad.kernels.interface import Kernel, MaskRule
from deepspeed_cad.schedule import KEY, QUERY
from deepspeed_cad.trace.record import NOT_TRACED, Tracer


@dataclass
class CallCounts:
    """What was executed: tests and the monitor read it."""

    forwards: int = 0
    backwards: int = 0
    replays: int = 0
    waits: Waits = field(default_factory=Waits)
    tracer: Tracer | None = None
    """Records a timeline, where one is wanted."""


@dataclass(frozen=True)
class Modes:
    """How a call overlaps, keeps and recomputes."""

    local_first: bool = True
    """Run local batches while the dispatch is under way."""
    recompute: bool = False
    """Let activation checkpointing run core attention again instead of keeping O and LSE."""
    keep_received: bool = False
    """A server keeps the Q, K, V it received until backward instead of receiving them again."""


@dataclass(eq=False)
class AttentionCall:
    """Core attention of one layer, one micro-batch and one nano-batch."""

    prepared: Prepared
    kernel: Kernel
    transport: Transport | None
    """None: a group of one rank, nothing to exchange."""
    rule: MaskRule
    modes: Modes
    counts: CallCounts
    slot: int = 0
    label: str = "attention"
    turn: int = 0
    layer: int = 0
    """Which micro-batch and which of its layers: equal on all ranks, see exchange.identity.Moment."""
    sinks: torch.Tensor | None = None
    aside: torch.cuda.Stream | None = None
    """On which served batches run beside local ones; None: all run on the current stream, one after the other."""
    done: bool = False
    released: bool = False
    _inputs: tuple[torch.Tensor, ...] = ()
    outputs: tuple[torch.Tensor, ...] = ()
    """Kept until backward: O, LSE at home; O, LSE of served tasks; then Q, K, V received where they are kept."""
    _out: Dispatched | None = None
    _back: Returned | None = None
    _sinks: torch.Tensor | None = None
    """A copy of the sinks that the forward used: the parameter itself may be sharded again by backward."""
    _gradients: Any = ()
    _ends: tuple[torch.cuda.Event, torch.cuda.Event, torch.cuda.Event] | None = None
    """Where two streams ran: when own batches ended, when what is served arrived, when that ended."""
    _landing: tuple[torch.Tensor, ...] = ()
    """dK and dV that take what other ranks send: those of `_gradients`, or copies where local batches added in fp32."""
    _backward_inputs: tuple[torch.Tensor, ...] = field(default=())

    def __call__(self, q_THD: torch.Tensor, k_UKD: torch.Tensor, v_UKV: torch.Tensor) -> torch.Tensor:
        """O [T, H, V], all steps one after the other."""
        return self.collect(self.serve(self.dispatch(q_THD, k_UKD, v_UKV)), q_THD, k_UKD, v_UKV)

    # The three steps, for ping-pong to interleave.
    def dispatch(self, q_THD: torch.Tensor, k_UKD: torch.Tensor, v_UKV: torch.Tensor) -> torch.Tensor:
        """Start the exchange of Q, K, V; gives the token to pass to `serve`."""
        return _Dispatch.apply(self, q_THD, k_UKD, v_UKV)

    def serve(self, token: torch.Tensor) -> torch.Tensor:
        """Run this rank's tasks and start the exchange of O; gives the token to pass to `collect`."""
        return _Serve.apply(self, token)

    def collect(
        self, token: torch.Tensor, q_THD: torch.Tensor, k_UKD: torch.Tensor, v_UKV: torch.Tensor
    ) -> torch.Tensor:
        """O [T, H, V]."""
        return _Collect.apply(self, token, q_THD, k_UKD, v_UKV, self.sinks)

    def traced(self, what: str, backward: bool = False, aside: bool = False) -> AbstractContextManager[None]:
        """A span of the timeline, where one is recorded."""
        tracer = self.counts.tracer
        return NOT_TRACED if tracer is None else tracer.span(what, self.slot, self.label, backward, aside)

    @property
    def replaying(self) -> bool:
        """This is the second forward of a checkpointed layer and its result is at hand."""
        return self.done and not self.modes.recompute

    def forward_dispatch(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Start sending Q, K, V."""
        if self.released:
            raise CADError(
                f"{self.label}: backward through the same forward a second time (retain_graph) is not supported: "
                "attention outputs are freed as soon as their backward ran"
            )
        self._inputs = (q, k, v)
        self._sinks = None if self.sinks is None else self.sinks.detach().clone()
        if self.transport is not None:
            fields = [Outgoing(QUERY, by_group(q, k)), Outgoing(KEY, k), Outgoing(KEY, v)]
            with self.traced("dispatch"):
                moment = Moment(self.turn, self.layer)
                self._out = self.transport.dispatch(self.prepared.schedule, fields, self.slot, moment)

    def forward_serve(self) -> None:
        """Run local and served batches, start sending O back."""
        q, k, v = self._inputs
        sinks, aside = self._sinks, self.aside is not None
        o, lse = new_outputs(self.prepared, q, v)

        def run(batches: Batches) -> None:
            run_local(batches, self.kernel, self.rule, q, k, v, o, lse, sinks)

        def serve(received: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            q_RW, k_SD, v_SV = received
            groups = k.shape[1]
            q_RGD, k_S1D, v_S1V = q_RW.unflatten(1, (-1, q.shape[2])), k_SD.unsqueeze(1), v_SV.unsqueeze(1)
            with self.traced("served", aside=aside):
                served_o, served_lse = run_served(self.prepared, self.kernel, self.rule, q_RGD, k_S1D, v_S1V, sinks)
            fields = [Returning(QUERY, served_o.flatten(1), o.unflatten(1, (groups, -1)).flatten(2))]
            if sinks is not None:
                fields.append(Returning(QUERY, served_lse, lse.unflatten(1, (groups, -1))))
            kept = tuple(x.clone() for x in (q_RGD, k_S1D, v_S1V)) if self.modes.keep_received else ()
            self._give_back(fields)
            return served_o, served_lse, *kept

        self.outputs = (o, lse, *self._run(run, serve))

    def forward_collect(self) -> torch.Tensor:
        """Wait until O is complete at home."""
        self._wait_back()
        if self.counts.tracer is not None:
            self.counts.tracer.mark("attention ends", self.slot)
        self._out = None
        self._inputs = ()
        self.done = True
        self.counts.forwards += 1
        return self.outputs[0]

    def backward_dispatch(
        self, do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, outputs: tuple[torch.Tensor, ...]
    ) -> torch.Tensor | None:
        """Start sending dO (and Q, K, V); gives the gradient of the sinks, if there are any."""
        if not outputs:
            raise CADError(f"{self.label}: its outputs were already freed; backward can run once per forward")
        self._backward_inputs = (do, q, k, v, *outputs)
        if self.transport is not None:
            fields = [Outgoing(QUERY, by_group(do, k))]
            if len(outputs) == 4:
                fields += [Outgoing(QUERY, by_group(q, k)), Outgoing(KEY, k), Outgoing(KEY, v)]
            with self.traced("dispatch", backward=True):
                moment = Moment(self.turn, self.layer, backward=True)
                self._out = self.transport.dispatch(self.prepared.schedule, fields, self.slot, moment)
        if self._sinks is None:
            return None
        o, lse = outputs[:2]
        weight = torch.exp(self._sinks.to(lse.dtype) - lse)
        if len(self.prepared.padding):
            weight[self.prepared.padding] = 0
        return -(weight * (do.to(lse.dtype) * o.to(lse.dtype)).sum(-1)).sum(0).to(self._sinks.dtype)

    def backward_serve(self) -> None:
        """Run the backward of local and served batches, start sending dQ, dK, dV back."""
        do, q, k, v, o, lse, *served = self._backward_inputs
        dq, dk, dv = self._gradients = new_gradients(self.prepared, q, k, v)
        self._landing = (dk, dv) if dk.dtype == k.dtype else (torch.empty_like(k), torch.empty_like(v))

        def run(batches: Batches) -> None:
            run_local_backward(
                batches, self.kernel, self.rule, do, q, k, v, o, lse, self._gradients, self.prepared.local_keys_overlap
            )

        def serve(received: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            do_RW, *resent = received
            served_o, served_lse, *kept = served
            if kept:
                q_RGD, k_S1D, v_S1V = kept
            else:
                q_RGD = resent[0].unflatten(1, (-1, q.shape[2]))
                k_S1D, v_S1V = resent[1].unsqueeze(1), resent[2].unsqueeze(1)
            with self.traced("served", backward=True, aside=self.aside is not None):
                dq_RGD, dk_S1D, dv_S1V = run_served_backward(
                    self.prepared, self.kernel, self.rule,
                    do_RW.unflatten(1, (-1, v.shape[2])), q_RGD, k_S1D, v_S1V, served_o, served_lse,
                )  # fmt: skip
            fields = [
                Returning(QUERY, dq_RGD.flatten(1), by_group(dq, dk)),
                Returning(KEY, dk_S1D.flatten(1), self._landing[0], add=True),
                Returning(KEY, dv_S1V.flatten(1), self._landing[1], add=True),
            ]
            self._give_back(fields, backward=True)
            return ()

        self._run(run, serve, backward=True)

    def backward_collect(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """dQ, dK, dV, complete; everything this call held is freed."""
        dq, dk, dv = self._gradients
        if self._back is not None:
            for landing, wide in zip(self._landing, (dk, dv), strict=True):
                if landing is not wide:
                    landing.copy_(wide)
            dk, dv = self._landing
            self._wait_back(backward=True)
        if self.counts.tracer is not None:
            self.counts.tracer.mark("attention ends", self.slot, backward=True)
        _, _, k, v, *_ = self._backward_inputs
        self._out = None
        self._gradients = self._landing = self._backward_inputs = self.outputs = ()
        self.released = True
        self.counts.backwards += 1
        return dq, dk.to(k.dtype), dv.to(v.dtype)

    def _run(
        self,
        run: Callable[[Batches], None],
        serve: Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]],
        backward: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        """Run local batches and, between them or beside them, serve; gives what `serve` gives."""
        early, late = self.prepared.early, self.prepared.late
        if self.transport is None:
            with self.traced("local", backward):
                run(early + late)
            return ()
        if self.aside is not None:
            return self._run_beside(self.aside, run, serve, backward)
        received = None if self.modes.local_first else self._wait_out(backward)
        with self.traced("local", backward):
            run(early)
        served = serve(received or self._wait_out(backward))
        with self.traced("local", backward):
            run(late)
        return served

    def _run_beside(
        self,
        aside: torch.cuda.Stream,
        run: Callable[[Batches], None],
        serve: Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]],
        backward: bool,
    ) -> tuple[torch.Tensor, ...]:
        """As `_run`, on two streams: kernels of one fill the processors that the last blocks of the other leave idle.

        Memory belongs to the stream that made it, and both read what the other made. What the current stream made is
        freed only after `_wait_back`, or an error here, has made it wait for `aside`. What `aside` made is read by the
        current stream only where results are placed at home; `_wait_back` makes `aside` wait for that.
        """
        current = torch.cuda.current_stream(self.prepared.padding.device)
        own_end, arrived, served_end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        aside.wait_event(current.record_event())
        with self.traced("local", backward):
            run(self.prepared.early)
        own_end.record(current)
        try:
            with torch.cuda.stream(aside):
                with self.traced("wait", backward, aside=True):
                    received = self._require_out().wait()
                arrived.record(aside)
                served = serve(received)
                with self.traced("local", backward, aside=True):
                    run(self.prepared.late)
                served_end.record(aside)
        except BaseException:
            current.wait_stream(aside)
            raise
        self._ends = (own_end, arrived, served_end)
        return served

    def _give_back(self, fields: list[Returning], backward: bool = False) -> None:
        assert self.transport is not None
        with self.traced("return", backward, aside=self.aside is not None):
            moment = Moment(self.turn, self.layer, backward)
            self._back = self.transport.give_back(self.prepared.schedule, fields, self.slot, moment)

    def _wait_out(self, backward: bool = False) -> list[torch.Tensor]:
        with self.traced("wait", backward), self.counts.waits.timed(self.prepared.padding.device):
            return self._require_out().wait()

    def _wait_back(self, backward: bool = False) -> None:
        """Wait for what comes back, and for the other stream where there is one."""
        if self._back is None:
            return
        device = self.prepared.padding.device
        if self._ends is not None and self.aside is not None:
            current = torch.cuda.current_stream(device)
            returned = torch.cuda.Event(enable_timing=True)
            with self.traced("wait", backward):
                current.wait_event(self._ends[-1])
                self._back.wait()
            returned.record(current)
            self.aside.wait_event(returned)
            self.counts.waits.beside(*self._ends, returned)
            self._ends = None
        else:
            with self.traced("wait", backward), self.counts.waits.timed(device, ends_tick=True):
                self._back.wait()
        self._back = None

    def _require_out(self) -> Dispatched:
        if self._out is None:
            raise CADError(f"{self.label}: no exchange is under way")
        return self._out


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        if not call.replaying:
            call.forward_dispatch(q.detach(), k.detach(), v.detach())
        return q.new_zeros(1)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dq, dk, dv = ctx.call.backward_collect()
        need = ctx.needs_input_grad
        return None, dq if need[1] else None, dk if need[2] else None, dv if need[3] else None


class _Serve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: AttentionCall, token: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        if not call.replaying:
            call.forward_serve()
        return token.new_zeros(1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.call.backward_serve()
        return None, torch.zeros_like(grad)


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: AttentionCall,
        token: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.call = call
        if call.replaying:
            call.counts.replays += 1
            o = call.outputs[0]
        else:
            o = call.forward_collect()
        if call.modes.recompute:
            # Autograd holds everything, so that checkpointing frees and recomputes it.
            ctx.save_for_backward(q, k, v, *call.outputs[1:], o)
            call.outputs = ()
            return o
        ctx.save_for_backward(q, k, v)
        return o.detach()

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: AttentionCall = ctx.call
        q, k, v, *rest = ctx.saved_tensors
        outputs = (rest[-1], *rest[:-1]) if call.modes.recompute else call.outputs
        do = do if do.stride(-1) == 1 and do.stride(-2) == do.shape[-1] else do.contiguous()
        dsinks = call.backward_dispatch(do, q.detach(), k.detach(), v.detach(), tuple(x.detach() for x in outputs))
        return None, do.new_zeros(1), None, None, None, dsinks if ctx.needs_input_grad[5] else None
