"""Outlook: what CAD would gain on a data set, before anyone rents the GPUs.

In: document lengths, ranks, context. Out: for each step the imbalance with and without CAD and the bytes moved, and the
gain in step time that follows from the share of attention in all floating-point work.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deepspeed_cad.cost import CostModel, count_pairs
from deepspeed_cad.forecast.model_shape import ModelShape
from deepspeed_cad.layout import Ints, Layout
from deepspeed_cad.planner import make_plan
from deepspeed_cad.planner.plan import HeadShape, Plan, PlanInput


@dataclass(frozen=True)
class StepOutlook:
    imbalance_before: float
    imbalance: float
    moved_bytes: int
    """One layer's forward, all ranks."""
    between_bytes: int
    """Of the moved bytes, those between hosts."""
    gain: float
    """Time of the slowest rank in plain training over that with CAD, what it waits for transfers included; once all
    modes are foreseen, seconds of the best rival over those of CAD."""
    planning_ms: float


def foresee(
    model: ModelShape, cost: CostModel, tolerance: float, hosts: Ints | None, layout: Layout, plan: Plan | None = None
) -> StepOutlook:
    """Say what CAD gains on one step by its plan, which is made, of attention alone, where it is not given."""
    shape = HeadShape(model.heads, model.kv_heads, model.head_dim, model.head_dim, 2)
    if plan is None:
        plan = make_plan(PlanInput(layout.tick(), shape, cost, tolerance=tolerance, hosts=hosts))
    segments = layout.segments
    pairs = float(count_pairs(segments.begin, segments.end).sum()) / layout.ranks
    rows = np.bincount(segments.rank, segments.end - segments.begin, minlength=layout.ranks) * model.row_flops
    attention = pairs * model.pair_flops
    own = np.bincount(segments.rank, cost.of(segments.begin, segments.end), layout.ranks) * shape.groups
    begin = plan.load_before - own  # where rows are not equally full
    scale = attention / own.mean() if own.mean() > 0 else 0.0
    before = float((rows + own * scale).max())
    after = float((rows + (plan.finish - begin) * scale).max())
    return StepOutlook(
        imbalance_before=plan.imbalance_before,
        imbalance=plan.imbalance,
        moved_bytes=int(plan.sent_bytes.sum()),
        between_bytes=plan.between_bytes,
        gain=before / after,
        planning_ms=plan.planning_ms,
    )
