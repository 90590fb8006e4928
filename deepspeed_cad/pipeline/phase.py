"""The ticks that all stages of a pipeline have in common, and a stage's part in those of a round: the phase that runs,
and the micro-batches between forward and backward.

In: the ticks of the program, which of them run a layer of this stage, and a way to set one up. A rank with a
micro-batch enters its ticks one by one as its layers call attention; ticks between them, and all ticks of a rank
without one, are served. So every rank starts the same exchanges in the same order.

The server of a row's backward need not be the server of its forward, and may run another layer itself: the calls run
with `Modes.results_travel`. A server knows of the layer only its kind; sinks, which are a layer's parameters, are
folded in at home.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepspeed_cad.attention.backward import collect_backward, serve_backward, start_backward
from deepspeed_cad.attention.call import AttentionCall
from deepspeed_cad.attention.forward import Kept, collect_forward, serve_forward, start_forward, version_of
from deepspeed_cad.attention.layer import LayerInput, LayerKind, Rows
from deepspeed_cad.attention.serve import fold_sinks, lse_dtype
from deepspeed_cad.attention.setup import CallSetup
from deepspeed_cad.errors import CADError

SAME_LAYERS = "A stage must run the same layers, one after the other, in the same order in every micro-batch"


@dataclass(frozen=True)
class ProgramTick:
    """One tick: the stages whose next attention layer it runs. All other ranks serve."""

    kind: LayerKind
    stages: tuple[int, ...]


def merge_stages(layers: Sequence[Sequence[LayerKind]]) -> tuple[ProgramTick, ...]:
    """Which layers of all stages (`layers[s]`) meet in which tick of a forward; a backward runs them in reverse.

    A tick has one kind of layer, because one plan has one window and one head shape; a stage that has no such layer at
    that point only serves. Ticks are a shortest sequence that contains the layers of each stage in order, found stage
    by stage."""
    merged: list[ProgramTick] = []
    for stage, own in enumerate(layers):
        merged = _merge(merged, stage, list(own))
    return tuple(merged)


def _merge(ticks: list[ProgramTick], stage: int, own: list[LayerKind]) -> list[ProgramTick]:
    """`ticks` with the layers of one more stage; layers that can share a tick do, as early as possible."""
    # shared[i][j]: most ticks that ticks[i:] and own[j:] can have in common.
    shared = [[0] * (len(own) + 1) for _ in range(len(ticks) + 1)]
    for i in reversed(range(len(ticks))):
        for j in reversed(range(len(own))):
            alike = ticks[i].kind == own[j]
            shared[i][j] = 1 + shared[i + 1][j + 1] if alike else max(shared[i + 1][j], shared[i][j + 1])
    merged: list[ProgramTick] = []
    i = j = 0
    while i < len(ticks) or j < len(own):
        if i < len(ticks) and j < len(own) and ticks[i].kind == own[j]:
            merged.append(ProgramTick(ticks[i].kind, (*ticks[i].stages, stage)))
            i, j = i + 1, j + 1
        elif j == len(own) or (i < len(ticks) and shared[i + 1][j] >= shared[i][j + 1]):
            merged.append(ticks[i])
            i += 1
        else:
            merged.append(ProgramTick(own[j], (stage,)))
            j += 1
    return merged


def serve_tick(setup: CallSetup, kind: LayerKind, backward: bool) -> None:
    """A tick on a rank that has no layer in it, or in whose layer no gradient is wanted."""
    shape, rows = kind.shape, setup.schedule.query_tokens

    def zeros(*size: int, dtype: torch.dtype = kind.dtype) -> Tensor:
        return torch.zeros(rows, *size, dtype=dtype, device=setup.device)

    # In a backward, rows of a layer whose gradient nobody wants are in the plan all the same: they have none.
    q, k = (zeros(heads, shape.head_dim) for heads in (shape.query_heads, shape.groups))
    o, v = (zeros(heads, shape.value_dim) for heads in (shape.query_heads, shape.groups))
    if not backward:
        collect_forward(setup, serve_forward(setup, start_forward(setup, q, k, v, None)))
        return
    kept = Kept(o, zeros(shape.query_heads, dtype=lse_dtype(kind.dtype)), (), None, 0)
    collect_backward(setup, serve_backward(setup, start_backward(setup, kept, torch.zeros_like(o), q, k, v)))


class TickCall(AttentionCall):
    """One layer of one micro-batch on this rank: its forward tick, what it leaves, and its backward tick."""

    def __init__(self, forward: CallSetup, backward: Callable[[], CallSetup]) -> None:
        """`backward` begins this layer's backward tick; called when its gradient is there."""
        super().__init__(forward)
        self.enter_backward = backward
        self.sinks_H: Tensor | None = None

    def start_forward(self, q_THD: Tensor, k_UKD: Tensor, v_UKV: Tensor, sinks_H: Tensor | None) -> None:
        self.sinks_H = None if sinks_H is None else sinks_H.clone()
        super().start_forward(q_THD, k_UKD, v_UKV, None)

    def collect_forward(self) -> Kept:
        kept = super().collect_forward()
        if self.sinks_H is None:
            return kept
        o, lse = fold_sinks(kept.o_THV, kept.lse_TH, self.sinks_H)
        return Kept(o, lse, (), self.sinks_H, version_of(o))

    def keep(self, kept: Kept, inputs: tuple[Tensor, ...]) -> None:
        # Saved plainly, O stays for the layer behind attention, and LSE alone is not worth the way.
        if self._saved_plainly:
            self.state = kept
        else:
            super().keep(kept, ())

    def start_backward(self, kept: Kept, do_THV: Tensor, q_THD: Tensor, k_UKD: Tensor, v_UKV: Tensor) -> None:
        self.setup = self.enter_backward()
        super().start_backward(kept, do_THV, q_THD, k_UKD, v_UKV)


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
        position = self._at(self.own[layer]) if layer < len(self.own) else -1
        if position < self.done:
            raise CADError(
                f"{label} runs {'backward' if self.backward else 'forward'} as attention layer {layer + 1} of "
                f"{len(self.own)} of this stage, when its turn is over. {SAME_LAYERS}"
            )
        self._serve_until(position)
        self.done = position + 1
        return self.setup(self.own[layer], label)

    def finish(self) -> None:
        """Serve what is left. Raises CADError where a layer of this rank did not run forward."""
        if not self.backward and self.own and self.own[-1] >= self.done:
            ran = sum(tick < self.done for tick in self.own)
            raise CADError(f"this stage ran {ran} of its {len(self.own)} attention layers. {SAME_LAYERS}")
        self._serve_until(len(self.program))

    def _at(self, tick: int) -> int:
        """Its place in this phase; and the tick at a place."""
        return len(self.program) - 1 - tick if self.backward else tick

    def _serve_until(self, position: int) -> None:
        while self.done < position:
            tick = self._at(self.done)
            self.done += 1
            serve_tick(self.setup(tick, "serving"), self.program[tick].kind, self.backward)


