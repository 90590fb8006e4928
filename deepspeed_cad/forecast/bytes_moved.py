"""What the tasks of a plan move, by direction and by kind of link, in array operations: thousands of ranks in a second.

In: tasks, where rows live, on which host each rank is. Out: bytes per rank of one layer: Q, K and V on their way to
servers, O on its way home. Backward is the mirror: dO goes out with Q, K and V, and dQ, dK and dV come home.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deepspeed_cad.forecast.attention_seconds import Floats
from deepspeed_cad.layout import Ints, Segments
from deepspeed_cad.planner.constants import IN_PLACE
from deepspeed_cad.planner.plan import HeadShape

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Traffic:
    """Bytes of one layer's forward, each [2, ranks]: inside a host and between hosts."""

    asked: Floats
    """Q, K and V that reach a rank as a server."""
    sent: Floats
    """Q, K and V that leave a rank as a home."""
    answered: Floats
    """O that leaves a rank as a server."""
    returned: Floats
    """O that reaches a rank as a home."""
    pairs: Ints
    """[4, n]: home, server, 1 where they are on different hosts, 1 where Q and O travel beside K and V."""
    remote: Bools
    """[tasks]: whether a task reads anything that its server does not hold."""
    parts: Ints
    """[ranks]: head groups of documents of which a rank runs such tasks; waves do not cut them."""
    served: Floats
    """[3, ranks]: bytes of Q, of K and V, and of O of these tasks. K and V of the server's own are among them, which a
    local copy puts beside what arrives; its own Q and O only of tasks that do not stay in place."""

    @property
    def forward(self) -> Floats:
        """[2, ranks]: the busier direction of each rank's links."""
        return np.maximum(self.asked + self.returned, self.sent + self.answered)

    @property
    def backward(self) -> Floats:
        """[2, ranks]: Q, K, V and dO to servers, dQ, dK and dV home."""
        there, back = self.asked + self.answered, self.sent + self.returned
        return np.maximum(there + self.sent, back + self.asked)

    @property
    def moved(self) -> tuple[float, float]:
        """Bytes of all ranks inside and between hosts, forward and backward."""
        inside, between = (3.0 * self.asked + 2.0 * self.answered).sum(1)
        return float(inside), float(between)

    @property
    def comes_home(self) -> float:
        """Bytes of dQ, dK and dV, or of O, that land at the home to which most return."""
        return float(np.maximum(self.sent, self.returned).sum(0).max(initial=0.0))


def count_traffic(
    tasks: Ints, rows: Segments, shape: HeadShape, ranks: int, hosts: Ints | None, copied: bool = False
) -> Traffic:
    """See the module. A server gets each row of K and V once that its tasks of a document and groups read.

    `copied`: no rows stay in place (see Setting.copies_own_rows).
    """
    where = np.zeros(ranks, np.int64) if hosts is None else hosts
    homes = _Homes(rows)
    asked, sent, answered, returned = (np.zeros((2, ranks)) for _ in range(4))

    def add(into: Floats, rank: Ints, amount: Floats, other: Ints) -> None:
        between = (where[rank] != where[other]).astype(np.int64)
        into += np.bincount(between * ranks + rank, amount, minlength=2 * ranks).reshape(2, ranks)

    task, home, count = homes.overlaps(tasks[:, 0], tasks[:, 1], tasks[:, 2])
    server, groups = tasks[task, 5], tasks[task, 4] - tasks[task, 3]
    away = (home != server) & (count > 0)
    with_rows = home[away] * ranks + server[away]
    server, home, moved = server[away], home[away], (count * groups)[away].astype(np.float64)
    add(asked, server, moved * shape.query_bytes, home)
    add(sent, home, moved * shape.query_bytes, server)
    add(answered, server, moved * shape.output_bytes, home)
    add(returned, home, moved * shape.output_bytes, server)

    # The longest prefix that a server reads of a document and range of groups covers all others.
    keys = _longest_prefixes(tasks)
    read, home, count = homes.overlaps(keys[:, 0], np.zeros_like(keys[:, 2]), keys[:, 2])
    server, groups = keys[read, 5], keys[read, 4] - keys[read, 3]
    away = (home != server) & (count > 0)
    every = np.union1d(with_rows, home[away] * ranks + server[away])
    server, home, moved = server[away], home[away], (count * groups)[away] * float(shape.key_value_bytes)
    add(asked, server, moved, home)
    add(sent, home, moved, server)

    home, server = every // ranks, every % ranks
    pairs = np.stack([home, server, where[home] != where[server], np.isin(every, with_rows)]).astype(np.int64)
    task, home, count = homes.overlaps(tasks[:, 0], np.zeros_like(tasks[:, 2]), tasks[:, 2])
    remote = np.zeros(len(tasks), bool)
    remote[task[(home != tasks[task, 5]) & (count > 0)]] = True
    parts = _head_groups(tasks[remote], shape.groups, ranks)
    stay = homes.stay(tasks[remote], ranks) & (not copied)
    served = _served(tasks[remote], stay, shape, ranks)
    return Traffic(asked, sent, answered, returned, pairs, remote, parts, served)


