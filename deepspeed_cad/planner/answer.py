"""The answer: what the core found, made into a `Plan` that is never worse than doing nothing.

The plan from the best start is taken (`best_start`), where links are slow one that moves less (`hide_transfers`): 6 to
8 in `deepspeed_cad.planner`. Where documents lie on several ranks something travels in any case, so ranks may be made
more even than the tolerance says.
"""

import time
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from deepspeed_cad.layout import Ints
from deepspeed_cad.planner import constants
from deepspeed_cad.planner.core import Aim, Solution, Units, link_weights, solve, split_own_rows
from deepspeed_cad.planner.finish import common_finish, finish_best, mean_finish
from deepspeed_cad.planner.plan import O_RECEIVED, O_SENT, QKV_RECEIVED, QKV_SENT, Floats, Flows, Plan, PlanInput
from deepspeed_cad.planner.question import check_input


def make_plan(problem: PlanInput) -> Plan:
    """Make a plan. Raises CADConfigError for impossible input, CADError where the compiled library is missing."""
    started = time.perf_counter()
    check_input(problem)
    found = best_start(problem)
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
    speed, finish = problem.speeds, mean_finish(problem, work)
    least, most = (
        np.where(speed > 0, speed * np.maximum(finish * share - problem.floors, 0.0), 0.0)
        for share in (1.0 - problem.tolerance, 1.0 + problem.tolerance)
    )
    beyond = np.maximum(work - most, least - work)
    out = beyond > constants.ROUNDING * finish
    if not out.any():
        return ()
    worst = int(np.argmax(beyond))
    return (
        f"{out.sum()} of {len(work)} ranks are out of the tolerance of {problem.tolerance:g}: the granularity, or too "
        f"few rows; the farthest is rank {worst} with {work[worst]:.6g} where {least[worst]:.6g} to {most[worst]:.6g} "
        "were wanted",
    )


def best_start(problem: PlanInput) -> Solution:
    """The plan that starts at home, or a better one. Dealing out moves Q and O of most rows, and K and V of a document
    once over all ranks instead of once to each: not better where few ranks, or few KV heads, share it. Plans that are
    more even mostly move more."""
    # On how many ranks a document lies at the most: a quick look at what planner_spread.cpp decides.
    if (ranks := int(problem.tick.query.count_ranks()[1].max(initial=0))) < 2:
        return solve(problem, Aim(problem.tolerance))
    starts: tuple[int, ...] = (-1,)
    if ranks >= constants.READ_FROM and problem.shape.groups > 1:
        starts += constants.KEPT
    shares = constants.EVEN if problem.tick.ranks <= constants.MANY_RANKS else constants.FEW_EVEN
    plans = [solve(problem, Aim(share * problem.tolerance, kept=start)) for start in starts for share in shares]
    return min(plans, key=partial(_price, problem))


def _price(problem: PlanInput, plan: Solution) -> float:
    """When the slowest rank ends, longer by what its bytes are worth, beside the most that a rank has of its own."""
    tick, shape = problem.tick, problem.shape
    own = tick.query_tokens * (shape.query_bytes + shape.output_bytes) + tick.key_tokens * shape.key_value_bytes
    share = burden(problem, plan.flows) / float(own.max() * shape.groups)
    return slowest(problem, plan) * (1.0 + constants.WORTH * share)


def burden(problem: PlanInput, flows: Flows) -> float:
    """Bytes of one layer: memory where things land, as large on every rank as the fullest needs, and of what a server
    makes for others; and what reaches the rank that most reaches, forward and backward, by its link."""
    out, back = landing(problem, flows)
    rows, keys = flows.served
    made = rows * problem.shape.query_bytes + keys * problem.shape.key_value_bytes
    # Q, K and V reach a server twice: for the forward and for the backward.
    reached = flows.bytes[[O_RECEIVED, O_SENT, QKV_RECEIVED, QKV_RECEIVED, QKV_SENT]].sum(0)
    inside, between = link_weights(problem)  # no matrix product: its last bits depend on the processor
    return float((out + made).max() + back.max() + (inside * reached[0] + between * reached[1]).max())


def landing(problem: PlanInput, flows: Flows) -> tuple[Ints, Ints]:
    """Bytes that land at each rank at once ([ranks] each): what comes to be run, own rows included, and what comes
    back; in backward, which needs more of both: dO, Q, K and V; dQ, dK and dV."""
    shape = problem.shape
    rows, keys = flows.served
    out = rows * (shape.query_bytes + shape.output_bytes) + keys * shape.key_value_bytes
    return out, flows.bytes[QKV_SENT].sum(0)


