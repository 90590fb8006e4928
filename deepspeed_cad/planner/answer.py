"""The answer: what a planner core found, made into a `Plan`.

In: a question and a core (the reference or the native one). Out: a plan that is never worse than doing nothing, with
loads as finish times, bytes, and a note where a bound was not reached.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from deepspeed_cad.errors import CADError
from deepspeed_cad.layout import Ints
from deepspeed_cad.planner.checks import check_input
from deepspeed_cad.planner.constants import LEAST_WIDENED, LOOSER, ROUNDING, UNBOUNDED
from deepspeed_cad.planner.levels import finish_time
from deepspeed_cad.planner.plan import Floats, Plan, PlanInput


@dataclass(frozen=True, eq=False)
class Solution:
    """What a core finds: tasks, and per rank the work (not divided by speed) and the bytes."""

    tasks: Ints
    work: Floats
    work_before: Floats
    sent: Ints
    received: Ints
    received_between: Ints
    """Of the received bytes, those from other hosts."""


def answer(problem: PlanInput, solve: Callable[[PlanInput, float], Solution]) -> Plan:
    """Make a plan. Raises CADConfigError for impossible input, CADError where memory cannot hold any plan."""
    started = time.perf_counter()
    check_input(problem)
    base, speed = per_rank(problem.base_load, problem, 0.0), per_rank(problem.speed, problem, 1.0)
    found = solve(problem, problem.tolerance)
    notes: tuple[str, ...] = ()
    if problem.cost.byte_inside > 0 or problem.cost.byte_between > 0:
        found, notes = _hide_transfers(problem, found, solve, base, speed)
    check_memory(problem, found.received)
    divisor = np.where(speed > 0, speed, 1.0)
    return Plan(
        tasks=found.tasks,
        load=found.work / divisor + base,
        load_before=found.work_before / divisor + base,
        sent_bytes=found.sent,
        received_bytes=found.received,
        planning_ms=(time.perf_counter() - started) * 1e3,
        notes=notes or _out_of_tolerance(problem, found.work, base, speed),
    )


def per_rank(values: Floats | None, problem: PlanInput, default: float) -> Floats:
    """One float for each rank."""
    return np.full(problem.tick.ranks, default) if values is None else np.ascontiguousarray(values, np.float64)


def slowest_finish(problem: PlanInput, found: Solution, base: Floats, speed: Floats) -> float:
    """When the last rank is done: base load, attention, and what of its transfers attention does not hide."""
    attention = found.work / np.where(speed > 0, speed, 1.0)
    inside = found.received - found.received_between
    transfer = inside * problem.cost.byte_inside + found.received_between * problem.cost.byte_between
    return float((base + np.maximum(attention, transfer)).max())


def check_memory(problem: PlanInput, received: Ints) -> None:
    """Raise CADError where a rank would receive more than its memory."""
    if problem.memory is None:
        return
    memory = np.asarray(problem.memory, np.float64)
    over = received - memory
    if (over > 0).any():
        rank = int(over.argmax())
        raise CADError(
            f"rank {rank} would receive {int(received[rank])} bytes of Q, K, V and O and has memory for "
            f"{int(memory[rank])}; {int((over > 0).sum())} of {len(memory)} ranks do not fit. Raise memory, or pack "
            "shorter documents on these ranks"
        )


def _hide_transfers(
    problem: PlanInput,
    found: Solution,
    solve: Callable[[PlanInput, float], Solution],
    base: Floats,
    speed: Floats,
) -> tuple[Solution, tuple[str, ...]]:
    """The best of looser plans where the transfers of this one would be slower than its attention."""
    tight = slowest_finish(problem, found, base, speed)
    attention = float((base + found.work / np.where(speed > 0, speed, 1.0)).max())
    if tight <= attention * (1.0 + problem.tolerance):
        return found, ()
    best, least, chosen = found, tight, 1.0
    for times in LOOSER:
        other = solve(problem, min(max(problem.tolerance, LEAST_WIDENED) * times, UNBOUNDED))
        finish = slowest_finish(problem, other, base, speed)
        if finish < least:
            best, least, chosen = other, finish, times
    nothing = solve(problem, UNBOUNDED)
    if slowest_finish(problem, nothing, base, speed) <= least:
        return nothing, ("nothing is moved: on these links it would take longer than it saves",)
    if chosen == 1.0:
        return best, ()
    return best, (f"the tolerance was widened {chosen:g} times: on these links a tighter plan would take longer",)


def _out_of_tolerance(problem: PlanInput, work: Floats, base: Floats, speed: Floats) -> tuple[str, ...]:
    """Why a rank is out of the tolerance, if one is."""
    floors, speeds = base.tolist(), speed.tolist()
    finish = finish_time(float(work.sum()), floors, speeds) if problem.base_load is not None else 0.0
    if problem.base_load is None:
        finish = float(work.sum() / speed.sum())
    most = np.where(speed > 0, speed * np.maximum(finish * (1.0 + problem.tolerance) - base, 0.0), 0.0)
    least = np.where(speed > 0, speed * np.maximum(finish * (1.0 - problem.tolerance) - base, 0.0), 0.0)
    edge = ROUNDING * finish
    out = np.flatnonzero((work > most + edge) | (work < least - edge))
    if not len(out):
        return ()
    worst = int(out[np.argmax(np.maximum(work - most, least - work)[out])])
    reason = (
        "the granularity, or too few rows" if problem.memory is None else "memory, the granularity, or too few rows"
    )
    return (
        f"{len(out)} of {len(work)} ranks are out of the tolerance of {problem.tolerance:g}: {reason}; the farthest "
        f"is rank {worst} with {work[worst]:.6g} where {least[worst]:.6g} to {most[worst]:.6g} were wanted",
    )
