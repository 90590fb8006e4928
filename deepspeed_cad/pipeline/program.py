"""The ticks of a stack of layers that is cut into pipeline stages: which layers of all stages meet in which tick.

In: the attention layers of every stage, in their order. Out: a sequence of ticks that all stages have in common. A tick
has one kind of layer, because one plan has one window and one head shape; a stage that has no such layer at that point
only serves. Stages with the same layers have one tick per layer; otherwise the sequence is a shortest one that contains
the layers of every stage in order, found stage by stage. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed_cad.attention.layer import LayerKind


@dataclass(frozen=True)
class ProgramTick:
    """One tick: the stages whose next attention layer it runs. All other ranks serve."""

    kind: LayerKind
    stages: tuple[int, ...]


def merge_stages(layers: Sequence[Sequence[LayerKind]]) -> tuple[ProgramTick, ...]:
    """The ticks of a forward; a backward runs them from the last to the first. `layers[s]`: those of stage s."""
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