class Tried(NamedTuple):
    plan: Solution
    finish: float
    share: float = 1.0
    """How far the slowest come down, of the way to the mean."""
    units: Units = Units.NONE


def hide_transfers(problem: PlanInput, even: Solution) -> tuple[Solution, tuple[str, ...]]:
    """The best of plans that move less, where transfers of the even one take longer than attention hides, and notes.
    Never one that ends later than moving nothing."""
    best = Tried(even, slowest(problem, even))
    # Within one host transfers hide nearly always; what is left of them is no more than what costs miss.
    share = constants.NARROWING if len(np.unique(_hosts(problem))) > 1 else 1.0
    if best.finish > problem.ends(even.work).max() * (1.0 + share * problem.tolerance):
        for units in ways(problem):
            # Another way must be clearly better: the first is the one that keeps each host even.
            for tried in _look(problem, even, units):
                margin = 0.0 if units == best.units else constants.NARROWING * problem.tolerance
                best = tried if tried.finish < best.finish * (1.0 - margin) else best
    may_stay = not (even.work_before[problem.speeds <= 0] > 0).any()
    # Documents that span ranks travel without a plan, too: that can only take longer than the attention at home.
    if not may_stay or problem.ends(even.work_before).max() <= best.finish:
        nothing = solve(problem, Aim(constants.UNBOUNDED))
        finish = slowest(problem, nothing)
        if finish < best.finish or (finish == best.finish and may_stay):
            what = "nothing" if may_stay else "only what ranks of speed 0 must hand over"
            note = f"{what} is moved: on these links {'it' if may_stay else 'more'} would take longer than it saves"
            return nothing, () if np.array_equal(nothing.tasks, even.tasks) else (note,)
    if best.units == Units.NONE:
        return best.plan, ()
    who = "rank" if best.units == Units.RANKS else "host"
    said = f"the slowest {who} comes down {best.share:.0%} of the way to the mean"
    if who == "host" and not best.plan.flows.between:
        said = "nothing is moved between hosts"
    return best.plan, (
        f"{said}, and the slowest rank ends at {best.finish:.3g} {problem.cost.unit}: on these links an even plan "
        f"would end at {slowest(problem, even):.3g}",
    )


def slowest(problem: PlanInput, plan: Solution) -> float:
    """When the slowest rank is done, transfers included."""
    return float(finish_best(problem, plan.work, plan.flows)[0].max())


def _hosts(problem: PlanInput) -> Ints:
    return np.zeros(problem.tick.ranks, np.int64) if problem.hosts is None else np.asarray(problem.hosts)


def ways(problem: PlanInput) -> list[Units]:
    """Between whom to look: ranks where each has a host of its own or all have one, else hosts."""
    ranks, hosts = problem.tick.ranks, len(np.unique(_hosts(problem)))
    if hosts in (1, ranks):
        return [Units.RANKS]
    if ranks <= constants.MANY_RANKS:
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
    tries = constants.FEW_TRIES if problem.tick.ranks > constants.MANY_RANKS else constants.TRIES
    # Waiting rises with the share: taken as a straight line through the last two plans that waited.
    earlier, waited = (0.0, 0.0), (1.0, slowest(problem, even))
    if units != Units.RANKS:
        yield (tried := plan_at(1.0, mean))
        waited, tries = (1.0, tried.finish), tries - 1
    if top - mean <= constants.ROUNDING * mean:
        return
    for _ in range(tries):
        slope = (waited[1] - earlier[1]) / (waited[0] - earlier[0])
        # Work falls on a straight line from `top` to the mean.
        rise = slope + top - mean
        meeting = (top - waited[1] + slope * waited[0]) / rise if rise > 0.0 else low
        narrow = constants.NARROWING * (high - low)
        share = 0.5 * (low + high) if meeting <= low else min(max(meeting, low + narrow), high - narrow)
        yield (tried := plan_at(share, top - share * (top - mean)))
        if tried.finish > problem.ends(tried.plan.work).max() * (1.0 + constants.NARROWING * problem.tolerance):
            high, earlier, waited = share, waited, (share, tried.finish)
        else:
            low = share
    if low == 0.0 and units != Units.RANKS:
        yield plan_at(0.0, top)
