"""Starts: whether documents on many ranks are left at home or dealt out by head groups before ranks are made even.

In: a question and the plan that starts at home. Out: the plan that ends first, transfers included; of those
that end alike, the one that is lightest on the rank that it burdens most. Where documents lie on several ranks
something travels in any case, so ranks are made more even than the tolerance says.

Which is lighter depends on sizes: dealing out moves Q and O of most rows, and K and V of a document once over all ranks
instead of once to each; where few ranks share a document, or it has few KV heads, home is the better start.
"""

from __future__ import annotations

import numpy as np

from deepspeed_cad.layout import Ints
from deepspeed_cad.planner.constants import BAND, FINER, KEPT, LIGHTER, READ_FROM, WORTH
from deepspeed_cad.planner.core import Aim, Solution, link_weights, solve
from deepspeed_cad.planner.finish import common_finish, finish_best
from deepspeed_cad.planner.plan import O_RECEIVED, O_SENT, QKV_RECEIVED, QKV_SENT, Flows, PlanInput


def best_start(problem: PlanInput, at_home: Solution) -> Solution:
    """`at_home`, the plan that starts there, or a better one."""
    ranks = most_ranks(problem)
    if ranks < 2:
        return at_home
    even = solve(problem, Aim(FINER * problem.tolerance))
    if ranks < READ_FROM or problem.shape.groups == 1:
        return even if pays(problem, even, at_home) else at_home
    plans = [even, *(solve(problem, Aim(problem.tolerance, kept=kept)) for kept in KEPT), at_home]
    ends = [end_of(problem, plan) for plan in plans]
    alike = min(ends) * (1.0 + BAND * problem.tolerance)
    best, least = None, np.inf
    for plan, end in zip(plans, ends, strict=True):
        if end > alike:
            continue
        found = burden(problem, plan.flows)
        if best is None or found < least * LIGHTER:
            best, least = plan, found
    assert best is not None  # the first to end is alike
    return best


def pays(problem: PlanInput, plan: Solution, other: Solution) -> bool:
    """Whether `plan` ends so much sooner than `other` as it moves more."""
    ends = [float(problem.ends(one.work).max()) for one in (plan, other)]
    moved = [max(int(one.flows.sent.max()), int(one.flows.received.max()), 1) for one in (plan, other)]
    return 1.0 - ends[0] / ends[1] > WORTH * (moved[0] / moved[1] - 1.0)


def end_of(problem: PlanInput, plan: Solution) -> float:
    """When the slowest rank is done, transfers included; plans within the band of the tolerance count as as even."""
    load = float(problem.ends(plan.work).max())
    mean = float(plan.work.sum() / problem.speeds.sum())
    if problem.base_load is not None:
        total = np.cumsum(plan.work)[-1:]
        mean = float(common_finish(total, problem.floors, problem.speeds)[0])
    waits = float(finish_best(problem, plan.work, plan.flows)[0].max()) - load
    return max(load, mean * (1.0 + BAND * problem.tolerance)) + waits


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
