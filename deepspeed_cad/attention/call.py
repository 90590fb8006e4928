"""One layer's core attention in one tick, as autograd sees it: dispatch, serve, collect.

Three nodes per call, so that two nano-batches can alternate and the backward is the mirror of the forward:

    forward    Dispatch: start Q, K, V out │ Serve: run tasks, start O back      │ Collect: wait for O
    backward   Collect: start dO (Q, K, V) │ Serve: run tasks, start dQ dK dV    │ Dispatch: wait for dQ, dK, dV

The nodes are thin callers of forward.py and backward.py. What one step leaves for the next is the call's `state`, not
in `save_for_backward`: under activation checkpointing the second forward of a layer finds O there and neither attends
nor exchanges. `T` query rows at home, `U` key rows at home; other shapes as in serve.py.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from deepspeed_cad.attention.backward import (
    BackwardServed,
    BackwardStarted,
    collect_backward,
    serve_backward,
    sinks_gradient,
    start_backward,
    with_packed_heads,
)
from deepspeed_cad.attention.forward import (
    ForwardServed,
    ForwardStarted,
    HeldByAutograd,
    Kept,
    collect_forward,
    serve_forward,
    start_forward,
)
from deepspeed_cad.attention.setup import CallSetup
from deepspeed_cad.errors import CADError


class Unused:
    """No forward has run."""


class Released:
    """A backward has run, and what the forward kept is freed."""


State = Unused | ForwardStarted | ForwardServed | Kept | HeldByAutograd | BackwardStarted | BackwardServed | Released
Found = TypeVar("Found", ForwardStarted, ForwardServed, Kept, HeldByAutograd, BackwardStarted, BackwardServed)


class AttentionCall:
    """Core attention of one layer, one micro-batch and one nano-batch, forward and backward."""

    def __init__(self, setup: CallSetup) -> None:
        self.setup = setup
        self.state: State = Unused()
        self.first_keys: tuple[torch.Tensor, torch.Tensor] | None = None
        """K and V that it read of the other nano-batch, for a layer that runs again before the other one does."""

    def __call__(
        self, q_THD: torch.Tensor, k_UKD: torch.Tensor, v_UKV: torch.Tensor, sinks_H: torch.Tensor | None = None
    ) -> torch.Tensor:
        """O [T, H, V], all steps one after the other."""
        token = self.serve(self.dispatch(q_THD, k_UKD, v_UKV, sinks_H))
        return self.collect(token, q_THD, k_UKD, v_UKV, sinks_H)

    # The three steps, for ping-pong to interleave.
    def dispatch(
        self, q_THD: torch.Tensor, k_UKD: torch.Tensor, v_UKV: torch.Tensor, sinks_H: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Start the exchange of Q, K, V; gives the token to pass to `serve`."""
        return _Dispatch.apply(self, q_THD, k_UKD, v_UKV, None if sinks_H is None else sinks_H.detach())

    def serve(self, token: torch.Tensor) -> torch.Tensor:
        """Run this rank's tasks and start the exchange of O; gives the token to pass to `collect`."""
        return _Serve.apply(self, token)

    def collect(
        self,
        token: torch.Tensor,
        q_THD: torch.Tensor,
        k_UKD: torch.Tensor,
        v_UKV: torch.Tensor,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """O [T, H, V]."""
        return _Collect.apply(self, token, q_THD, k_UKD, v_UKV, sinks_H)

    @property
    def replaying(self) -> bool:
        """This is the second forward of a checkpointed layer and its result is at hand."""
        return isinstance(self.state, Kept)

    def expect(self, state: type[Found]) -> Found:
        """What the step before left. Raises CADError where that is something else."""
        if isinstance(self.state, state):
            return self.state
        if isinstance(self.state, Released):
            raise CADError(
                f"{self.setup.label}: a second backward through the same forward (retain_graph=True) is not supported: "
                "what attention keeps is freed as soon as its backward ran. Add the losses up and run one backward, or "
                'set "recompute_attention": true'
            )
        raise CADError(
            f"{self.setup.label}: its steps ran out of order: {type(self.state).__name__} where {state.__name__} was "
            "expected. An error in an earlier step does this; look for the first one"
        )

    def release(self, kept: Kept) -> None:
        """Hold no more of what a forward kept; where autograd holds it, a backward may run again."""
        if self.setup.modes.recompute:
            self.state = HeldByAutograd(len(kept.served), kept.sinks_H, kept.version)
        else:
            self.state, self.first_keys = Released(), None


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.call = call
        if isinstance(call.state, Released):
            call.expect(Kept)  # a checkpointed layer runs again for a second backward
        if not call.replaying:
            call.setup.end_linear(False)
            call.state = start_forward(call.setup, q.detach(), k.detach(), v.detach(), sinks)
        return q.new_zeros(1)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: AttentionCall = ctx.call
        done = call.expect(BackwardServed)
        dq, dk, dv = collect_backward(call.setup, done)
        call.release(done.started.kept)
        call.setup.begin_linear(True)
        return None, dq, dk, dv, None


class _Serve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: AttentionCall, token: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        if not call.replaying:
            call.state = serve_forward(call.setup, call.expect(ForwardStarted))
        return token.new_zeros(1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: AttentionCall = ctx.call
        call.state = serve_backward(call.setup, call.expect(BackwardStarted))
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
            call.setup.counts.replays += 1
            kept = call.expect(Kept)
        else:
            kept = collect_forward(call.setup, call.expect(ForwardServed))
            call.setup.begin_linear(False)
        if call.setup.modes.recompute:
            call.release(kept)
            ctx.save_for_backward(q, k, v, *kept.tensors())
            return kept.o_THV
        call.state = kept
        ctx.save_for_backward(q, k, v)
        return kept.o_THV.detach()

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: AttentionCall = ctx.call
        q, k, v, *held = ctx.saved_tensors
        kept = call.expect(HeldByAutograd).kept(held) if held else call.expect(Kept)
        kept.check_unchanged(call.setup.label)
        do = with_packed_heads(do)
        if ctx.needs_input_grad[1]:
            call.setup.end_linear(True)
            call.state = start_backward(call.setup, kept, do, q.detach(), k.detach(), v.detach())
        else:
            # Nothing but the sinks is trained up to here: their gradient needs no other rank.
            call.release(kept)
        dsinks = sinks_gradient(call.setup, kept, do) if ctx.needs_input_grad[5] else None
        return None, do.new_zeros(1), None, None, None, dsinks
