"""The core of the planner, csrc/planner*.cpp: what it is asked to reach (`Aim`) and what it finds (`Solution`).

In: a `PlanInput` and an `Aim`. Out: a `Solution`. What the core does is told in `deepspeed_cad.planner`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from deepspeed_cad.layout import Ints, Segments
from deepspeed_cad.native import call
from deepspeed_cad.planner.constants import BAND, HOST_BORDER, IN_PLACE, READ_FROM
from deepspeed_cad.planner.plan import Floats, Flows, PlanInput


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
    """What the core finds: tasks, and per rank the work (not divided by speed) and what moves."""

    tasks: Ints
    work: Floats
    work_before: Floats
    flows: Flows


def solve(problem: PlanInput, aim: Aim) -> Solution:
    """Make a plan. The question must have passed `checks.check_input`.

    Raises CADError where the library is missing, or no memory is left.
    """
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
    host = _hosts_as_they_appear(problem)
    query, key = _columns(tick.query), _columns(tick.key)
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


def _hosts_as_they_appear(problem: PlanInput) -> Ints:
    """[ranks]: number of each rank's host, in the order in which hosts first appear."""
    if problem.hosts is None:
        return np.zeros(problem.tick.ranks, np.int64)
    numbers: dict[int, int] = {}
    return np.array([numbers.setdefault(host, len(numbers)) for host in np.asarray(problem.hosts).tolist()], np.int64)


def _columns(segments: Segments) -> Ints:
    return np.stack([segments.document, segments.begin, segments.end, segments.rank])
