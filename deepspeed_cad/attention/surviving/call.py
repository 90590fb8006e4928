"""A core-attention call that goes on where reserved servers change: each of its passes can run again with others.

The home still has what a pass reads: Q, K, V of a forward, and dO of a backward. What a lost server held of a forward
is gone, and the tasks of those that are left are others in the new plan. So a backward whose forward ran with other
servers attends again first: one more forward, once, of each call that was in flight. All trainers see by the generation
of a call that they do, whether its own forward was under way at the change or long over.

In: the setup of the call, made again after each change. Out: what AttentionCall gives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from deepspeed_cad.attention.backward import (
    BackwardServed,
    BackwardStarted,
    Gradients,
    collect_backward,
    serve_backward,
    start_backward,
)
from deepspeed_cad.attention.call import AttentionCall, InPass
from deepspeed_cad.attention.forward import (
    ForwardServed,
    ForwardStarted,
    Kept,
    collect_forward,
    serve_forward,
    start_forward,
)
from deepspeed_cad.attention.setup import CallCounts, CallSetup
from deepspeed_cad.attention.surviving.origin import Origin
from deepspeed_cad.attention.surviving.passes import Passes
from deepspeed_cad.errors import CADError, ServerLostError

Setups = Callable[[], CallSetup]


class RepeatableCall(AttentionCall):
    """See AttentionCall."""

    def __init__(self, make_setup: Setups, passes: Passes) -> None:
        """`make_setup` gives the setup with the present servers; called inside steps of passes, and while halted."""
        self._make_setup: Setups | None = make_setup
        self._passes = passes
        with passes.inside() as generation:
            super().__init__(make_setup())
            self._generation = generation
        self._forward: ForwardPass | None = None
        self._backward: BackwardPass | None = None
        self.attended = -1
        """The generation with which its last forward ran to the end."""
        self.again: Kept | None = None
        """What that left, where it ran again."""

    def start_forward(
        self, q_THD: torch.Tensor, k_UKD: torch.Tensor, v_UKV: torch.Tensor, sinks_H: torch.Tensor | None
    ) -> None:
        """See AttentionCall."""
        sinks = None if sinks_H is None else sinks_H.clone()  # the parameter itself may change before it runs again
        self._forward, self.state = ForwardPass(self, q_THD, k_UKD, v_UKV, sinks), InPass()
        self.begin(self._forward)

    def serve_forward(self) -> None:
        """See AttentionCall."""
        self.expect(InPass)
        one = self._forward
        assert one is not None
        self._serve(one)

    def collect_forward(self) -> Kept:
        """See AttentionCall."""
        self.expect(InPass)
        one, self._forward = self._forward, None
        assert one is not None
        return self._end_forward(one)

    def start_backward(
        self, kept: Kept, do_THV: torch.Tensor, q_THD: torch.Tensor, k_UKD: torch.Tensor, v_UKV: torch.Tensor
    ) -> None:
        """See AttentionCall; attends again first where its forward ran with other servers."""
        self.state = InPass()
        self._backward = BackwardPass(self, kept, do_THV, q_THD, k_UKD, v_UKV)
        self.begin(self._backward)

    def serve_backward(self) -> None:
        """See AttentionCall."""
        self.expect(InPass)
        one = self._backward
        assert one is not None
        self._serve(one)

    def collect_backward(self) -> tuple[Gradients, Kept]:
        """See AttentionCall."""
        self.expect(InPass)
        one, self._backward = self._backward, None
        assert one is not None
        self._step(one, one.collect)
        gradients = one.result
        assert gradients is not None
        kept = one.kept
        assert kept is not None
        self._leave(one)
        return gradients, kept

    def release(self, kept: Kept) -> None:
        """See AttentionCall."""
        super().release(kept)
        self.again = None
        if not self.setup.modes.recompute:
            # It names its micro-batch, which names its calls: both would stay until garbage is collected.
            self._make_setup = None

    # Steps

    def begin(self, one: ForwardPass | BackwardPass) -> None:
        """The first step of a pass, until it went well."""
        while True:
            self._begin_undone(one)
            with self._passes.inside() as generation:
                if self._passes.has_undone(one):
                    continue
                ready = one.is_ready(generation)
                if ready and self._try_to_start(one, generation):
                    return
            if not ready:
                one.prepare()
                continue
            self._passes.wait_for_change(generation)
            if one.result is not None:
                return  # It ran again because all ranks have entered it.
            self._check_undone(one)

    def _begin_undone(self, one: ForwardPass | BackwardPass) -> None:
        """What other ranks had not entered begins again, in the order in which they do."""
        while (other := self._passes.take_undone(one)) is not None:
            other.begin()

    def _check_undone(self, one: ForwardPass | BackwardPass) -> None:
        if one.index:
            raise CADError(f"{self.setup.label}: its exchange was lost with a server, and did not run again")

    def _try_to_start(self, one: ForwardPass | BackwardPass, generation: int) -> bool:
        self.update(generation)
        self._passes.enter(one)
        try:
            one.start(self.setup)
        except ServerLostError:
            return False
        self._passes.begun(one)
        return True

    def _serve(self, one: ForwardPass | BackwardPass) -> None:
        """What was dispatched has arrived when this is over: all ranks have come to that."""
        self._step(one, one.serve)
        with self._passes.inside():
            self._passes.met(one)

    def _step(self, one: ForwardPass | BackwardPass, run: Callable[[CallSetup], None]) -> None:
        while True:
            self._begin_undone(one)
            with self._passes.inside() as generation:
                if one.result is not None:
                    return
                if self._passes.has_undone(one):
                    continue
                try:
                    run(self.setup)
                    return
                except ServerLostError:
                    self._settle()
            self._passes.wait_for_change(generation)
            if one.result is not None:
                return
            self._check_undone(one)

    def _settle(self) -> None:
        """A step ended early: what one of two streams made may be freed, and the other still reads it."""
        if self.setup.aside is not None:
            self.setup.aside.wait_stream(torch.cuda.current_stream(self.setup.device))

    def _end_forward(self, one: ForwardPass) -> Kept:
        self._step(one, one.collect)
        kept = one.result
        assert kept is not None
        self._leave(one)
        if not self.setup.modes.returns:
            self._make_setup = None
        return kept

    def _leave(self, one: ForwardPass | BackwardPass) -> None:
        with self._passes.inside():
            self._passes.leave(one)

    def attend_again(
        self, ahead_of: BackwardPass, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> None:
        """A forward of this rank's own accord, with the present servers, for a backward that begins."""
        one = ForwardPass(self, q, k, v, sinks)
        self._passes.follows(one, ahead_of)
        self.begin(one)
        self._serve(one)
        self.again = self._end_forward(one)

    # While servers change

    def update(self, generation: int, make_setup: Setups | None = None) -> CallSetup:
        """Its setup with the present servers."""
        make = make_setup or self._make_setup
        if self._generation != generation and make is not None:
            self.setup, self._generation = make(), generation
        return self.setup

    def took(self, kept: Kept, generation: int) -> None:
        """Its forward ran again."""
        self.attended, self.again = generation, kept
        if isinstance(self.state, Kept):
            self.state = kept

    def quiet(self, make_setup: Setups | None) -> CallSetup:
        """Its setup for a pass that runs again, beside the training thread: nothing of it is counted or traced."""
        return replace(self.update(self._passes.generation, make_setup), counts=CallCounts())

    @property
    def make_setup(self) -> Setups | None:
        """For passes that outlive it."""
        return self._make_setup

    @property
    def generation(self) -> int:
        """Of the present servers."""
        return self._passes.generation


