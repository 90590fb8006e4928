"""The answer: what the core found, made into a `Plan` that is never worse than doing nothing.

Documents on many ranks are left at home, or dealt out by head groups, before ranks are made even (`best_start`): the
plan that ends first is taken, transfers included; of those that end alike, the one that is lightest on the rank that it
burdens most. Where documents lie on several ranks something travels in any case, so ranks are made more even than the
tolerance says.
"""

from __future__ import annotations

import time

import numpy as np

from deepspeed_cad.layout import Ints
from deepspeed_cad.planner.constants import BAND, FINER, KEPT, LIGHTER, READ_FROM, ROUNDING, WORTH
from deepspeed_cad.planner.core import Aim, Solution, link_weights, solve, split_own_rows
from deepspeed_cad.planner.finish import finish_best, mean_finish
from deepspeed_cad.planner.plan import O_RECEIVED, O_SENT, QKV_RECEIVED, QKV_SENT, Floats, Flows, Plan, PlanInput
from deepspeed_cad.planner.question import check_input
from deepspeed_cad.planner.search import hide_transfers


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
    speed, finish = problem.speeds, mean_finish(problem, work)
    least, most = (
        np.where(speed > 0, speed * np.maximum(finish * share - problem.floors, 0.0), 0.0)
        for share in (1.0 - problem.tolerance, 1.0 + problem.tolerance)
    )
    beyond = np.maximum(work - most, least - work)
    out = beyond > ROUNDING * finish
    if not out.any():
        return ()
    worst = int(np.argmax(beyond))
    return (
        f"{out.sum()} of {len(work)} ranks are out of the tolerance of {problem.tolerance:g}: the granularity, or too "
        f"few rows; the farthest is rank {worst} with {work[worst]:.6g} where {least[worst]:.6g} to {most[worst]:.6g} "
        "were wanted",
    )


def best_start(problem: PlanInput, at_home: Solution) -> Solution:
    """`at_home`, the plan that starts there, or a better one.

    Dealing out moves Q and O of most rows, and K and V of a document once over all ranks instead of once to each; where
    few ranks share a document, or it has few KV heads, home is the better start.
    """
    ranks = most_ranks(problem)
    if ranks < 2:
        return at_home
    even = solve(problem, Aim(FINER * problem.tolerance))
    if ranks < READ_FROM or problem.shape.groups == 1:
        ends = [float(problem.ends(one.work).max()) for one in (even, at_home)]
        moved = [max(int(one.flows.sent.max()), int(one.flows.received.max()), 1) for one in (even, at_home)]
        # Whether it ends so much sooner as it moves more.
        return even if 1.0 - ends[0] / ends[1] > WORTH * (moved[0] / moved[1] - 1.0) else at_home
    plans = [even, *(solve(problem, Aim(problem.tolerance, kept=kept)) for kept in KEPT), at_home]
    ends = [end_of(problem, plan) for plan in plans]
    alike = [plan for plan, end in zip(plans, ends) if end <= min(ends) * (1.0 + BAND * problem.tolerance)]
    best, least = alike[0], burden(problem, alike[0].flows)
    for plan in alike[1:]:
        if (found := burden(problem, plan.flows)) < least * LIGHTER:
            best, least = plan, found
    return best


def end_of(problem: PlanInput, plan: Solution) -> float:
    """When the slowest rank is done, transfers included; plans within the band of the tolerance count as as even."""
    load = float(problem.ends(plan.work).max())
    waits = float(finish_best(problem, plan.work, plan.flows)[0].max()) - load
    return max(load, mean_finish(problem, plan.work) * (1.0 + BAND * problem.tolerance)) + waits


def most_ranks(problem: PlanInput) -> int:
    """On how many ranks, at the most, a document lies: a quick look at what planner_spread.cpp decides."""
    return int(problem.tick.query.count_ranks()[1].max(initial=0))


def burden(problem: PlanInput, flows: Flows) -> float:
    """Bytes of one layer: memory that its exchanges hold, and what reaches the rank that most reaches.

    Memory is where things land, as large on every rank as the fullest needs, and what a server makes for others before
    it goes back. What reaches a rank counts forward and backward, and by its link.
    """
    out, back = landing(problem, flows)
    rows, keys = flows.served
    made = rows * problem.shape.query_bytes + keys * problem.shape.key_value_bytes
    weights = np.array(link_weights(problem))
    # Q, K and V reach a server twice: for the forward and for the backward.
    reached = flows.bytes[[O_RECEIVED, O_SENT, QKV_RECEIVED, QKV_RECEIVED, QKV_SENT]].sum(0)
    return float((out + made).max() + back.max() + (weights @ reached).max())


def landing(problem: PlanInput, flows: Flows) -> tuple[Ints, Ints]:
    """Bytes that land at each rank at once: what comes to be run, and what comes back ([ranks] each).

    Backward needs more of both: dO, Q, K and V of all rows that are served, own ones included; dQ, dK and dV.
    """
    shape = problem.shape
    rows, keys = flows.served
    out = rows * (shape.query_bytes + shape.output_bytes) + keys * shape.key_value_bytes
    return out, flows.bytes[QKV_SENT].sum(0)
