"""A core-attention call that goes on where servers change: each of its passes can run again with others.

No trainer goes on behind a pass, one direction of one call, before every trainer has its result. So where a server is
lost all stand at the same collect, and take all steps of that pass again there, with the servers that are left. A pass
that another nano-batch has under way takes its steps again when its next one comes.

What a lost server held of a forward is gone, and the tasks of those that are left are others in the new plan. So a
backward whose forward ran with other servers attends again first.

In: the setup of the call, made again after each change. Out: what AttentionCall gives.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from deepspeed_cad.attention.backward import Gradients
from deepspeed_cad.attention.call import AttentionCall, Pass
from deepspeed_cad.attention.forward import Kept
from deepspeed_cad.attention.setup import CallCounts, CallSetup
from deepspeed_cad.errors import CADError, ServerLostError

Step = Callable[[AttentionCall], Any]


class Changing(Protocol):
    """The servers that there are."""

    repeated: int
    """Passes that ran again."""

    @property
    def generation(self) -> int:
        """How often they changed."""

    def all_have(self, result: bool) -> bool:
        """Whether every trainer has the result of a pass, as this one says of itself. Collective over trainers; where
        one has not, servers have changed before this returns."""


class SurvivingCall(AttentionCall):
    """See AttentionCall."""

    def __init__(self, make_setup: Callable[[], CallSetup], servers: Changing) -> None:
        """`make_setup` gives the setup with the present servers."""
        super().__init__(make_setup())
        self.make_setup, self.servers = make_setup, servers
        self._set_up_for = servers.generation
        self._left_by: int | None = None
        """The generation with which its forward ran."""
        self._steps: list[Step] = []
        """Of the pass that runs, as far as they were asked for."""
        self._attempt: AttentionCall | None = None
        """At these steps; None where servers are lost with which it began."""
        self._began_with: int | None = None
        """The generation of the attempt."""

    def start_forward(self, q_THD: Tensor, k_UKD: Tensor, v_UKV: Tensor, sinks_H: Tensor | None) -> None:
        self._begin(lambda attempt: attempt.start_forward(q_THD, k_UKD, v_UKV, sinks_H))

    def serve_forward(self) -> None:
        self._take(AttentionCall.serve_forward)

    def collect_forward(self) -> Kept:
        kept: Kept = self._collect(AttentionCall.collect_forward)
        self._left_by = self._began_with
        if not self.setup.modes.returns:
            self._forget()
        return kept

    def start_backward(self, kept: Kept, do_THV: Tensor, q_THD: Tensor, k_UKD: Tensor, v_UKV: Tensor) -> None:
        """See AttentionCall; attends again first where its forward ran with other servers."""

        def start(attempt: AttentionCall) -> None:
            left = kept
            if self._left_by != self._began_with:
                attempt.start_forward(q_THD, k_UKD, v_UKV, kept.sinks_H)
                attempt.serve_forward()
                left = attempt.collect_forward()
            attempt.start_backward(left, do_THV, q_THD, k_UKD, v_UKV)

        self._begin(start)

    def serve_backward(self) -> None:
        self._take(AttentionCall.serve_backward)

    def collect_backward(self) -> Gradients:
        gradients: Gradients = self._collect(AttentionCall.collect_backward)
        self.end()
        return gradients

    def end(self) -> None:
        super().end()
        self._forget()

    def _forget(self) -> None:
        """What makes its setup names its micro-batch, which names its calls: garbage that is collected late."""
        self.make_setup = _never

    def _begin(self, step: Step) -> None:
        self.state, self._steps, self._attempt, self._began_with = Pass(), [], None, None
        self._take(step)

    def _take(self, step: Step) -> Any:
        """What a step gives; None where servers are lost. Where they have changed since the one before, all steps
        before it are taken again: they are counted and traced once."""
        self.expect(Pass)
        self._steps.append(step)
        generation, steps = self.servers.generation, [step]
        try:
            if self._began_with != generation:
                self._began_with, again, steps = generation, len(self._steps) > 1, self._steps
                self.servers.repeated += again
                if self._set_up_for != generation:
                    self.setup, self._set_up_for = self.make_setup(), generation
                self._attempt = AttentionCall(replace(self.setup, counts=CallCounts()) if again else self.setup)
            return None if self._attempt is None else [one(self._attempt) for one in steps][-1]
        except ServerLostError:
            self._attempt = None
            # What one of two streams made may be freed now, and the other still reads it.
            if (aside := self.setup.aside) is not None:
                aside.wait_stream(torch.cuda.current_stream(self.setup.device))
            return None

    def _collect(self, step: Step) -> Any:
        """What the last step of a pass gives, when all trainers have it."""
        result = self._take(step)
        while not self.servers.all_have(result is not None):
            self._steps.pop()
            result = self._take(step)
        self._steps, self._attempt = [], None
        return result


def _never() -> CallSetup:
    raise CADError("a pass of a call whose backward is over would have to begin")