class ForwardPass:
    """See passes.Pass."""

    def __init__(
        self,
        call: RepeatableCall,
        q_THD: torch.Tensor,
        k_UKD: torch.Tensor,
        v_UKV: torch.Tensor,
        sinks_H: torch.Tensor | None,
    ) -> None:
        self.index = 0
        self.result: Kept | None = None
        self._call, self._make_setup = call, call.make_setup
        self._read, self._origin = (q_THD, k_UKD, v_UKV, sinks_H), Origin(q_THD.device)
        self._state: ForwardStarted | ForwardServed | None = None

    @property
    def has_result(self) -> bool:
        """See Pass."""
        return self.result is not None

    def is_ready(self, generation: int) -> bool:
        """Whether it can start."""
        return True

    def prepare(self) -> None:
        """Nothing to do."""

    def start(self, setup: CallSetup) -> None:
        """Start sending Q, K, V."""
        self._state = start_forward(setup, *self._read)

    def serve(self, setup: CallSetup) -> None:
        """Run tasks, start sending O back."""
        assert isinstance(self._state, ForwardStarted)
        self._state = serve_forward(setup, self._state)

    def collect(self, setup: CallSetup) -> None:
        """Wait for O."""
        assert isinstance(self._state, ForwardServed)
        self.result, self._state = collect_forward(setup, self._state), None
        self._call.attended, self._call.again = self._call.generation, None

    def begin(self) -> None:
        """See Pass."""
        self._call.begin(self)

    def run_again(self) -> None:
        """See Pass."""
        setup = self._call.quiet(self._make_setup)
        self._origin.await_inputs()
        with torch.no_grad():
            kept = collect_forward(setup, serve_forward(setup, start_forward(setup, *self._read)))
        self._origin.hand_over([*kept.tensors(), kept.sinks_H])
        self._call.took(kept, self._call.generation)
        self.result = kept

    def forget_progress(self) -> None:
        """See Pass."""
        self._state = None

    def end(self) -> None:
        """See Pass."""
        self.result = None


