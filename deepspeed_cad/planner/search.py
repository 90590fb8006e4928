"""The search for how much to move where links are slow: the plan whose slowest rank, transfers included, ends first.

In: a question and the plan that is as even as the tolerance asks. Out: the best plan that was found, and what
to say about it. Never one that ends later than moving nothing.

What moves between hosts is bounded by a level: hosts that would end later come down to it. The lower it is, the less
the slowest host has to do, and the longer its transfers take; best is where it works as long as it waits for them. Each
plan says how long its transfers take, and the next level is tried where both would meet.
"""

from __future__ import annotations

import numpy as np

from deepspeed_cad.planner.constants import FEW_TRIES, MANY_RANKS, NARROWING, ROUNDING, TRIES, UNBOUNDED
from deepspeed_cad.planner.core import Aim, Solution, Units, solve
from deepspeed_cad.planner.finish import common_finish, finish_best
from deepspeed_cad.planner.plan import PlanInput

NOTHING = "nothing is moved: on these links it would take longer than it saves"

NO_MORE = "only what ranks of speed 0 must hand over is moved: on these links more would take longer than it saves"


def hide_transfers(problem: PlanInput, even: Solution) -> tuple[Solution, tuple[str, ...]]:
    """The best of plans that move less, where transfers of the even one take longer than attention hides."""
    search = Search(problem, even)
    # Within one host transfers hide nearly always; what is left of them is no more than what costs miss.
    share = NARROWING if len(np.unique(search.host)) > 1 else 1.0
    if search.finish > search.attention(even) * (1.0 + share * problem.tolerance):
        for units in search.ways():
            search.look(units)
    return search.found()


class Search:
    def __init__(self, problem: PlanInput, even: Solution) -> None:
        self.problem = problem
        self.even = self.best = even
        self.finish = self.slowest(even)
        self.share = 1.0
        """How far the slowest come down, of the way to the mean."""
        self.units = Units.NONE
        self.host = np.zeros(problem.tick.ranks, np.int64) if problem.hosts is None else np.asarray(problem.hosts)

    def slowest(self, plan: Solution) -> float:
        """When the slowest rank is done, transfers included."""
        return float(finish_best(self.problem, plan.work, plan.flows)[0].max())

    def attention(self, plan: Solution) -> float:
        """The same if transfers took no time."""
        return float(self.problem.ends(plan.work).max())

    def ways(self) -> list[Units]:
        """Between whom to look: ranks where each has a host of its own or all have one, else hosts."""
        ranks, hosts = self.problem.tick.ranks, len(np.unique(self.host))
        if hosts in (1, ranks):
            return [Units.RANKS]
        if ranks <= MANY_RANKS:
            return [Units.HOSTS, Units.HOSTS_LAST, Units.RANKS]
        # With many ranks what trials found better: keys of documents that span ranks would travel twice the other way.
        documents = self.problem.tick.query.document
        return [Units.HOSTS if len(np.unique(documents)) < len(documents) else Units.HOSTS_LAST]

    def look(self, units: Units) -> None:
        """Try levels between the slowest unit as it is (share 0) and the mean (share 1)."""
        top, mean = self.span(units)
        low, high = 0.0, 1.0
        tries = FEW_TRIES if self.problem.tick.ranks > MANY_RANKS else TRIES
        # Waiting rises with the share: taken as a straight line through the last two plans that waited.
        earlier, waited = (0.0, 0.0), (1.0, self.slowest(self.even))
        if units != Units.RANKS:
            plan = solve(self.problem, Aim(self.problem.tolerance, units, mean))
            waited, tries = (1.0, self.keep_better(plan, 1.0, units)), tries - 1
        if top - mean <= ROUNDING * mean:
            return
        for _ in range(tries):
            slope = (waited[1] - earlier[1]) / (waited[0] - earlier[0])
            # Work falls on a straight line from `top` to the mean.
            rise = slope + top - mean
            meeting = (top - waited[1] + slope * waited[0]) / rise if rise > 0.0 else low
            narrow = NARROWING * (high - low)
            share = 0.5 * (low + high) if meeting <= low else min(max(meeting, low + narrow), high - narrow)
            plan = solve(self.problem, Aim(self.problem.tolerance, units, top - share * (top - mean)))
            finish = self.keep_better(plan, share, units)
            if finish > self.attention(plan) * (1.0 + NARROWING * self.problem.tolerance):
                high, earlier, waited = share, waited, (share, finish)
            else:
                low = share
        if low == 0.0 and units in (Units.HOSTS, Units.HOSTS_LAST):
            self.keep_better(solve(self.problem, Aim(self.problem.tolerance, units, top)), 0.0, units)

    def span(self, units: Units) -> tuple[float, float]:
        """When the slowest unit would be done with its own work, spread over its ranks; and the mean of all."""
        base, speed, work = self.problem.floors, self.problem.speeds, self.even.work_before
        group = np.arange(len(work)) if units == Units.RANKS else np.unique(self.host, return_inverse=True)[1]
        each = common_finish(np.bincount(group, work).astype(np.float64), base, speed, group)
        # Summed in rank order, as a group is.
        return float(each.max()), float(common_finish(np.cumsum(work)[-1:], base, speed)[0])

    def keep_better(self, plan: Solution, share: float, units: Units) -> float:
        """Take a plan if it ends earlier; returns when it does."""
        finish = self.slowest(plan)
        # Another way must be clearly better: the first is the one that keeps each host even.
        margin = 0.0 if units == self.units else NARROWING * self.problem.tolerance
        if finish < self.finish * (1.0 - margin):
            self.best, self.finish, self.share, self.units = plan, finish, share, units
        return finish

    def found(self) -> tuple[Solution, tuple[str, ...]]:
        """The best plan, or nothing where that ends as early; and why it is not even."""
        at_home = self.problem.ends(self.even.work_before)
        may_stay = not (self.even.work_before[self.problem.speeds <= 0] > 0).any()
        # Documents that span ranks travel without a plan, too: that can only take longer than the attention at home.
        if not may_stay or at_home.max() <= self.finish:
            nothing = solve(self.problem, Aim(UNBOUNDED))
            finish = self.slowest(nothing)
            if finish < self.finish or (finish == self.finish and may_stay):
                as_even = np.array_equal(nothing.tasks, self.even.tasks)
                return nothing, () if as_even else (NOTHING if may_stay else NO_MORE,)
        if self.units == Units.NONE:
            return self.best, ()
        if self.units != Units.RANKS and not self.best.flows.between:
            said = "nothing is moved between hosts, and the slowest rank"
        else:
            who = "rank" if self.units == Units.RANKS else "host"
            said = f"the slowest {who} comes down {self.share:.0%} of the way to the mean, and the slowest rank"
        return self.best, (
            f"{said} ends at {self.finish:.3g} {self.problem.cost.unit}: on these links an even plan would end at "
            f"{self.slowest(self.even):.3g}",
        )
