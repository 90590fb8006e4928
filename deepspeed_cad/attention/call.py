"""One layer's core attention in one tick, as autograd sees it: dispatch, serve, collect.

Three nodes per call, so that two nano-batches can alternate and the backward is the mirror of the forward:

    forward    Dispatch: start Q, K, V out │ Serve: run tasks, start O back      │ Collect: wait for O
    backward   Collect: start dO (Q, K, V) │ Serve: run tasks, start dQ dK dV    │ Dispatch: wait for dQ, dK, dV

The nodes are thin callers of forward.py and backward.py. What one step leaves for the next is the call's `state`, not
in `save_for_backward`: under activation checkpointing the second forward of a layer finds O there and neither attends
nor exchanges. `T` query rows at home, `U` key rows at home; other shapes as in serve.py.

Where what a forward keeps is parked, it leaves `Parked` in place of `Kept`: O under checkpointing or offloading, else
Q, K and V, because the layer behind attention saves O all the same. What was served is a parcel of its own
(docs/architecture.md, "What is kept may wait in host memory").
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from deepspeed_cad.attention.backward import (
    BackwardServed,
    BackwardStarted,
    Gradients,
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
    ServedOutputs,
    collect_forward,
    pair_up,
    serve_forward,
    start_forward,
)
from deepspeed_cad.attention.nano_batches import hooks_save_tensors, unseen_by_checkpointing
from deepspeed_cad.attention.parking import Parcel, Parking
from deepspeed_cad.attention.setup import CallSetup
from deepspeed_cad.errors import CADError


def is_saved_plainly() -> bool:
    """Whether autograd keeps on the device what layers save now; to be asked outside of autograd functions."""
    return torch.is_grad_enabled() and not hooks_save_tensors()


class Parked:
    """What one forward kept, in host memory or on its way there."""

    def __init__(
        self, parking: Parking, kept: Kept, inputs: tuple[Tensor, ...], label: str, saved_plainly: bool
    ) -> None:
        """Begin to park. `inputs`: Q, K and V; `saved_plainly`: what `is_saved_plainly` said around the layer."""
        o_THV, lse_TH, *served = kept.tensors()
        self.has_inputs = saved_plainly
        """Q, K and V are parked too: autograd need not save them."""
        self.inputs: tuple[Tensor, ...] = ()
        """Q, K and V, back on the device, if they were parked."""
        self._o_THV = o_THV if saved_plainly else None
        self._rest = HeldByAutograd(kept.sinks_H, kept.version)
        self._parking = parking
        self._parcel = parking.park([*inputs, lse_TH] if saved_plainly else [o_THV, lse_TH], label)
        self._served = parking.park(served, label, wanted_early=False) if served else None

    @property
    def is_away(self) -> bool:
        """In host memory alone, apart from what was served."""
        return self._parcel.is_away

    def take(self) -> Kept:
        """O, LSE and what was parked with them on the device; what was served comes when it is asked for. Once."""
        tensors, rest, version = self._parcel.take(), self._rest, self._rest.version
        if self._o_THV is None:
            o_THV, lse_TH = tensors
            version = o_THV._version
        else:
            o_THV, (*inputs, lse_TH) = self._o_THV, tensors
            self.inputs = tuple(inputs)
        return Kept(o_THV, lse_TH, () if self._served is None else _ServedLater(self._served), rest.sinks_H, version)

    def part_with_served(self) -> None:
        """The layer runs again: what was served leaves now, where its forward was the last one."""
        if self._served is not None:
            self._parking.let_go(self._served)

    def fetch(self) -> None:
        """Begin to bring back what was served, and what backward needs next: that of the layer before."""
        if self._served is not None and self._served.is_away:
            self._served.fetch()
        self._parking.fetch_before(self._parcel.number)


class _ServedLater(Sequence[ServedOutputs]):
    """Results of served tasks, by waves: the stream that first asks for one waits until they are there."""

    def __init__(self, parcel: Parcel) -> None:
        self._parcel = parcel

    @cached_property
    def _found(self) -> tuple[ServedOutputs, ...]:
        return pair_up(self._parcel.take())

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, wave: Any) -> Any:
        return self._found[wave]


class Unused:
    """No forward has run."""


class Released:
    """A backward has run, and what the forward kept is freed."""


class Pass:
    """A pass runs that may have to run again; what its steps leave is there (surviving.py)."""


State = (Unused | ForwardStarted | ForwardServed | Kept | Parked | HeldByAutograd) | (
    BackwardStarted | BackwardServed | Released | Pass
)
Found = TypeVar("Found")


class AttentionCall:
    """Core attention of one layer, one micro-batch and one nano-batch, forward and backward."""

    def __init__(self, setup: CallSetup) -> None:
        self.setup = setup
        self.state: State = Unused()
        self.first_keys: tuple[Tensor, Tensor] | None = None
        """K and V that it read of the other nano-batch, for a layer that runs again before the other one does."""
        self.parked: Parked | None = None
        """From the forward until the backward ran, where what is kept is parked."""
        self._saved_plainly = self._trains = False

    def __call__(self, q_THD: Tensor, k_UKD: Tensor, v_UKV: Tensor, sinks_H: Tensor | None = None) -> Tensor:
        """O [T, H, V], all steps one after the other."""
        return self.collect(self.serve(self.dispatch(q_THD, k_UKD, v_UKV, sinks_H)), q_THD, k_UKD, v_UKV, sinks_H)

    # The three steps, between which nano-batches alternate.
    @unseen_by_checkpointing
    def dispatch(self, q_THD: Tensor, k_UKD: Tensor, v_UKV: Tensor, sinks_H: Tensor | None = None) -> Tensor:
        """Start the exchange of Q, K, V; gives the token to pass to `serve`."""
        return _Dispatch.apply(self, q_THD, k_UKD, v_UKV, None if sinks_H is None else sinks_H.detach())

    @unseen_by_checkpointing
    def serve(self, token: Tensor) -> Tensor:
        """Run this rank's tasks and start the exchange of O; gives the token to pass to `collect`."""
        return _Serve.apply(self, token)

    @unseen_by_checkpointing
    def collect(
        self, token: Tensor, q_THD: Tensor, k_UKD: Tensor, v_UKV: Tensor, sinks_H: Tensor | None = None
    ) -> Tensor:
        self._saved_plainly = is_saved_plainly()
        self._trains = any(x is not None and x.requires_grad for x in (q_THD, k_UKD, v_UKV, sinks_H))
        return _Collect.apply(self, token, q_THD, k_UKD, v_UKV, sinks_H)

    # The steps of both passes, as the nodes below call them.
    def start_forward(self, q_THD: Tensor, k_UKD: Tensor, v_UKV: Tensor, sinks_H: Tensor | None) -> None:
        self.state = start_forward(self.setup, q_THD, k_UKD, v_UKV, sinks_H)

    def serve_forward(self) -> None:
        self.state = serve_forward(self.setup, self.expect(ForwardStarted))

    def collect_forward(self) -> Kept:
        return collect_forward(self.setup, self.expect(ForwardServed))

    def start_backward(self, kept: Kept, do_THV: Tensor, q_THD: Tensor, k_UKD: Tensor, v_UKV: Tensor) -> None:
        self.state = start_backward(self.setup, kept, do_THV, q_THD, k_UKD, v_UKV)

    def serve_backward(self) -> None:
        self.state = serve_backward(self.setup, self.expect(BackwardStarted))

    def collect_backward(self) -> Gradients:
        """Wait for dQ, dK, dV; what the forward left is of no use any more."""
        done = self.expect(BackwardServed)
        gradients = collect_backward(self.setup, done)
        self.release(done.started.kept)
        return gradients

    @property
    def replaying(self) -> bool:
        """This is the second forward of a checkpointed layer and its result is at hand."""
        return isinstance(self.state, Kept | Parked)

    @property
    def parking(self) -> Parking | None:
        """Where what is kept goes; None where it stays, or where autograd holds it."""
        return None if self.setup.modes.recompute else self.setup.modes.parking

    def keep(self, kept: Kept, inputs: tuple[Tensor, ...]) -> None:
        if self._saved_plainly and not self._trains:
            self.end()  # as in frozen layers below all that is trained
        elif self.parking is None:
            self.state = kept
        else:
            self.state = self.parked = Parked(self.parking, kept, inputs, self.setup.label, self._saved_plainly)

    def take(self) -> Kept:
        """What the forward kept, on the device."""
        if isinstance(self.state, Parked):
            self.state = self.state.take()
        return self.expect(Kept)

    def expect(self, state: type[Found]) -> Found:
        """What the step before left. Raises CADError where that is something else."""
        if isinstance(self.state, state):
            return self.state
        if isinstance(self.state, Released):
            raise CADError(
                f"{self.setup.label}: a second backward through the same forward (retain_graph=True) is not supported: "
                "what attention keeps is freed as soon as its backward ran. Add the losses up and run one backward, or "
                'set "recompute_attention": true; in a pipeline let stages pass on one tensor that needs a gradient'
            )
        raise CADError(
            f"{self.setup.label}: its steps ran out of order: {type(self.state).__name__} where {state.__name__} was "
            "expected. An error in an earlier step does this; look for the first one"
        )

    def release(self, kept: Kept) -> None:
        """Hold no more of what a forward kept; where autograd holds it, a backward may run again."""
        if self.setup.modes.recompute:
            self.state = HeldByAutograd(kept.sinks_H, kept.version)
        else:
            self.end()

    def end(self) -> None:
        """Its backward is over, or none comes: hold nothing."""
        self.state, self.first_keys, self.parked = Released(), None, None


