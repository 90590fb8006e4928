"""A stage's part in the ticks of a round: the phase that runs, and the micro-batches between forward and backward.

In: the ticks of the program, which of them run a layer of this stage, and a way to set one up. A rank with a
micro-batch enters its ticks one by one as its layers call attention; ticks between them, and all ticks of a rank
without one, are served. So every rank starts the same exchanges in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch

from deepspeed_cad.attention.layer import LayerInput, Rows
from deepspeed_cad.attention.setup import CallSetup
from deepspeed_cad.errors import CADError
from deepspeed_cad.pipeline.program import ProgramTick
from deepspeed_cad.pipeline.tick_call import TickCall, serve_tick


@dataclass(eq=False)
class Phase:
    """The ticks of one direction of one round on this rank, in the order in which all ranks run them."""

    program: Sequence[ProgramTick]
    own: Sequence[int]
    """Ticks of the program that run a layer of this rank's micro-batch, in the order of the layers; empty where it has
    no micro-batch."""
    setup: Callable[[int, str], CallSetup]
    """Of a tick of the program; the text names what runs in it."""
    backward: bool
    done: int = 0
    """Ticks that ran, counted in the order of this phase."""

    def enter(self, layer: int, label: str) -> CallSetup:
        """The tick of a layer of this stage, which runs now; ticks before it are served first."""
        if layer >= len(self.own):
            raise CADError(
                f"{label} is attention layer {layer} (counted from 0) of this stage, which had {len(self.own)} when "
                "its layers were first run. A stage must run the same layers in every micro-batch"
            )
        position = self._position(self.own[layer])
        if position < self.done:
            raise CADError(
                f"{label} runs {'backward' if self.backward else 'forward'} when its turn is over. A stage must run "
                "its layers one after the other, in the same order in every micro-batch"
            )
        self._serve_until(position)
        self.done = position + 1
        return self.setup(self.own[layer], label)

    def finish(self) -> None:
        """Serve what is left. Raises CADError where a layer of this rank did not run forward."""
        if not self.backward and self.own and self.own[-1] >= self.done:
            ran = sum(tick < self.done for tick in self.own)
            raise CADError(
                f"this stage ran {ran} of its {len(self.own)} attention layers. A stage must run the same layers in "
                "every micro-batch"
            )
        self._serve_until(len(self.program))

    def _position(self, tick: int) -> int:
        return len(self.program) - 1 - tick if self.backward else tick

    def _serve_until(self, position: int) -> None:
        while self.done < position:
            tick = self._position(self.done)
            self.done += 1
            serve_tick(self.setup(tick, "serving"), self.program[tick].kind, self.backward)


@dataclass(eq=False)
class StageMicroBatch:
    """A micro-batch on its way through one stage, from its forward to the end of its backward."""

    forward: Phase | None = None
    """While its forward runs."""
    backward: Phase | None = None
    """While its backward runs."""
    _calls: dict[Hashable, TickCall] = field(default_factory=dict)
    """By attention module."""

    def attend(self, layer: LayerInput) -> torch.Tensor:
        """O [T, H, V] of one layer."""
        rows = layer.rows()
        return self._call(layer, rows)(*rows, layer.sinks_H)

    def _call(self, layer: LayerInput, given: Rows) -> TickCall:
        """A new call in a forward, and the same one where a layer is recomputed in the backward."""
        known, phase, label = self._calls.get(layer.layer), self.forward, layer.label
        if known is not None:
            if phase is not None:
                raise CADError(
                    f"{label} was called twice in one forward. Layers that share an attention module are not supported"
                )
            return known
        if phase is None:
            raise CADError(f"{label} ran in a backward, but not in the forward before it")
        number = len(self._calls)
        setup = phase.enter(number, label)
        kind, expected = layer.kind(given), phase.program[phase.own[number]].kind
        if kind != expected:
            raise CADError(f"{label} has {kind}, but had {expected} when its layers were first run")
        rows = setup.schedule.query_tokens
        if given.q_THD.shape[0] != rows:
            raise CADError(f"{label} got {given.q_THD.shape[0]} tokens where its micro-batch has {rows}")

        def backward() -> CallSetup:
            if self.backward is None:
                raise CADError(f"{label}: its backward runs outside of that of its micro-batch")
            return self.backward.enter(number, label)

        call = self._calls[layer.layer] = TickCall(setup, backward)
        return call
