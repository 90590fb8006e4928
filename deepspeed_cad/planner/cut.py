"""Where ping-pong cuts a micro-batch into two nano-batches."""

from __future__ import annotations

import numpy as np

from deepspeed_cad.layout import Ints, Layout

SMALLEST_SHARE = 0.2
"""A part with less than this share of all tokens hides too little: the micro-batch is not cut."""


def choose_cut(layout: Layout, unit: Ints) -> Ints | None:
    """Rows of each rank's first nano-batch ([ranks], multiples of `unit`), or None where no cut is worth it.

    Every rank is cut in the middle where the rows before the cut read no key behind it. Where documents span ranks,
    that cannot be; then whole ranks go to one part or the other, early ones first, around those that may still be cut.
    """
    tokens = layout.tokens
    if layout.ranks == 1 or not len(layout.segments):
        return None
    unit = np.maximum(unit, 1)
    step = np.where(unit > 1, unit, np.where(tokens >= 1024, 128, 1))
    middle = (tokens // 2 + step // 2) // step * step
    middle = np.minimum(middle, tokens // unit * unit)
    if layout.can_cut(middle):
        return middle if _worth(middle, tokens) else None
    seg = layout.segments
    first = np.unique(seg.rank, return_index=True)[1]
    chained = {int(seg.rank[i]) for i in first if seg.begin[i] > 0}
    at = np.zeros(layout.ranks, np.int64)
    total = 0
    for rank in range(layout.ranks):
        # A rank whose successor goes on with its last document must be in the first part before the successor is.
        if total + tokens[rank] <= tokens.sum() / 2:
            at[rank] = tokens[rank]
        elif rank not in chained and rank + 1 not in chained:
            at[rank] = middle[rank]
        total += int(at[rank])
    return at if layout.can_cut(at) and _worth(at, tokens) else None


def _worth(at: Ints, tokens: Ints) -> bool:
    share = at.sum() / max(int(tokens.sum()), 1)
    return bool(SMALLEST_SHARE <= share <= 1 - SMALLEST_SHARE)
