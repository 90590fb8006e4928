"""Waves: the tasks that ranks serve in one tick, cut into parts that travel, run and go back one behind the other.

In: a tick, the tasks of its plan, a number of waves. Out: that many schedules of one rank, each an exchange of its own;
part i + 1 is on its way while part i runs and part i − 1 goes back. Pure, and the same cut on every rank.

A head group of a document is never cut: all that any rank computes with its keys lies in one wave. So keys travel no
more often than without waves, and what comes back for one key, from however many servers, is added at once. Tasks that
need no other rank are in no wave; the first schedule has them.
"""

from __future__ import annotations

import numpy as np

from deepspeed_cad.cost import count_pairs, window_start
from deepspeed_cad.layout import Ints, Tick
from deepspeed_cad.schedule import native
from deepspeed_cad.schedule.reference import Schedule, build_slices, home_rows, schedule_rank


def schedule_waves(
    tick: Tick, tasks: Ints, rank: int, groups: int, window: int | None, waves: int
) -> tuple[Schedule, ...]:
    """The schedules of one rank ([n, 6] tasks, see Plan.tasks), natively where the library is there."""
    build = native.build_slices if native.is_available() else build_slices
    return tuple(
        schedule_rank(tick, build(tick, part, window), rank, groups, window)
        for part in split_tasks(tick, tasks, window, waves)
    )


def split_tasks(tick: Tick, tasks: Ints, window: int | None, waves: int) -> list[Ints]:
    """The tasks of every wave; what runs at home without others is in the first."""
    if waves == 1:
        return [tasks]
    alone = _run_alone(tick, tasks, window)
    moved = tasks[~alone]
    # One row for each head group of a task.
    count = moved[:, 4] - moved[:, 3]
    each = np.repeat(moved, count, axis=0)
    each[:, 3] += np.arange(len(each)) - np.repeat(np.cumsum(count) - count, count)
    each[:, 4] = each[:, 3] + 1
    wave = _waves_of(each, window, waves)
    return [
        np.concatenate([tasks[alone], _join(each[wave == 0])]),
        *(_join(each[wave == number]) for number in range(1, waves)),
    ]


def _run_alone(tick: Tick, tasks: Ints, window: int | None) -> np.ndarray:
    """Which tasks find their rows and keys at their server ([tasks])."""
    document, begin, end, _, _, server = tasks.T
    start = window_start(begin, window)
    return (home_rows(tick.query, document, begin, end, server) >= 0) & (
        home_rows(tick.key, document, start, end, server) >= 0
    )


def _waves_of(each: Ints, window: int | None, waves: int) -> Ints:
    """The wave of each row: a server's head groups in order, cut into shares of about equal work.

    Where several servers work on one head group of a document, that with the most work on it decides for all.
    """
    if not len(each):
        return np.zeros(0, np.int64)
    pairs = count_pairs(each[:, 1], each[:, 2], window)
    at_server, which = np.unique(each[:, [0, 3, 5]], axis=0, return_inverse=True)
    which = which.reshape(-1)
    work = np.zeros(len(at_server), np.int64)
    np.add.at(work, which, pairs)
    units, of_unit = np.unique(at_server[:, :2], axis=0, return_inverse=True)
    of_unit = of_unit.reshape(-1)
    # Most work first within a unit; of equals the lower rank.
    order = np.lexsort((at_server[:, 2], -work, of_unit))
    chief = order[np.searchsorted(of_unit[order], np.arange(len(units)))]
    server, own = at_server[chief, 2], work[chief]
    by_server = np.argsort(server, kind="stable")
    ends, (servers, first) = np.cumsum(own[by_server]), np.unique(server[by_server], return_index=True)
    place = np.searchsorted(servers, server[by_server])
    before = (ends - own[by_server])[first]
    whole = np.append(before[1:], ends[-1]) - before
    # The wave in which the middle of its work lies.
    middle = 2 * (ends - before[place]) - own[by_server]
    wave = np.empty(len(units), np.int64)
    wave[by_server] = middle * waves // (2 * whole[place])
    return wave[of_unit[which]]


def _join(each: Ints) -> Ints:
    """Tasks again: rows that differ only in head groups that follow each other become one."""
    each = each[np.lexsort((each[:, 3], each[:, 5], each[:, 2], each[:, 1], each[:, 0]))]
    if not len(each):
        return each
    same = (each[1:, [0, 1, 2, 5]] == each[:-1, [0, 1, 2, 5]]).all(axis=1) & (each[1:, 3] == each[:-1, 4])
    heads = np.flatnonzero(np.concatenate([[True], ~same]))
    joined = each[heads]
    joined[:, 4] = each[np.append(heads[1:], len(each)) - 1, 4]
    return joined[np.lexsort(joined.T[::-1])]
