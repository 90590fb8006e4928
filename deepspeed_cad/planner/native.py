"""The native planner core, csrc/planner*.cpp, through ctypes.

In: a `PlanInput` and an `Aim`. Out: a `Solution`, equal to the reference's to the row.
"""

from __future__ import annotations

import ctypes

import numpy as np

from deepspeed_cad.errors import CADError
from deepspeed_cad.layout import Ints, Segments
from deepspeed_cad.native import load
from deepspeed_cad.planner.aim import Aim, Solution, per_rank
from deepspeed_cad.planner.columns import host_of_rank, link_weights
from deepspeed_cad.planner.flows import Flows
from deepspeed_cad.planner.plan import PlanInput

_POINTER = ctypes.c_void_p


def is_available() -> bool:
    """Whether the compiled library is there and holds the planner."""
    library = load()
    return library is not None and hasattr(library, "cad_planner_solve")


def solve(problem: PlanInput, aim: Aim) -> Solution:
    """Make a plan with the compiled library. Raises CADError where it is missing or fails."""
    library = load()
    if library is None:
        raise CADError("the native planner was asked for, but the compiled library is not there")
    tick, shape, cost = problem.tick, problem.shape, problem.cost
    ranks = tick.ranks
    sizes = np.array(
        [ranks, shape.groups, problem.window or 0, problem.granularity, shape.query_bytes, shape.output_bytes,
         shape.key_value_bytes, len(tick.query), len(tick.key), aim.units, aim.kept], np.int64
    )  # fmt: skip
    numbers = np.array(
        [cost.pair, cost.row, cost.key, cost.task, *link_weights(problem), aim.tolerance, aim.level], np.float64
    )
    ranked = np.concatenate(
        [
            per_rank(problem.base_load, problem, 0.0),
            per_rank(problem.speed, problem, 1.0),
            per_rank(problem.memory, problem, np.inf),
        ]
    )
    host = np.array(host_of_rank(problem), np.int64)
    query, key = _columns(tick.query), _columns(tick.key)
    plan, counts = ctypes.c_void_p(), np.empty(2, np.int64)
    code = library.cad_planner_solve(
        _at(sizes), _at(numbers), _at(ranked), _at(host), _at(query), _at(key), ctypes.byref(plan), _at(counts)
    )
    if code:
        library.cad_last_error.restype = ctypes.c_char_p
        raise CADError(f"the native planner failed: {library.cad_last_error().decode()}")
    tasks, pairs = np.empty((counts[0], 6), np.int64), np.empty((counts[1], 3), np.int64)
    loads, moved, served = np.empty((4, ranks)), np.empty((4, 2, ranks), np.int64), np.empty((2, ranks), np.int64)
    library.cad_planner_take.restype = None
    library.cad_planner_take(plan, _at(tasks), _at(loads), _at(moved), _at(pairs), _at(served))
    return Solution(tasks, loads[0], loads[1], Flows(moved, loads[2], pairs, loads[3], served))


def _columns(segments: Segments) -> Ints:
    return np.stack([segments.document, segments.begin, segments.end, segments.rank])


def _at(array: np.ndarray) -> ctypes.c_void_p:
    return _POINTER(array.ctypes.data)
