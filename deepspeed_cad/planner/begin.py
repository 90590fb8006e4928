"""When ranks begin to attend in place: what is not attention takes some of them longer than others.

A rank with more tokens, or a slower GPU, comes later to its attention. It should attend less, and whoever is early
more. In: seconds per token outside attention, the rows of a tick. Out: base loads, with which a plan makes whole layers
even and not attention alone. Training and the forecast ask it alike.
"""

from __future__ import annotations

import numpy as np

from deepspeed_cad.cost import CostModel
from deepspeed_cad.layout import Tick
from deepspeed_cad.planner.finish import common_finish
from deepspeed_cad.planner.plan import Floats


def begin_in_place(
    seconds: Floats, tick: Tick, cost: CostModel, groups: int, window: int | None, speeds: Floats | None = None
) -> Floats | None:
    """[ranks] seconds when every rank begins, in a tick that no other alternates with; None where all begin together.

    An early rank runs attention of its own until the keys and queries of the late ones arrive. Where it has too little
    of that it is idle for the rest, and a plan that counted on this time would be late. Rows that read keys of a late
    rank fill no time.

    Args:
        seconds: [ranks] per token of one layer outside attention, forward and backward.
        tick: whose attention is planned.
        cost: of attention, in seconds too.
        groups: head groups.
        window: of the layers, None without one.
        speeds: [ranks] in attention, beside what costs say; None: all are equal.
    """
    before = seconds * tick.query_tokens
    speed = np.ones(tick.ranks) if speeds is None else speeds
    rows = tick.query
    work = cost.of(rows.begin, rows.end, window) * groups
    own = np.bincount(rows.rank, work, tick.ranks)
    ends = before + own / np.where(speed > 0.0, speed, np.inf)
    late = ends > common_finish(own.sum(keepdims=True), before, speed)
    if not late.any():
        return None
    keys = _keys_there(before, tick)
    free = keys <= before[rows.rank]
    meanwhile = np.bincount(rows.rank[free], work[free], tick.ranks) / np.where(speed > 0.0, speed, np.inf)
    there = np.full(tick.ranks, before[late].max())
    np.maximum.at(there, rows.rank, keys)
    begin = np.maximum(before, there - meanwhile)
    begin -= begin.min()
    return begin if begin.any() else None


def _keys_there(before: Floats, tick: Tick) -> Floats:
    """[segments] when the last keys are there that the rows of a segment read, on whatever ranks."""
    rows = tick.query
    there = before[rows.rank]
    documents, ranks = rows.count_ranks()
    for document in documents[ranks > 1]:
        parts = np.flatnonzero(rows.document == document)
        parts = parts[np.argsort(rows.begin[parts])]
        there[parts] = np.maximum.accumulate(there[parts])
    return there
