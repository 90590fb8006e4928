"""Where a micro-batch is cut into two nano-batches: in place, and beside reserved servers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deepspeed_cad.cost import PAIRS, CostModel
from deepspeed_cad.layout import Ints, Layout

SMALLEST_SHARE = 0.2
"""Share of all tokens. A part with less hides too little: the micro-batch is not cut. A choice, not measured."""
LINEAR_PAIRS = 24_000
"""Query-key pairs of all heads that the rest of a layer costs for one token. By arithmetic for a layer of 8B size: 2
FLOPs for each of 218 million parameters against 4 FLOPs per pair and unit of the hidden size (4096) is 26,600. Rounded
down; which of the two is taken moves the cut of a 64K document by one of the SHARES."""
SHARES = np.arange(16, 49) / 64
"""Shares of its tokens that every rank may have in the first part: a quarter to three quarters. Later rows of a
document have more keys, so it is mostly more than half."""
CLEARLY_BETTER = 1e-3
"""Share of all work by which another cut must be more even than one nearer to the middle. A choice: without it a
micro-batch of short documents would be cut anywhere."""
ROUND_ROWS = 128
"""Rows. Ranks of ROUND_FROM tokens or more are cut at multiples of it, where kernels lose nothing (the granularity)."""
ROUND_FROM = 1024


def choose_cut(layout: Layout, unit: Ints) -> Ints | None:
    """Rows of each rank's first nano-batch ([ranks], multiples of `unit`), or None where no cut is worth it.

    Every rank is cut at the same share of its tokens: the one at which both parts have as much work, attention by
    pairs plus LINEAR_PAIRS per token, so that each is long enough to hide the other's transfers. Not where rows before
    the cut would read keys behind it. With whole ranks in one part or the other each part would have the attention of
    some ranks only, and move several times the bytes that it hides."""
    tokens = layout.tokens
    if layout.ranks == 1 or not len(layout.segments):
        return None
    unit = np.maximum(unit, 1)
    if not layout.can_cut(_at(0.5, tokens, unit)):
        return None
    total = _work(layout, tokens)
    best, least = None, np.inf
    for share in SHARES[np.argsort(np.abs(SHARES - 0.5), kind="stable")]:
        at = _at(share, tokens, unit)
        uneven = abs(total - 2 * _work(layout, at))
        # The middle, and what is near it, stays unless another is clearly better.
        if uneven < least - CLEARLY_BETTER * total and _worth(at, tokens) and layout.can_cut(at):
            best, least = at, uneven
    return best


@dataclass(frozen=True)
class PlanLayers:
    """`layers` of a model that share a plan: same heads, same mask. Costs are of one head group."""

    cost: CostModel
    window: int | None
    groups: int
    layers: int = 1


FINER = np.arange(-3, 4) / 256
"""Steps around the best of the SHARES. At equal linear and attention work, 1/64 of a document's tokens beside the best
cut is 2.5 % of the time, and 1/256 is 0.6 % (arithmetic)."""


def choose_interleaved_cut(
    layout: Layout, unit: Ints, kinds: Sequence[PlanLayers], servers: float, linear: float | None, helpers: float
) -> Ints | None:
    """Rows of each rank's first nano-batch where linear layers of one run while servers attend the other, or None.

    A layer takes two stretches: linear layers of the second beside attention of the first, and the other way about.
    Every rank is cut at the same share of its tokens, at which both together are shortest, and of those that are as
    good the one that leaves most time to spare in the tighter stretch.

    Args:
        layout: of trainers and servers; servers have no tokens.
        unit: [ranks] rows that a cut is a multiple of.
        kinds: of the model's layers, with costs in the unit of `linear`; none known yet: pairs of full attention.
        servers: the sum of their speeds.
        linear: seconds per token of all but attention in one layer, forward and backward (with the recompute), on a
            trainer; None or 0: not known, both nano-batches get as much attention.
        helpers: trainers that serve where servers have no time, the sum of their speeds."""
    tokens = layout.tokens
    unit = np.maximum(unit, 1)
    known, each = (kinds, linear or 0.0) if kinds else ([PlanLayers(PAIRS, None, 1)], 0.0)
    seg = layout.segments

    def judge(share: float) -> tuple[float, float, Ints] | None:
        at = _at(share, tokens, unit)
        if not _worth(at, tokens) or not layout.can_cut(at):
            return None
        middle = seg.begin + np.clip(at[seg.rank] - seg.offset, 0, seg.end - seg.begin)
        first, second = _mean(known, seg.begin, middle), _mean(known, middle, seg.end)
        if not each:
            return max(first, second), 0.0, at
        # The slowest trainer's linear layers, then what is served meanwhile.
        stretches = [(each * float((tokens - at).max()), first), (each * float(at.max()), second)]
        time = sum(max(own, (helpers * own + served) / (servers + helpers)) for own, served in stretches)
        return time, max(served - servers * own for own, served in stretches), at

    coarse = {share: found for share in SHARES if (found := judge(share)) is not None}
    if not coarse:
        return None
    near = min(coarse, key=lambda share: coarse[share][:2])
    judged = list(coarse.values()) + [found for step in FINER if (found := judge(near + step)) is not None]
    least = min(time for time, _, _ in judged)
    return min((one for one in judged if one[0] <= least * (1 + CLEARLY_BETTER)), key=lambda one: one[1:2] + one[:1])[2]


def _mean(kinds: Sequence[PlanLayers], begin: Ints, end: Ints) -> float:
    """Attention of one layer, the mean over all, for query rows [begin, end) of every segment."""
    work = sum(float(one.cost.of(begin, end, one.window).sum()) * one.groups * one.layers for one in kinds)
    return work / sum(one.layers for one in kinds)


def _at(share: float, tokens: Ints, unit: Ints) -> Ints:
    """Each rank's rows before the cut, at round numbers."""
    step = np.where(unit > 1, unit, np.where(tokens >= ROUND_FROM, ROUND_ROWS, 1))
    return np.minimum((np.floor(tokens * share).astype(np.int64) + step // 2) // step * step, tokens // unit * unit)


def _work(layout: Layout, at: Ints) -> float:
    """Work of rows [0, at[r]) of every rank r."""
    seg = layout.segments
    rows = np.clip(at[seg.rank] - seg.offset, 0, seg.end - seg.begin)
    return float(PAIRS.of(seg.begin, seg.begin + rows).sum() + LINEAR_PAIRS * at.sum())


def _worth(at: Ints, tokens: Ints) -> bool:
    return bool(SMALLEST_SHARE <= at.sum() / max(int(tokens.sum()), 1) <= 1 - SMALLEST_SHARE)
