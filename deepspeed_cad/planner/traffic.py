"""Traffic: the bytes that a set of tasks moves between ranks in one layer's forward.

In: tasks, tick, head shape. Out: bytes sent and received by each rank.

What counts, per head group: Q of every row of a task that is not at home on its server goes from the home to the
server, and O of the same rows goes back. Of K and V a server receives each row that any of its tasks of one
(document, head group) reads and that it does not hold itself, once, from the row's home.
"""

from __future__ import annotations

import numpy as np

from deepspeed_cad.cost import window_start
from deepspeed_cad.layout import Ints, Segments, Tick
from deepspeed_cad.planner.plan import HeadShape

Interval = tuple[int, int]


def count_bytes(tasks: Ints, tick: Tick, shape: HeadShape, window: int | None = None) -> tuple[Ints, Ints]:
    """Bytes that leave each rank and bytes that reach it ([ranks] each), one layer's forward."""
    matrix = traffic_matrix(tasks, tick, shape, window)
    sent, received = np.zeros(tick.ranks, np.int64), np.zeros(tick.ranks, np.int64)
    for (source, target), amount in matrix.items():
        sent[source] += amount
        received[target] += amount
    return sent, received


def traffic_matrix(tasks: Ints, tick: Tick, shape: HeadShape, window: int | None = None) -> dict[Interval, int]:
    """Bytes per (from, to) pair of different ranks; pairs without traffic are absent."""
    matrix: dict[Interval, int] = {}
    queries, keys = _homes(tick.query), _homes(tick.key)

    def move(source: int, target: int, amount: int) -> None:
        if amount and source != target:
            matrix[source, target] = matrix.get((source, target), 0) + amount

    for document, begin, end, group, group_end, server in tasks.tolist():
        for low, high, home in queries.get(document, ()):
            rows = min(end, high) - max(begin, low)
            if rows > 0 and home != server:
                move(home, server, rows * (group_end - group) * shape.query_bytes)
                move(server, home, rows * (group_end - group) * shape.output_bytes)
    for document, server, groups, needed in keys_needed(tasks, window):
        for low, high, home in keys.get(document, ()):
            rows = sum(max(min(end, high) - max(begin, low), 0) for begin, end in needed)
            move(home, server, rows * groups * shape.key_value_bytes)
    return matrix


def keys_needed(tasks: Ints, window: int | None) -> list[tuple[int, int, int, list[Interval]]]:
    """For each (document, server): runs of head groups that need the same KV rows, as (…, groups, intervals)."""
    by_pair: dict[Interval, list[list[int]]] = {}
    starts = window_start(tasks[:, 1], window) if len(tasks) else np.zeros(0, np.int64)
    for row, start in zip(tasks.tolist(), starts.tolist(), strict=True):
        by_pair.setdefault((row[0], row[5]), []).append([row[3], row[4], start, row[2]])
    needed = []
    for (document, server), own in by_pair.items():
        edges = sorted({edge for task in own for edge in task[:2]})
        for low, high in zip(edges[:-1], edges[1:], strict=True):
            spans = sorted((task[2], task[3]) for task in own if task[0] <= low and high <= task[1])
            joined: list[Interval] = []
            for begin, end in spans:
                if joined and begin <= joined[-1][1]:
                    joined[-1] = (joined[-1][0], max(joined[-1][1], end))
                else:
                    joined.append((begin, end))
            if joined:
                needed.append((document, server, high - low, joined))
    return needed


def _homes(segments: Segments) -> dict[int, list[tuple[int, int, int]]]:
    homes: dict[int, list[tuple[int, int, int]]] = {}
    columns = (segments.document, segments.begin, segments.end, segments.rank)
    for document, begin, end, rank in zip(*(column.tolist() for column in columns), strict=True):
        homes.setdefault(document, []).append((begin, end, rank))
    return homes
