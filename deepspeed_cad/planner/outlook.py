"""Outlook: what CAD would gain on a data set, before anyone rents the GPUs.

In: document lengths, ranks, context. Out: for each step the imbalance with and without CAD and the bytes moved, and the
gain in step time that follows from the share of attention in all floating-point work.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from deepspeed_cad.cost import CostModel, count_pairs
from deepspeed_cad.layout import Ints, Layout
from deepspeed_cad.planner import make_plan
from deepspeed_cad.planner.plan import HeadShape, PlanInput
from deepspeed_cad.stream import order_by_host


@dataclass(frozen=True)
class ModelShape:
    """What decides how much of a step is attention."""

    layers: int = 32
    hidden: int = 4096
    intermediate: int = 14336
    vocabulary: int = 128256
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    @property
    def layer_parameters(self) -> int:
        """Weights of the matrices of one layer: Q, K, V and O, and a gated MLP."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def parameters(self) -> int:
        """All weights: layers, embedding and head."""
        return self.layers * self.layer_parameters + 2 * self.hidden * self.vocabulary

    @property
    def row_flops(self) -> float:
        """Forward work of one token outside core attention."""
        return 2.0 * (self.layers * self.layer_parameters + self.hidden * self.vocabulary)

    @property
    def pair_flops(self) -> float:
        """Forward work of one query-key pair in all layers and heads."""
        return 4.0 * self.layers * self.heads * self.head_dim


@dataclass(frozen=True)
class StepOutlook:
    """One step of all ranks."""

    imbalance_before: float
    imbalance: float
    moved_bytes: int
    """One layer's forward, all ranks."""
    hottest_bytes: int
    between_bytes: int
    """Of the moved bytes, those between hosts."""
    attention_share: float
    """Of the floating-point work of the mean rank."""
    gain: float
    """Time of the slowest rank without CAD over that with it, what it waits for transfers included."""
    planning_ms: float


def pack(
    lengths: list[int], ranks: int, context: int, spanning: bool, zigzag_by_host: int | None = None
) -> Iterator[Layout]:
    """Micro-batches of all ranks, in the order of the documents; the last, partial one is left out.

    Ranks are filled one after the other with whole documents; those longer than the context are split, as packing in
    the Hugging Face trainers does. With `spanning`, documents go on on the next rank instead; with `zigzag_by_host`,
    the number of ranks on a host, each micro-batch is then laid out as `shard_stream` does it with both its options.
    """
    if spanning:
        budget, step, held = ranks * context, [], 0
        for length in lengths:
            while length:
                part = min(length, budget - held)
                step.append(part)
                held += part
                length -= part
                if held == budget:
                    if zigzag_by_host is not None:
                        step = [step[one] for one in order_by_host(step, ranks, context, zigzag_by_host)]
                    yield Layout.from_stream(step, ranks, context, zigzag_by_host is not None)
                    step, held = [], 0
        return
    rows: list[list[int]] = [[]]
    held = 0
    for length in lengths:
        while length:
            part = min(length, context)
            if held + part > context:
                if len(rows) == ranks:
                    yield Layout.from_rank_lengths(rows)
                    rows = []
                rows.append([])
                held = 0
            rows[-1].append(part)
            held += part
            length -= part


def foresee(
    layout: Layout, model: ModelShape, cost: CostModel, tolerance: float, hosts: Ints | None = None
) -> StepOutlook:
    """Plan one step and say what it gains."""
    shape = HeadShape(model.heads, model.kv_heads, model.head_dim, model.head_dim, 2)
    plan = make_plan(PlanInput(layout.tick(), shape, cost, tolerance=tolerance, hosts=hosts))
    segments = layout.segments
    pairs = float(count_pairs(segments.begin, segments.end).sum()) / layout.ranks
    rows = np.bincount(segments.rank, segments.end - segments.begin, minlength=layout.ranks) * model.row_flops
    attention = pairs * model.pair_flops
    scale = attention / plan.load.mean() if plan.load.mean() > 0 else 0.0
    before = float((rows + plan.load_before * scale).max())
    after = float((rows + plan.finish * scale).max())
    return StepOutlook(
        imbalance_before=plan.imbalance_before,
        imbalance=plan.imbalance,
        moved_bytes=int(plan.sent_bytes.sum()),
        hottest_bytes=int(np.maximum(plan.sent_bytes, plan.received_bytes).max()),
        between_bytes=plan.between_bytes,
        attention_share=attention / (attention + float(rows.mean())),
        gain=before / after,
        planning_ms=plan.planning_ms,
    )