@dataclass(eq=False)
class StageMicroBatch:
    """A micro-batch on its way through one stage, from its forward to the end of its backward."""

    phase: Phase | None = None
    """That which runs; None between them."""
    calls: dict[Hashable, TickCall] = field(default_factory=dict)
    """By attention module."""

    def attend(self, layer: LayerInput) -> Tensor:
        """O [T, H, V] of one layer; one that is recomputed in the backward gets its call of the forward."""
        rows, call = layer.rows(), self.calls.get(layer.layer)
        forward = self.phase is not None and not self.phase.backward
        if (call is None) != forward:
            when = "was called twice in one forward" if forward else "runs in a backward, but ran in no forward"
            raise CADError(f"{layer.label} {when}. Layers that share an attention module are not supported")
        if call is None:
            call = self.calls[layer.layer] = self._new_call(layer.kind(rows), rows, layer.label)
        return call(*rows, layer.sinks_H)

    def _new_call(self, kind: LayerKind, given: Rows, label: str) -> TickCall:
        number = len(self.calls)

        def enter(backward: bool) -> CallSetup:
            if self.phase is None or self.phase.backward != backward:
                raise CADError(f"{label} runs outside of the forward or the backward of its micro-batch")
            return self.phase.enter(number, label)

        setup = enter(False)
        assert self.phase is not None
        expected, rows = self.phase.program[self.phase.own[number]].kind, setup.schedule.query_tokens
        if kind != expected:
            raise CADError(f"{label} has {kind}, but had {expected} when its layers were first run")
        if given.q_THD.shape[0] != rows:
            raise CADError(f"{label} got {given.q_THD.shape[0]} tokens where its micro-batch has {rows}")
        return TickCall(setup, lambda: enter(True))
