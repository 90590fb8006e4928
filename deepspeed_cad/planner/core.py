"""The core of the planner, csrc/planner*.cpp: what it is asked to reach (`Aim`), what it finds (`Solution`), and its
tasks cut where their rows need no other rank (`split_own_rows`). What the core does is told in `deepspeed_cad.planner`.
"""

import ctypes
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from deepspeed_cad.layout import Ints, Tick
from deepspeed_cad.native import call
from deepspeed_cad.planner.constants import BAND, HOST_BORDER, IN_PLACE, READ_FROM
from deepspeed_cad.planner.plan import Bools, Floats, Flows, PlanInput


class Units(IntEnum):
    """Between whom an `Aim` moves only what brings them down to a level."""

    NONE = 0
    """All ranks are one pool and are brought within the tolerance."""
    RANKS = 1
    """Ranks above the level give what is above, and nothing else moves."""
    HOSTS = 2
    """Hosts above the level give what is above, then each host's ranks are brought within the tolerance."""
    HOSTS_LAST = 3
    """Each host's ranks are brought within the tolerance before, and again after."""


@dataclass(frozen=True)
class Aim:
    tolerance: float
    """How far ranks of one pool may end from their mean, as a share of it."""
    units: Units = Units.NONE
    level: float = 0.0
    """Finish time down to which units give; those that take end below it. Not with `Units.NONE`."""
    kept: int = -1
    """Segments, the first of every document on many ranks, that begin at home while all its other rows begin dealt out
    by head groups; -1: all rows begin at home."""


@dataclass(frozen=True, eq=False)
class Solution:
    """What the core finds: tasks, per rank the work (not divided by speed), and what moves."""

    tasks: Ints
    work: Floats
    work_before: Floats
    flows: Flows


def solve(problem: PlanInput, aim: Aim) -> Solution:
    """Make a plan for a question that has passed `check_input`. Raises CADError where no memory is left."""
    tick, shape, cost = problem.tick, problem.shape, problem.cost
    ranks = tick.ranks
    sizes = np.array(
        [ranks, shape.groups, problem.window or 0, problem.granularity, shape.query_bytes, shape.output_bytes,
         shape.key_value_bytes, len(tick.query), len(tick.key), aim.units, aim.kept, READ_FROM, IN_PLACE], np.int64
    )  # fmt: skip
    numbers = np.array(
        [cost.pair, cost.row, cost.key, cost.task, *link_weights(problem), aim.tolerance, aim.level, BAND], np.float64
    )
    ranked = np.concatenate([problem.floors, problem.speeds])
    hosts = np.zeros(ranks, np.int64) if problem.hosts is None else np.asarray(problem.hosts)
    # Numbered in the order in which they appear.
    _, first, which = np.unique(hosts, return_index=True, return_inverse=True)
    host = np.argsort(np.argsort(first))[which]
    query, key = (np.ascontiguousarray(one.to_array()[:, :4].T) for one in (tick.query, tick.key))
    plan, counts = ctypes.c_void_p(), np.empty(2, np.int64)
    call("cad_planner_solve", sizes, numbers, ranked, host, query, key, ctypes.byref(plan), counts)
    tasks, pairs = np.empty((counts[0], 6), np.int64), np.empty((counts[1], 3), np.int64)
    loads, moved, served = np.empty((4, ranks)), np.empty((4, 2, ranks), np.int64), np.empty((2, ranks), np.int64)
    call("cad_planner_take", plan, tasks, loads, moved, pairs, served)
    return Solution(tasks, loads[0], loads[1], Flows(moved, loads[2], pairs, loads[3], served))


def link_weights(problem: PlanInput) -> tuple[float, float]:
    """Weight of a byte inside a host and between hosts; the first is 1."""
    if problem.hosts is None or len(set(np.asarray(problem.hosts).tolist())) < 2:
        return 1.0, 1.0
    inside, between = problem.cost.byte_inside, problem.cost.byte_between
    if inside > 0.0 and between > inside:
        return 1.0, between / inside
    return 1.0, 1.0 if between > 0.0 else HOST_BORDER


def split_own_rows(tick: Tick, tasks: Ints, window: int | None, granularity: int) -> Ints:
    """Cut every task ([n, 6], see Plan.tasks) at both ends of the rows that its server finds at home with all that they
    read: before them where there is a window, else they begin their document. As one task all of them would wait for
    rows or keys of others, and be copied to where these land."""
    document, server = tasks[:, 0], tasks[:, 5]
    query, key = (where.find(document, np.zeros_like(document), server)[1] for where in (tick.query, tick.key))
    tasks = _cut(tasks, np.minimum(query, key))
    if window is None or not len(tasks):
        return tasks
    document, server = tasks[:, 0], tasks[:, 5]
    query, key = (where.find(document, tasks[:, 2] - 1, server)[0] for where in (tick.query, tick.key))
    # The first of these rows that reads no key before those at home. The first rows of a document read no others.
    reads = np.where(key > 0, key + window - 1, 0)
    return _cut(tasks, np.maximum(query, -(-reads // granularity) * granularity), (query >= 0) & (key >= 0))


def _cut(tasks: Ints, at: Ints, chosen: Bools | bool = True) -> Ints:
    """Tasks cut at a row of each, where it lies inside; of those that are chosen."""
    cut = chosen & (tasks[:, 1] < at) & (at < tasks[:, 2])
    before, behind = tasks.copy(), tasks[cut]
    before[cut, 2], behind[:, 1] = at[cut], at[cut]
    both = np.concatenate([before, behind])
    return both[np.lexsort(both.T[::-1])] if cut.any() else tasks
