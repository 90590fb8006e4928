"""Seconds of core attention, forward and backward apart: of each rank's own documents, of documents cut for context
parallelism, and of the tasks of a plan.

The cost model has forward and backward together. They are told apart by what was measured: keys cost in backward only,
where every task writes dK and dV of its whole prefix, and of the rest forward is a fixed share.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deepspeed_cad.cost import CostModel, count_pairs
from deepspeed_cad.layout import Ints, Layout
from deepspeed_cad.planner.constants import FORWARD_SHARE

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Both:
    """Seconds of forward and of backward; arrays of equal shape."""

    forward: Floats
    backward: Floats

    def __add__(self, other: Both) -> Both:
        return Both(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, factor: float) -> Both:
        return Both(self.forward * factor, self.backward * factor)

    @property
    def total(self) -> Floats:
        return self.forward + self.backward

    def summed(self, by: Ints, count: int) -> Both:
        """[count]: sums of the elements that have the same number."""
        forward, backward = (np.bincount(by, way, minlength=count) for way in (self.forward, self.backward))
        return Both(forward.astype(np.float64), backward.astype(np.float64))

    def repeated(self, again: bool) -> Both:
        """With a second forward in the backward, where checkpointing repeats it."""
        return Both(self.forward, self.backward + self.forward) if again else self


def seconds(cost: CostModel, begin: npt.ArrayLike, end: npt.ArrayLike) -> Both:
    """Of query rows [begin, end) of documents, one head group, elementwise."""
    whole = cost.of(begin, end)
    rows = np.asarray(end, np.int64) - np.asarray(begin, np.int64)
    forward = FORWARD_SHARE * np.where(rows > 0, cost.pair * count_pairs(begin, end) + cost.row * rows, 0.0)
    return Both(forward, whole - forward)


def of_documents(layout: Layout, cost: CostModel, cut: bool = False) -> Both:
    """[ranks]: each rank's own rows, one head group. `cut`: what lies on the rank before is not attended to."""
    own = layout.segments
    begin = np.zeros_like(own.begin) if cut else own.begin
    each = seconds(cost, begin, own.end - own.begin + begin)
    return each.summed(own.rank, layout.ranks)


def of_pieces(lengths: Ints, cost: CostModel, parts: int) -> Both:
    """[documents]: all of a document, cut into 2 × `parts` equal pieces that each read all keys before their end."""
    rows = lengths.astype(np.float64)
    pieces = np.minimum(rows, 1.0 if parts == 1 else 2.0 * parts)
    once = cost.pair * rows * (rows + 1.0) / 2.0 + cost.row * rows
    # The pieces end at 1, 2, 3 … times their length.
    keys = rows * (pieces + 1.0) / 2.0
    forward = FORWARD_SHARE * once
    return Both(forward, once - forward + cost.key * keys + cost.task * pieces)


def of_tasks(tasks: Ints, cost: CostModel, ranks: int) -> Both:
    """[ranks]: the tasks of a plan by the rank that runs them."""
    each = seconds(cost, tasks[:, 1], tasks[:, 2])
    groups = (tasks[:, 4] - tasks[:, 3]).astype(np.float64)
    return Both(each.forward * groups, each.backward * groups).summed(tasks[:, 5], ranks)


def document_lengths(layout: Layout) -> Ints:
    """Rows of every document, over all ranks that it lies on."""
    own = layout.segments
    return np.bincount(own.document, own.end - own.begin, minlength=layout.documents).astype(np.int64)