def _served(tasks: Ints, stay: Bools, shape: HeadShape, ranks: int) -> Floats:
    """See Traffic.served; `stay`: which tasks run in place."""
    groups = tasks[:, 4] - tasks[:, 3]
    rows = np.bincount(tasks[:, 5], (tasks[:, 2] - tasks[:, 1]) * groups * ~stay, minlength=ranks)
    keys = _longest_prefixes(tasks)
    read = np.bincount(keys[:, 5], keys[:, 2] * (keys[:, 4] - keys[:, 3]), minlength=ranks)
    return np.stack([rows * shape.query_bytes, read * shape.key_value_bytes, rows * shape.output_bytes])


def _longest_prefixes(tasks: Ints) -> Ints:
    """Of the tasks of one server with the same document and head groups, the one that reads the most keys."""
    order = np.lexsort((tasks[:, 2], tasks[:, 4], tasks[:, 3], tasks[:, 5], tasks[:, 0]))
    keys = tasks[order]
    last = np.ones(len(keys), bool)
    last[:-1] = ~(keys[1:, [0, 3, 4, 5]] == keys[:-1, [0, 3, 4, 5]]).all(1)
    return keys[last]


def _head_groups(tasks: Ints, groups: int, ranks: int) -> Ints:
    """[ranks]: head groups of documents, each counted once for a server."""
    width = tasks[:, 4] - tasks[:, 3]
    start = np.repeat(tasks[:, 3] - (np.cumsum(width) - width), width)
    pieces = int(tasks[:, 0].max(initial=0) + 1) * groups
    each = np.repeat(tasks[:, 5] * pieces + tasks[:, 0] * groups, width) + np.arange(width.sum()) + start
    return np.bincount(np.unique(each) // pieces, minlength=ranks)


class _Homes:
    """Which rank holds which rows of which document."""

    def __init__(self, rows: Segments) -> None:
        order = np.lexsort((rows.begin, rows.document))
        self.begin, self.end, self.rank = rows.begin[order], rows.end[order], rows.rank[order]
        self.span = int(rows.end.max(initial=0)) + 1
        self.first = rows.document[order] * self.span + self.begin

    def stay(self, tasks: Ints, ranks: int) -> Bools:
        """Which tasks have all rows in one piece at their server, as a large share of its rows (IN_PLACE)."""
        held = np.bincount(self.rank, self.end - self.begin, minlength=ranks)
        task, home, count = self.overlaps(tasks[:, 0], tasks[:, 1], tasks[:, 2])
        own = np.zeros(len(tasks), np.int64)
        np.maximum.at(own, task, count * (home == tasks[task, 5]))
        rows = tasks[:, 2] - tasks[:, 1]
        return (own == rows) & (rows * IN_PLACE >= held[tasks[:, 5]])

    def overlaps(self, document: Ints, begin: Ints, end: Ints) -> tuple[Ints, Ints, Ints]:
        """For rows [begin, end) of documents: number of the question, a rank that holds some of them, how many."""
        low = np.searchsorted(self.first, document * self.span + begin, "right") - 1
        high = np.searchsorted(self.first, document * self.span + end, "left")
        counts = high - low
        asked = np.repeat(np.arange(len(document)), counts)
        place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + low[asked]
        rows = np.minimum(end[asked], self.end[place]) - np.maximum(begin[asked], self.begin[place])
        return asked, self.rank[place], np.maximum(rows, 0)
