"""The search for how much to move where links are slow: the plan whose slowest rank, transfers included, ends first.

What moves between hosts is bounded by a level: hosts that would end later come down to it. The lower it is, the less
the slowest host has to do, and the longer its transfers take; best is where it works as long as it waits for them. Each
plan says how long its transfers take, and the next level is tried where both would meet.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from deepspeed_cad.layout import Ints
from deepspeed_cad.planner.constants import FEW_TRIES, MANY_RANKS, NARROWING, ROUNDING, TRIES, UNBOUNDED
from deepspeed_cad.planner.core import Aim, Solution, Units, solve
from deepspeed_cad.planner.finish import common_finish, finish_best
from deepspeed_cad.planner.plan import PlanInput


class Tried(NamedTuple):
    plan: Solution
    finish: float
    """When the slowest rank is done, transfers included."""
    share: float = 1.0
    """How far the slowest come down, of the way to the mean."""
    units: Units = Units.NONE


def hide_transfers(problem: PlanInput, even: Solution) -> tuple[Solution, tuple[str, ...]]:
    """The best of plans that move less, where transfers of the even one take longer than attention hides; and what to
    say about it. Never one that ends later than moving nothing."""
    best = Tried(even, slowest(problem, even))
    # Within one host transfers hide nearly always; what is left of them is no more than what costs miss.
    share = NARROWING if len(np.unique(_hosts(problem))) > 1 else 1.0
    if best.finish > _attention(problem, even) * (1.0 + share * problem.tolerance):
        for units in ways(problem):
            # Another way must be clearly better: the first is the one that keeps each host even.
            for tried in _look(problem, even, units):
                margin = 0.0 if units == best.units else NARROWING * problem.tolerance
                best = tried if tried.finish < best.finish * (1.0 - margin) else best
    may_stay = not (even.work_before[problem.speeds <= 0] > 0).any()
    # Documents that span ranks travel without a plan, too: that can only take longer than the attention at home.
    if not may_stay or problem.ends(even.work_before).max() <= best.finish:
        nothing = solve(problem, Aim(UNBOUNDED))
        finish = slowest(problem, nothing)
        if finish < best.finish or (finish == best.finish and may_stay):
            what = "nothing" if may_stay else "only what ranks of speed 0 must hand over"
            note = f"{what} is moved: on these links {'it' if may_stay else 'more'} would take longer than it saves"
            return nothing, () if np.array_equal(nothing.tasks, even.tasks) else (note,)
    if best.units == Units.NONE:
        return best.plan, ()
    who = "rank" if best.units == Units.RANKS else "host"
    said = f"the slowest {who} comes down {best.share:.0%} of the way to the mean"
    if best.units != Units.RANKS and not best.plan.flows.between:
        said = "nothing is moved between hosts"
    return best.plan, (
        f"{said}, and the slowest rank ends at {best.finish:.3g} {problem.cost.unit}: on these links an even plan "
        f"would end at {slowest(problem, even):.3g}",
    )


def slowest(problem: PlanInput, plan: Solution) -> float:
    """When the slowest rank is done, transfers included."""
    return float(finish_best(problem, plan.work, plan.flows)[0].max())


def _attention(problem: PlanInput, plan: Solution) -> float:
    """The same if transfers took no time."""
    return float(problem.ends(plan.work).max())


def _hosts(problem: PlanInput) -> Ints:
    return np.zeros(problem.tick.ranks, np.int64) if problem.hosts is None else np.asarray(problem.hosts)


def ways(problem: PlanInput) -> list[Units]:
    """Between whom to look: ranks where each has a host of its own or all have one, else hosts."""
    ranks, hosts = problem.tick.ranks, len(np.unique(_hosts(problem)))
    if hosts in (1, ranks):
        return [Units.RANKS]
    if ranks <= MANY_RANKS:
        return [Units.HOSTS, Units.HOSTS_LAST, Units.RANKS]
    # With many ranks what trials found better: keys of documents that span ranks would travel twice the other way.
    documents = problem.tick.query.document
    return [Units.HOSTS if len(np.unique(documents)) < len(documents) else Units.HOSTS_LAST]


def span(problem: PlanInput, even: Solution, units: Units) -> tuple[float, float]:
    """When the slowest unit would be done with its own work, spread over its ranks; and the mean of all."""
    base, speed, work = problem.floors, problem.speeds, even.work_before
    group = np.arange(len(work)) if units == Units.RANKS else np.unique(_hosts(problem), return_inverse=True)[1]
    each = common_finish(np.bincount(group, work).astype(np.float64), base, speed, group)
    # Summed in rank order, as a group is.
    return float(each.max()), float(common_finish(np.cumsum(work)[-1:], base, speed)[0])


def _look(problem: PlanInput, even: Solution, units: Units) -> Iterator[Tried]:
    """Plans at levels between the slowest unit as it is (share 0) and the mean (share 1)."""
    top, mean = span(problem, even, units)

    def plan_at(share: float, level: float) -> Tried:
        plan = solve(problem, Aim(problem.tolerance, units, level))
        return Tried(plan, slowest(problem, plan), share, units)

    low, high = 0.0, 1.0
    tries = FEW_TRIES if problem.tick.ranks > MANY_RANKS else TRIES
    # Waiting rises with the share: taken as a straight line through the last two plans that waited.
    earlier, waited = (0.0, 0.0), (1.0, slowest(problem, even))
    if units != Units.RANKS:
        yield (tried := plan_at(1.0, mean))
        waited, tries = (1.0, tried.finish), tries - 1
    if top - mean <= ROUNDING * mean:
        return
    for _ in range(tries):
        slope = (waited[1] - earlier[1]) / (waited[0] - earlier[0])
        # Work falls on a straight line from `top` to the mean.
        rise = slope + top - mean
        meeting = (top - waited[1] + slope * waited[0]) / rise if rise > 0.0 else low
        narrow = NARROWING * (high - low)
        share = 0.5 * (low + high) if meeting <= low else min(max(meeting, low + narrow), high - narrow)
        yield (tried := plan_at(share, top - share * (top - mean)))
        if tried.finish > _attention(problem, tried.plan) * (1.0 + NARROWING * problem.tolerance):
            high, earlier, waited = share, waited, (share, tried.finish)
        else:
            low = share
    if low == 0.0 and units != Units.RANKS:
        yield plan_at(0.0, top)
