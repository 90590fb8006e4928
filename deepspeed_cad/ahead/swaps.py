"""Swaps: a long document of one row against short documents of another, so that both rows keep their length.

In: the documents of two rows. Out: a `Swap`, or None. Subset sums are bit sets held in Python's integers (bit s is set
where some documents have s tokens together), so that a row of a hundred thousand tokens takes a millisecond.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deepspeed_cad.layout import Ints

Floats = npt.NDArray[np.float64]

LONG_CANDIDATES = 4
"""Long documents that are tried for one swap, those whose work is nearest to what is wanted. A choice: bounds time."""
SHORT_DOCUMENTS = 512
"""Documents of the light row among which a sum is looked for. A choice: time and memory grow with it."""
COMPANIONS = 48
"""Documents of the heavy row that may go along with the long one, likewise."""


@dataclass(frozen=True)
class Swap:
    """Documents that change places between two rows."""

    given: list[int]
    """Of the heavy row: the long one first."""
    taken: list[int]
    """Of the light row."""
    work: float
    """Attention that the heavy row loses and the light row gains."""
    tokens: int
    """Tokens that travel, both ways."""


class RowSums:
    """Token sums that subsets of a row's documents reach; its first k documents are its k shortest."""

    def __init__(self, documents: list[int], length: Ints) -> None:
        self.documents = sorted((one for one in documents if length[one] > 0), key=lambda one: (length[one], one))
        self.length = length[self.documents].tolist()
        self._bits = [1]

    def shorter(self, tokens: int, most: int) -> int:
        """How many documents have fewer tokens, `most` at most."""
        return min(bisect_left(self.length, tokens), most)

    def bits(self, first: int) -> int:
        """Bit s: whether some of the first documents have s tokens together."""
        for i in range(len(self._bits) - 1, first):
            self._bits.append(self._bits[i] | self._bits[i] << self.length[i])
        return self._bits[first]

    def subset(self, first: int, total: int) -> list[int]:
        """Of the first documents, some with `total` tokens together; short ones where there is a choice."""
        chosen = []
        for i in range(first, 0, -1):
            if not self._bits[i - 1] >> total & 1:
                chosen.append(self.documents[i - 1])
                total -= self.length[i - 1]
        return chosen


def find_swap(
    heavy: RowSums,
    light: RowSums,
    length: Ints,
    work: Floats,
    wanted: float,
    most: float,
    room: tuple[int, int],
) -> Swap | None:
    """A swap that takes about `wanted` work from the heavy row; None where there is none.

    Equal lengths are looked for first, then the smallest difference.

    Args:
        heavy: token sums of the documents of the row that gives a long one.
        light: likewise of the row that gives short ones.
        length: [documents of the step] tokens.
        work: [documents of the step] attention, in the unit of `StepDocuments.work`.
        wanted: work that the heavy row should lose.
        most: work that it must lose less than, or the light row would become as heavy as it was.
        room: tokens by which the heavy row and the light row may grow; below 0, by which they must shrink.
    """
    best: Swap | None = None
    for long in _long_candidates(heavy, work, wanted):
        found = _match(int(length[long]), heavy, light, room)
        if found is None:
            continue
        given, taken = [long, *found[0]], found[1]
        moved = float(work[given].sum() - work[taken].sum())
        if not 0 < moved < most:
            continue
        swap = Swap(given, taken, moved, int(length[given].sum() + length[taken].sum()))
        if best is None or abs(swap.work - wanted) < abs(best.work - wanted):
            best = swap
    return best


def _long_candidates(heavy: RowSums, work: Floats, wanted: float) -> list[int]:
    """Documents of different lengths whose work is nearest to what is wanted."""
    by_length = dict(zip(reversed(heavy.length), reversed(heavy.documents)))
    return sorted(by_length.values(), key=lambda one: (abs(float(work[one]) - wanted), one))[:LONG_CANDIDATES]


def _match(tokens: int, heavy: RowSums, light: RowSums, room: tuple[int, int]) -> tuple[list[int], list[int]] | None:
    """Companions of the long document and short documents, so that both sides have the same tokens, or nearly."""
    companions, short = heavy.shorter(tokens, COMPANIONS), light.shorter(tokens, SHORT_DOCUMENTS)
    reached = light.bits(short)
    both = heavy.bits(companions) & reached >> tokens
    if both:
        extra = (both & -both).bit_length() - 1
        return heavy.subset(companions, extra), light.subset(short, tokens + extra)
    # The heavy row may grow by room[0]: taken − given; the light row by room[1].
    low, high = max(tokens - room[1], 0), tokens + max(room[0], 0)
    window = (reached & ((1 << high + 1) - 1)) >> low
    if room[1] < 0 or not window:
        return None
    middle = tokens - low
    below = window & ((1 << middle + 1) - 1)
    above = window >> middle
    candidates = []
    if below:
        candidates.append(low + below.bit_length() - 1)
    if above:
        candidates.append(tokens + (above & -above).bit_length() - 1)
    total = min(candidates, key=lambda one: (abs(one - tokens), one))
    return [], light.subset(short, total)
