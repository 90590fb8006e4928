"""The answer: what the core found, made into a `Plan`.

In: a question. Out: a plan that is never worse than doing nothing, with loads as finish times, bytes, and a note where
a bound was not reached.
"""

from __future__ import annotations

import time

import numpy as np

from deepspeed_cad.planner.checks import check_input
from deepspeed_cad.planner.constants import ROUNDING
from deepspeed_cad.planner.core import Aim, solve
from deepspeed_cad.planner.finish import common_finish, finish_best
from deepspeed_cad.planner.own_rows import split_own_rows
from deepspeed_cad.planner.plan import Floats, Plan, PlanInput
from deepspeed_cad.planner.search import hide_transfers
from deepspeed_cad.planner.starts import best_start


def make_plan(problem: PlanInput) -> Plan:
    """Make a plan.

    Raises CADConfigError for impossible input, CADError where the compiled library is missing.
    """
    started = time.perf_counter()
    check_input(problem)
    found = best_start(problem, solve(problem, Aim(problem.tolerance)))
    notes: tuple[str, ...] = ()
    if problem.cost.byte_inside > 0 or problem.cost.byte_between > 0:
        found, notes = hide_transfers(problem, found)
    finish, waves = finish_best(problem, found.work, found.flows)
    return Plan(
        tasks=split_own_rows(problem.tick, found.tasks, problem.window, problem.granularity),
        load=problem.ends(found.work),
        load_before=problem.ends(found.work_before),
        sent_bytes=found.flows.sent,
        received_bytes=found.flows.received,
        finish=finish,
        between_bytes=found.flows.between,
        waves=waves,
        planning_ms=(time.perf_counter() - started) * 1e3,
        notes=notes or _out_of_tolerance(problem, found.work),
        flows=found.flows,
    )


def _out_of_tolerance(problem: PlanInput, work: Floats) -> tuple[str, ...]:
    """Why a rank is out of the tolerance, if one is."""
    base, speed = problem.floors, problem.speeds
    finish = float(work.sum() / speed.sum())
    if problem.base_load is not None:
        finish = float(common_finish(work.sum(keepdims=True), base, speed)[0])
    most = np.where(speed > 0, speed * np.maximum(finish * (1.0 + problem.tolerance) - base, 0.0), 0.0)
    least = np.where(speed > 0, speed * np.maximum(finish * (1.0 - problem.tolerance) - base, 0.0), 0.0)
    edge = ROUNDING * finish
    out = np.flatnonzero((work > most + edge) | (work < least - edge))
    if not len(out):
        return ()
    worst = int(out[np.argmax(np.maximum(work - most, least - work)[out])])
    return (
        f"{len(out)} of {len(work)} ranks are out of the tolerance of {problem.tolerance:g}: the granularity, or too "
        f"few rows; the farthest is rank {worst} with {work[worst]:.6g} where {least[worst]:.6g} to {most[worst]:.6g} "
        "were wanted",
    )
