"""Seconds of core attention: of each rank's own documents, of documents cut for context parallelism, and of the tasks
of a plan. As all arrays of seconds in this room, they have forward and backward on their first axis of two.

The cost model has both together. They are told apart by what was measured: keys cost in backward only, where every task
writes dK and dV of its whole prefix, and of the rest forward is a fixed share.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from deepspeed_cad.cost import CostModel, count_pairs
from deepspeed_cad.layout import Ints, Layout
from deepspeed_cad.planner.constants import FORWARD_SHARE

Floats = npt.NDArray[np.float64]


def seconds(cost: CostModel, begin: npt.ArrayLike, end: npt.ArrayLike) -> Floats:
    """[2, …]: of query rows [begin, end) of documents, one head group, elementwise."""
    rows = np.asarray(end, np.int64) - np.asarray(begin, np.int64)
    forward = FORWARD_SHARE * np.where(rows > 0, cost.pair * count_pairs(begin, end) + cost.row * rows, 0.0)
    return np.stack([forward, cost.of(begin, end) - forward])


def summed(each: Floats, by: Ints, count: int) -> Floats:
    """[2, count]: sums of the elements that have the same number."""
    return np.stack([np.bincount(by, way, minlength=count) for way in each])


def of_documents(layout: Layout, cost: CostModel, cut: bool = False) -> Floats:
    """[2, ranks]: each rank's own rows, one head group. `cut`: what lies on the rank before is not attended to."""
    own = layout.segments
    begin = np.zeros_like(own.begin) if cut else own.begin
    return summed(seconds(cost, begin, own.end - own.begin + begin), own.rank, layout.ranks)


def of_pieces(lengths: Ints, cost: CostModel, parts: int) -> Floats:
    """[2, documents]: all of a document, cut into 2 × `parts` equal pieces that each read all keys before their end."""
    rows = lengths.astype(np.float64)
    pieces = np.minimum(rows, 1.0 if parts == 1 else 2.0 * parts)
    once = cost.pair * rows * (rows + 1.0) / 2.0 + cost.row * rows
    # The pieces end at 1, 2, 3 … times their length.
    keys = rows * (pieces + 1.0) / 2.0
    forward = FORWARD_SHARE * once
    return np.stack([forward, once - forward + cost.key * keys + cost.task * pieces])


def of_tasks(tasks: Ints, cost: CostModel, ranks: int) -> Floats:
    """[2, ranks]: the tasks of a plan by the rank that runs them."""
    each = seconds(cost, tasks[:, 1], tasks[:, 2]) * (tasks[:, 4] - tasks[:, 3])
    return summed(each, tasks[:, 5], ranks)


def document_lengths(layout: Layout) -> Ints:
    """Rows of every document, over all ranks that it lies on."""
    own = layout.segments
    return np.bincount(own.document, own.end - own.begin, minlength=layout.documents).astype(np.int64)
