"""A core-attention call that goes on where servers change: each of its passes can run again with others.

The home still has what a pass reads: Q, K, V of a forward, and dO of a backward. What a lost server held of a forward
is gone, and the tasks of those that are left are others in the new plan. So a backward whose forward ran with other
servers attends again first: one more forward, once, of each call that was in flight. All trainers see by the generation
of a call that they do, whether its own forward was under way at the change or long over.

A pass takes the steps of a plain `AttentionCall`, a new one for each attempt, whose state is how far the attempt came.
In: the setup of the call, made again after each change. Out: what AttentionCall gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch

from deepspeed_cad.attention.backward import Gradients
from deepspeed_cad.attention.call import AttentionCall, Pass
from deepspeed_cad.attention.forward import Kept
from deepspeed_cad.attention.setup import CallCounts, CallSetup
from deepspeed_cad.attention.surviving.origin import Origin
from deepspeed_cad.attention.surviving.passes import Passes
from deepspeed_cad.errors import CADError, ServerLostError

Result = TypeVar("Result", Kept, Gradients)
MakeSetup = Callable[[], CallSetup]


class SurvivingCall(AttentionCall):
    """See AttentionCall."""

    def __init__(self, make_setup: MakeSetup, passes: Passes) -> None:
        """`make_setup` gives the setup with the present servers; called inside steps of passes, and while halted."""
        self.make_setup, self.passes = make_setup, passes
        with passes.inside() as self._generation:
            super().__init__(make_setup())
        self.left: dict[int, Kept] = {}
        """What its last forward left, under the generation with which it ran to the end."""

    def start_forward(
        self, q_THD: torch.Tensor, k_UKD: torch.Tensor, v_UKV: torch.Tensor, sinks_H: torch.Tensor | None
    ) -> None:
        """See AttentionCall."""
        sinks = None if sinks_H is None else sinks_H.clone()  # the parameter itself may change before it runs again
        self.state = self._forward(q_THD, k_UKD, v_UKV, sinks)
        self.state.begin()

    def serve_forward(self) -> None:
        """See AttentionCall."""
        self.expect(SurvivingPass).serve()

    serve_backward = serve_forward

    def collect_forward(self) -> Kept:
        """See AttentionCall."""
        kept: Kept = self.expect(SurvivingPass).collect()
        if not self.setup.modes.returns:
            self.forget()
        return kept

    def start_backward(
        self, kept: Kept, do_THV: torch.Tensor, q_THD: torch.Tensor, k_UKD: torch.Tensor, v_UKV: torch.Tensor
    ) -> None:
        """See AttentionCall; attends again first where its forward ran with other servers."""
        qkv, sinks = (q_THD, k_UKD, v_UKV), kept.sinks_H

        def start(attempt: AttentionCall) -> None:
            attempt.start_backward(self.left[self.passes.generation], do_THV, *qkv)

        def repeat(attempt: AttentionCall) -> Gradients:
            # What servers held for it is gone.
            attempt.start_backward(_attend(attempt, *qkv, sinks), do_THV, *qkv)
            attempt.serve_backward()
            return attempt.collect_backward()

        again = self._repeat(q_THD.device, repeat, iter)
        self.state = SurvivingPass(
            self, start, AttentionCall.serve_backward, AttentionCall.collect_backward, again,
            forward=(lambda: self._forward(*qkv, sinks),),
        )  # fmt: skip
        self.state.begin()

    def collect_backward(self) -> Gradients:
        """See AttentionCall."""
        gradients: Gradients = self.expect(SurvivingPass).collect()
        self.end()
        return gradients

    def end(self) -> None:
        """See AttentionCall."""
        super().end()
        self.forget()

    def forget(self) -> None:
        """No pass of it will begin any more. What makes its setup names its micro-batch, which names its calls: all
        would stay until garbage is collected."""
        self.left, self.make_setup = {}, _never

    def update(self, generation: int, make_setup: MakeSetup) -> CallSetup:
        """Its setup with the present servers."""
        if self._generation != generation:
            self.setup, self._generation = make_setup(), generation
        return self.setup

    def _forward(
        self, q_THD: torch.Tensor, k_UKD: torch.Tensor, v_UKV: torch.Tensor, sinks_H: torch.Tensor | None
    ) -> SurvivingPass[Kept]:
        read = q_THD, k_UKD, v_UKV, sinks_H

        def collect(attempt: AttentionCall) -> Kept:
            kept = attempt.collect_forward()
            self.left = {self.passes.generation: kept}
            return kept

        def repeat(attempt: AttentionCall) -> Kept:
            kept = _attend(attempt, *read)
            self.left = {self.passes.generation: kept}
            if isinstance(self.state, Kept):
                self.state = kept
            return kept

        def start(attempt: AttentionCall) -> None:
            attempt.start_forward(*read)

        again = self._repeat(q_THD.device, repeat, lambda kept: [*kept.tensors(), kept.sinks_H])
        return SurvivingPass(self, start, AttentionCall.serve_forward, collect, again)

    def _repeat(
        self,
        device: torch.device,
        run: Callable[[AttentionCall], Result],
        tensors: Callable[[Result], Iterable[torch.Tensor | None]],
    ) -> Callable[[], Result]:
        """All of a pass once more, with the present servers, beside the training thread: nothing of it is counted or
        traced. Made where the pass is about to begin, and held as long as some rank may need it."""
        make_setup, origin = self.make_setup, Origin(device)

        def repeat() -> Result:
            setup = self.update(self.passes.generation, make_setup)
            origin.await_inputs()
            with torch.no_grad():
                result = run(AttentionCall(replace(setup, counts=CallCounts())))
            origin.hand_over(tensors(result))
            return result

        return repeat


def _attend(attempt: AttentionCall, *read: Any) -> Kept:
    attempt.start_forward(*read)
    attempt.serve_forward()
    return attempt.collect_forward()


def _never() -> CallSetup:
    raise CADError("a pass of a call whose backward is over would have to begin")


class SurvivingPass(Pass, Generic[Result]):
    """One direction of one call, on the training thread, until its result is collected."""

    def __init__(
        self,
        call: SurvivingCall,
        start: Callable[[AttentionCall], None],
        serve: Callable[[AttentionCall], None],
        collect: Callable[[AttentionCall], Result],
        repeat: Callable[[], Result],
        forward: tuple[Callable[[], SurvivingPass[Kept]], ...] = (),
    ) -> None:
        """What has not begun; `start`, `serve` and `collect` are its steps. `forward`: of a backward, makes the pass
        that has to run first where servers have changed since the last one."""
        self.index = 0
        self.repeat: Callable[[], Result] = repeat
        self._call, self._passes, self._make_setup = call, call.passes, call.make_setup
        self._start, self._serve, self._forward = start, serve, forward
        self._collect: Callable[[AttentionCall], Result] = collect
        self._attempt = AttentionCall(self._call.setup)
        self._results: list[Result] = []
        """What it gave, once all of it ran."""

    @property
    def has_result(self) -> bool:
        """See passes.Repeatable."""
        return bool(self._results)

    def begin(self) -> None:
        """See passes.Repeatable."""
        while not self._take(self._begin):
            for make in self._forward:
                first = make()
                self._passes.follows(first, self)
                first.begin()
                first.serve()
                first.collect()

    def _begin(self, generation: int) -> bool:
        if self._forward and generation not in self._call.left:
            return False
        self._attempt = AttentionCall(self._call.update(generation, self._make_setup))
        self._passes.enter(self)
        self._start(self._attempt)
        self._passes.begun(self)
        return True

    def serve(self) -> None:
        """What was dispatched has arrived when this is over: all ranks have come to that."""
        self._take(lambda generation: self._serve(self._attempt))
        with self._passes.inside():
            self._passes.met(self)

    def collect(self) -> Result:
        """What it gave."""
        self._take(lambda generation: self._results.append(self._collect(self._attempt)))
        with self._passes.inside():
            self._passes.leave(self)
        return self._results[-1]

    def _take(self, step: Callable[[int], bool | None]) -> bool | None:
        """What a step gives, begun again until it went well; True where all of the pass ran again meanwhile."""
        while True:
            # What other ranks had not entered begins again, in the order in which they do.
            while (undone := self._passes.take_undone(self)) is not None:
                undone.begin()
            with self._passes.inside() as generation:
                if self._results:
                    return True
                if self._passes.has_undone(self):
                    continue
                try:
                    return step(generation)
                except ServerLostError:
                    # What one of two streams made may be freed now, and the other still reads it.
                    if (aside := self._call.setup.aside) is not None:
                        aside.wait_stream(torch.cuda.current_stream(self._call.setup.device))
            self._passes.wait_for_change(generation)
            if self._results:
                return True
            if self.index:
                raise CADError(f"{self._call.setup.label}: its exchange was lost with a server, and did not run again")

    def run_again(self) -> None:
        """See passes.Repeatable."""
        self._results.append(self.repeat())

    def forget_progress(self) -> None:
        """See passes.Repeatable."""
        self._attempt = AttentionCall(self._call.setup)