@dataclass(frozen=True)
class Calls:
    """How a micro-batch makes its attention calls. By default they run once, on ranks that stay until the job ends."""

    make: Callable[[Callable[[], CallSetup]], AttentionCall] = lambda make_setup: AttentionCall(make_setup())
    """The call of one layer and nano-batch."""
    prepare: Callable[[], None] = lambda: None
    """Before the forward of the micro-batch: waits until the ranks are there that take part in it."""
    renew: Callable[[Any], None] = lambda micro_batch: None
    """Before each call: plans the micro-batch again, if the ranks have changed."""
    compares_plans: bool = True
    """Whether trainers compare plans when they make them; else only the identity of each exchange does."""


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        ctx.call = call
        if isinstance(call.state, Released):
            call.expect(Kept)  # a checkpointed layer runs again for a second backward
        if not call.replaying:
            if call.parking is not None:
                call.parking.settle()
            call.setup.enter_attention(False)
            call.start_forward(q.detach(), k.detach(), v.detach(), sinks)
        return q.new_zeros(1)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        call: AttentionCall = ctx.call
        dq, dk, dv = call.collect_backward()
        call.setup.leave_attention(True)
        return None, dq, dk, dv, None


class _Serve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: AttentionCall, token: Tensor) -> Tensor:
        ctx.call = call
        if not call.replaying:
            call.serve_forward()
        return token.new_zeros(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: AttentionCall = ctx.call
        call.serve_backward()
        return None, torch.zeros_like(grad)


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: AttentionCall, token: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> Tensor:
        ctx.call = call
        replaying = call.replaying
        if replaying:
            call.setup.counts.replays += 1
            kept = call.take()
            if call.parked is not None:
                call.parked.part_with_served()
        else:
            kept = call.collect_forward()
            call.setup.leave_attention(False)
        if call.setup.modes.recompute:
            call.release(kept)
            ctx.save_for_backward(q, k, v, *kept.tensors())
            return kept.o_THV
        if not replaying:
            call.keep(kept, (q, k, v))
        if replaying or call.parked is None or not call.parked.has_inputs:
            ctx.save_for_backward(q, k, v)
        return kept.o_THV.detach()

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        call: AttentionCall = ctx.call
        if torch.is_grad_enabled():
            raise CADError(f"{call.setup.label}: create_graph=True (gradients of gradients) is not supported")
        saved = ctx.saved_tensors
        if len(saved) > 3:
            o, lse, *served = saved[3:]
            kept = Kept(o, lse, pair_up(served), *call.expect(HeldByAutograd))
        else:
            kept = call.take()
        if call.parked is not None:
            # Now, not sooner: what the layers behind attention saved is freed, so there is room.
            call.parked.fetch()
        q, k, v = saved[:3] or (call.parked.inputs if call.parked is not None else ())
        kept.check_unchanged(call.setup.label)
        do = with_packed_heads(do)
        if ctx.needs_input_grad[1]:
            call.setup.enter_attention(True)
            call.start_backward(kept, do, q.detach(), k.detach(), v.detach())
        else:
            # Nothing but the sinks is trained up to here: their gradient needs no other rank.
            call.release(kept)
        dsinks = sinks_gradient(call.setup, kept, do) if ctx.needs_input_grad[5] else None
        return None, do.new_zeros(1), None, None, None, dsinks
