"""Where ping-pong cuts a micro-batch into two nano-batches."""

from __future__ import annotations

import numpy as np

from deepspeed_cad.layout import Ints, Layout

SMALLEST_SHARE = 0.2
"""A part with less than this share of all tokens hides too little: the micro-batch is not cut."""


def choose_cut(layout: Layout, unit: Ints) -> Ints | None:
    """Rows of each rank's first nano-batch ([ranks], multiples of `unit`), or None where no cut is worth it.

    Every rank is cut in the middle, unless rows before the cut would read keys behind it: where documents span ranks,
    the keys of the rank before are in its second part. Giving whole ranks to one part or the other would be allowed,
    but each part then has the attention of some ranks only: it moves several times the bytes that it hides.
    """
    tokens = layout.tokens
    if layout.ranks == 1 or not len(layout.segments):
        return None
    unit = np.maximum(unit, 1)
    step = np.where(unit > 1, unit, np.where(tokens >= 1024, 128, 1))
    middle = (tokens // 2 + step // 2) // step * step
    middle = np.minimum(middle, tokens // unit * unit)
    return middle if layout.can_cut(middle) and _worth(middle, tokens) else None


def _worth(at: Ints, tokens: Ints) -> bool:
    share = at.sum() / max(int(tokens.sum()), 1)
    return bool(SMALLEST_SHARE <= share <= 1 - SMALLEST_SHARE)
