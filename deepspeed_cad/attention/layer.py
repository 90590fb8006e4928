"""One attention layer's call, as a model makes it; what kernels must know of the layer, and what is planned for it.

In: Q, K and V of a layer. Out: rows as CAD's attention takes them. Whatever runs attention of a model has a method
`attend(layer: LayerInput)` that gives O [T, H, V].

`T` tokens; `H` and `K` query and key heads, `D` and `V` their sizes.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from deepspeed_cad.attention.setup import CallOrders, Modes
from deepspeed_cad.kernels.interface import KernelNeed, MaskRule
from deepspeed_cad.layout import Layout
from deepspeed_cad.planner.plan import Alternation, Floats, HeadShape, Plan
from deepspeed_cad.schedule import Schedule
from deepspeed_cad.schedule.waves import WHOLE, Cut, Room


class LayerKind(NamedTuple):
    """What a server must know of a layer to run its tasks."""

    shape: HeadShape
    rule: MaskRule
    dtype: torch.dtype


class PlanKey(NamedTuple):
    """What plans of one micro-batch differ in: one plan serves every layer with the same key."""

    window: int | None
    shape: HeadShape
    chunk: int | None = None
    """Documents are cut every so many tokens, and a row reads keys of its own part; None: they are not."""


class Rows(NamedTuple):
    """Q, K and V of one layer, token by token."""

    q_THD: Tensor
    k_TKD: Tensor
    v_TKV: Tensor


class LayerInput(NamedTuple):
    """What one layer passes to its attention."""

    layer: Hashable
    """Tells it from the other layers of its micro-batch: its module, or a name. A recompute finds its call by it."""
    q_THD: Tensor
    k_TKD: Tensor
    v_TKV: Tensor
    rule: MaskRule
    sinks_H: Tensor | None
    label: str
    """Names the layer in errors and on the timeline."""

    def rows(self) -> Rows:
        """Q, K and V in the dtype of attention; heads are contiguous, as kernels need them, also without rows."""
        cast = map(_as_autocast, (self.q_THD, self.k_TKD, self.v_TKV))
        return Rows(*(x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format) for x in cast))

    def kind(self, rows: Rows) -> LayerKind:
        """The kind of this layer; `rows` are its own, because autocast decides about their dtype."""
        q, k, v = rows
        shape = HeadShape(q.shape[1], k.shape[1], q.shape[2], v.shape[2], q.element_size())
        return LayerKind(shape, self.rule, q.dtype)


def kernel_need(kind: LayerKind, device: torch.device, deterministic: bool | None = None) -> KernelNeed:
    """What a layer needs of its kernel. `deterministic`: None for what torch is set to in this process."""
    shape, rule, dtype = kind
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    return KernelNeed(
        device, dtype, shape.head_dim, shape.value_dim, shape.heads_per_group,
        rule.window is not None, rule.softcap is not None, deterministic,
    )  # fmt: skip


def _as_autocast(x: Tensor) -> Tensor:
    """In the dtype that torch's own attention takes under autocast: rotary embeddings leave Q and K in fp32 there."""
    if not torch.is_autocast_enabled(x.device.type) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


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


@dataclass(frozen=True, eq=False)
class PlannedTick:
    """A plan with this rank's schedules."""

    plan: Plan
    schedules: tuple[Schedule, ...]
    seconds: float
    cut: Cut = WHOLE


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
