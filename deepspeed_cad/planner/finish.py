"""When each rank is done with a layer, forward and backward, transfers included.

In: a question, the work of each rank and what its plan moves (flows.py). Out: seconds, or the unit of the cost model.

The model of one pass, for the forward; backward is its mirror and comes after it:

    home     Q, K, V out ─┐                          ┌─► O in ─► done
             own tasks ───│──────────────────────────│──►
    server                └─► arrive ─► its tasks ───┘
             own tasks that wait for nothing ────────────────►

Every rank sends and receives at once, each at the speed of a link of its own, and inside a host and between hosts at
once. What a server waits for has arrived when the slowest of those that send to it has sent everything. Then it runs
first; own tasks run before it and after it. Tasks of a rank that read keys of others wait like those that it serves.
What moves may go in waves, by head groups: a part travels while the one before is served and the one before that goes
back. Of n equal parts the first takes its turn at each of the three, and behind it the slowest of the three has n - 1
more. Base load is time beside which transfers and servers go on. Links that several ranks share are to be given as what
each gets while all use them, which is how they are measured.
"""

from __future__ import annotations

import numpy as np

from deepspeed_cad.layout import Ints
from deepspeed_cad.planner.constants import FORWARD_SHARE, TRAVELS, WAVE_SECONDS
from deepspeed_cad.planner.flows import BETWEEN, INSIDE, O_RECEIVED, O_SENT, QKV_RECEIVED, QKV_SENT, Flows
from deepspeed_cad.planner.plan import Floats, PlanInput


def finish_best(problem: PlanInput, work: Floats, flows: Flows, base: Floats, speed: Floats) -> tuple[Floats, int]:
    """When each rank is done ([ranks]) with the number of waves that the question allows and that ends first."""
    if not len(flows.pairs):
        return finish_times(problem, work, flows, base, speed), 1
    best, waves = finish_times(problem, work, flows, base, speed, problem.waves[0]), problem.waves[0]
    without = (base + work / np.where(speed > 0, speed, 1.0)).max()
    for count in problem.waves[1:]:
        if best.max() <= without:
            break
        found = finish_times(problem, work, flows, base, speed, count)
        if found.max() < best.max():
            best, waves = found, count
    return best, waves


def finish_times(problem: PlanInput, work: Floats, flows: Flows, base: Floats, speed: Floats, waves: int = 1) -> Floats:
    """When each rank is done ([ranks]) if what moves goes in so many waves."""
    divisor = np.where(speed > 0, speed, 1.0)
    seconds, waiting = work / divisor, np.minimum(flows.waiting, work) / divisor
    link = np.array([problem.cost.byte_inside, problem.cost.byte_between]) / TRAVELS
    if not len(flows.pairs) or not link.any():
        return base + seconds
    times = flows.bytes * link[:, None]
    homes, servers = flows.pairs[:, 0], flows.pairs[:, 1]
    host = np.zeros(len(work), np.int64) if problem.hosts is None else np.asarray(problem.hosts)
    where = np.where(host[homes] == host[servers], INSIDE, BETWEEN)
    with_rows = flows.pairs[:, 2] > 0
    every = np.ones(len(homes), bool)
    # No more than there are head groups; where a server has fewer, the other waves are empty.
    count = np.clip(flows.parts, 1.0, waves)
    later = (count - 1.0) / count
    begun = (waves - 1) * WAVE_SECONDS if problem.cost.unit == "seconds" else 0.0
    qkv, o = times[[QKV_SENT, QKV_RECEIVED]], times[[O_RECEIVED, O_SENT]]
    again = np.zeros_like(qkv) if problem.keep else qkv
    total = np.zeros(len(work))
    # Each pass: what goes out (home's side, server's side) and between which pairs, then what comes back.
    for share, out, out_pairs, back, back_pairs in (
        (FORWARD_SHARE, qkv, every, o, with_rows),
        (1.0 - FORWARD_SHARE, o + again, with_rows if problem.keep else every, qkv, every),
    ):
        start = base * share
        arrive = out[1].max(0)
        _raise_to(arrive, servers, out[0][where, homes], out_pairs)
        serve = waiting * share
        first = start + arrive / count + serve / count
        served = first + later * np.maximum(arrive, serve)
        done = np.maximum(start + seconds * share, np.where(waiting > 0.0, served, 0.0))
        trip = np.maximum(back[1][where, servers], back[0][where, homes])
        slowest = np.maximum(np.maximum(arrive, serve)[servers], trip)
        _raise_to(done, homes, first[servers] + trip / count[servers] + later[servers] * slowest, back_pairs)
        total += done + begun
    return total


def _raise_to(values: Floats, at: Ints, least: Floats, chosen: np.ndarray) -> None:
    np.maximum.at(values, at[chosen], least[chosen])