class BackwardPass:
    """See passes.Pass."""

    def __init__(
        self,
        call: RepeatableCall,
        kept: Kept,
        do_THV: torch.Tensor,
        q_THD: torch.Tensor,
        k_UKD: torch.Tensor,
        v_UKV: torch.Tensor,
    ) -> None:
        self.index = 0
        self.result: Gradients | None = None
        self.kept: Kept | None = kept
        self._call, self._make_setup, self._sinks_H = call, call.make_setup, kept.sinks_H
        self._do_THV, self._read, self._origin = do_THV, (q_THD, k_UKD, v_UKV), Origin(q_THD.device)
        self._state: BackwardStarted | BackwardServed | None = None

    @property
    def has_result(self) -> bool:
        """See Pass."""
        return self.result is not None

    def is_ready(self, generation: int) -> bool:
        """Whether its forward ran with the present servers."""
        return self._call.attended == generation

    def prepare(self) -> None:
        """Attend again."""
        self._call.attend_again(self, *self._read, self._sinks_H)

    def start(self, setup: CallSetup) -> None:
        """Start sending dO."""
        kept = self._call.again or self.kept
        assert kept is not None
        self._state = start_backward(setup, kept, self._do_THV, *self._read)

    def serve(self, setup: CallSetup) -> None:
        """Run tasks, start sending dQ, dK, dV back."""
        assert isinstance(self._state, BackwardStarted)
        self._state = serve_backward(setup, self._state)

    def collect(self, setup: CallSetup) -> None:
        """Wait for dQ, dK, dV."""
        assert isinstance(self._state, BackwardServed)
        self.result, self._state = collect_backward(setup, self._state), None

    def begin(self) -> None:
        """See Pass."""
        self._call.begin(self)

    def run_again(self) -> None:
        """See Pass. What servers held for it is gone, so its forward runs first."""
        setup = self._call.quiet(self._make_setup)
        self._origin.await_inputs()
        with torch.no_grad():
            kept = collect_forward(setup, serve_forward(setup, start_forward(setup, *self._read, self._sinks_H)))
            started = start_backward(setup, kept, self._do_THV, *self._read)
            result = collect_backward(setup, serve_backward(setup, started))
        self._origin.hand_over(result)
        self.result = result

    def forget_progress(self) -> None:
        """See Pass."""
        self._state = None

    def end(self) -> None:
        """See Pass."""
        self.result = self.kept = None
