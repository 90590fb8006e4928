"""A stage's part in the ticks of a round: the phase that runs, and the micro-batches between forward and backward.

In: the ticks of the program, which of them run a layer of this stage, and a way to set one up. A rank with a
micro-batch enters its ticks one by one as its layers call attention; ticks between them, and all ticks of a rank
without one, are served. So every rank starts the same exchanges in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from deepspeed_cad.attention.microbatch import as_autocast
from deepspeed_cad.attention.program import ProgramTick, kind_of
from deepspeed_cad.attention.setup import CallSetup
from deepspeed_cad.attention.tick import TickCall, serve_tick
from deepspeed_cad.errors import CADError
from deepspeed_cad.kernels.interface import MaskRule


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
    _calls: dict[int, TickCall] = field(default_factory=dict)
    """By attention module."""

    def attend(
        self,
        module: torch.nn.Module,
        q_BHSD: torch.Tensor,
        k_BKSD: torch.Tensor,
        v_BKSV: torch.Tensor,
        rule: MaskRule,
        sinks: torch.Tensor | None,
        label: str,
    ) -> torch.Tensor:
        """O [B, S, H, V] of one layer; arguments as those of MaskDescriptor.attend."""
        batch, _, width, _ = q_BHSD.shape
        if k_BKSD.shape[2] != width:
            raise CADError(
                f"{label} got {k_BKSD.shape[2]} keys for {width} queries: a KV cache is in use during training"
            )
        q, k, v = (as_autocast(x.transpose(1, 2)).flatten(0, 1) for x in (q_BHSD, k_BKSD, v_BKSV))
        k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
        call = self._call(module, q, k, v, rule, label)
        return call(q, k, v, sinks).unflatten(0, (batch, width))

    def _call(
        self, module: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: MaskRule, label: str
    ) -> TickCall:
        """A new call in a forward, and the same one where a layer is recomputed in the backward."""
        known, phase = self._calls.get(id(module)), self.forward
        if known is not None:
            if phase is not None:
                raise CADError(
                    f"{label} was called twice in one forward. Layers that share an attention module are not supported"
                )
            return known
        if phase is None:
            raise CADError(f"{label} ran in a backward, but not in the forward before it")
        layer = len(self._calls)
        setup = phase.enter(layer, label)
        kind, expected = kind_of(q, k, v, rule), phase.program[phase.own[layer]].kind
        if kind != expected:
            raise CADError(f"{label} has {kind}, but had {expected} when its layers were first run")
        rows = setup.schedule.query_tokens
        if q.shape[0] != rows:
            raise CADError(f"{label} got {q.shape[0]} tokens where its micro-batch has {rows}")

        def backward() -> CallSetup:
            if self.backward is None:
                raise CADError(f"{label}: its backward runs outside of that of its micro-batch")
            return self.backward.enter(layer, label)

        call = self._calls[id(module)] = TickCall(setup, backward)
        return call
