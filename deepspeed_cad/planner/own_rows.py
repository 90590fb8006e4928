"""Own rows: the rows of a task that need no other rank become tasks of their own.

In: a tick and tasks. Out: tasks that cover the same rows on the same servers. The rank with the begin of a document may
run rows behind its own of a head group, too; and with a sliding window, where a document goes on from the rank before,
only its first rows here read keys from there. As one task all of them would wait for rows or keys of others, and be
copied to where these land.
"""

from __future__ import annotations

import numpy as np

from deepspeed_cad.layout import Ints, Segments, Tick
from deepspeed_cad.planner.plan import Bools


def split_own_rows(tick: Tick, tasks: Ints, window: int | None, granularity: int) -> Ints:
    """Cut every task ([n, 6], see Plan.tasks) at both ends of the rows that its server finds at home with all that they
    read: before them where there is a window, else they begin their document."""
    tasks = _cut_behind(tick, tasks)
    if window is None or not len(tasks):
        return tasks
    document, _, end, _, _, server = tasks.T
    query, key = _begin_at(tick.query, document, end, server), _begin_at(tick.key, document, end, server)
    # The first of these rows that reads no key before those at home. The first rows of a document read no others.
    reads = np.where(key > 0, key + window - 1, 0)
    at = np.maximum(query, -(-reads // granularity) * granularity)
    return _cut(tasks, at, (query >= 0) & (key >= 0))


def _cut_behind(tick: Tick, tasks: Ints) -> Ints:
    """Cut tasks where the rows end that their server holds, with their keys, from the begin of the document on."""
    document, begin, end, _, _, server = tasks.T
    first = np.minimum(end, np.maximum(begin, _held_from_0(tick.query, document, server)))
    at = np.minimum(first, _held_from_0(tick.key, document, server))
    return _cut(tasks, at)


def _cut(tasks: Ints, at: Ints, chosen: Bools | bool = True) -> Ints:
    """Tasks cut at a row of each, where it lies inside; of those that are chosen."""
    cut = chosen & (tasks[:, 1] < at) & (at < tasks[:, 2])
    before, behind = tasks.copy(), tasks[cut]
    before[cut, 2], behind[:, 1] = at[cut], at[cut]
    both = np.concatenate([before, behind])
    return both[np.lexsort(both.T[::-1])] if cut.any() else tasks


def _held_from_0(where: Segments, document: Ints, rank: Ints) -> Ints:
    """Where the segment ends in which `rank` holds the first row of a document; 0 where it does not."""
    first = where.begin == 0
    order = np.argsort(where.document[first], kind="stable")
    of, holder, end = (column[first][order] for column in (where.document, where.rank, where.end))
    if not len(of):
        return np.zeros(len(document), np.int64)
    at = np.minimum(np.searchsorted(of, document), len(of) - 1)
    return np.where((of[at] == document) & (holder[at] == rank), end[at], 0)


def _begin_at(where: Segments, document: Ints, end: Ints, rank: Ints) -> Ints:
    """Where the segment begins in which `rank` holds the last row before `end` and all behind its begin, or −1."""
    if not len(where):
        return np.full(len(document), -1)
    order = np.lexsort((where.begin, where.document))
    of, begin = where.document[order], where.begin[order]
    at = np.searchsorted(_key(of, begin), _key(document, end - 1), side="right") - 1
    found = order[np.maximum(at, 0)]
    held = (at >= 0) & (where.document[found] == document) & (end <= where.end[found]) & (where.rank[found] == rank)
    return np.where(held, where.begin[found], -1)


def _key(document: Ints, position: Ints) -> Ints:
    """A number that sorts like (document, position); positions are below 2^31 (checks.py)."""
    return document * (np.int64(1) << 32) + position
