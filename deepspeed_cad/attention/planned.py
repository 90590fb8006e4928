"""What is planned of a micro-batch: for which kinds of layers, for this rank, and how servers are told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from deepspeed_cad.attention.setup import CallOrders, Modes
from deepspeed_cad.kernels.interface import KernelNeed, MaskRule
from deepspeed_cad.layout import Layout
from deepspeed_cad.planner.plan import Alternation, Floats, HeadShape, Plan
from deepspeed_cad.schedule import Schedule
from deepspeed_cad.schedule.room import Room
from deepspeed_cad.schedule.waves import WHOLE, Cut


class MicroBatchOrders(Protocol):
    """Tells servers of one micro-batch, on the rank that leads them."""

    def plan(self, key: PlanKey, nano_batch: int, plan: Plan, cut: Cut) -> None:
        """What was planned for a kind of layer, and into which waves it is cut; of several the last one counts."""

    def room(self, key: PlanKey, nano_batch: int, room: Room) -> None:
        """All ranks make room for what was planned, now."""

    def call(
        self, place: tuple[int, int], key: PlanKey, need: KernelNeed, rule: MaskRule, modes: Modes, has_sinks: bool
    ) -> CallOrders:
        """Orders of one call; `place` is the layer and its nano-batch."""


class PlanKey(NamedTuple):
    """What plans of one micro-batch differ in: one plan serves every layer with the same key."""

    window: int | None
    shape: HeadShape
    chunk: int | None = None
    """Documents are cut every so many tokens, and a row reads keys of its own part; None: they are not."""


@dataclass(frozen=True, eq=False)
class PlannedTick:
    """A plan with this rank's schedules."""

    plan: Plan
    schedules: tuple[Schedule, ...]
    """By waves."""
    seconds: float
    """Time for plan and schedules."""
    cut: Cut = WHOLE
    """Which waves these are."""


class Starts(NamedTuple):
    """When ranks begin to attend in a tick, in seconds for its forward and backward together ([ranks] each)."""

    begin: Floats
    """From then on none is idle, if all goes as planned."""
    alternation: Alternation | None = None
    """Where another tick is attended in turn with this one."""


def whole_rank_tasks(layout: Layout, groups: int) -> np.ndarray:
    """Tasks of a layout in which every rank runs its own segments: what training without CAD does."""
    seg = layout.segments
    columns = [seg.document, seg.begin, seg.end, np.zeros_like(seg.rank), np.full_like(seg.rank, groups), seg.rank]
    return np.stack(columns, axis=1)
