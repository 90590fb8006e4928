"""When each rank begins and is done with a layer, forward and backward, transfers included.

The model of one pass, for the forward; backward is its mirror and comes after it:

    home     Q, K, V out ─┐                          ┌─► O in ─► done
             own tasks ───│──────────────────────────│──►
    server                └─► arrive ─► its tasks ───┘
             own tasks that wait for nothing ────────────────►

Every rank sends and receives at once, inside a host and between hosts. What a server waits for has arrived when the
slowest of those that send to it has sent everything, and runs first; tasks that read keys of others wait like those
that it serves. What moves may go in waves: of n equal parts the first takes its turn at travelling out, being served
and travelling back, and behind it the slowest of the three has n - 1 more. Base load is time beside which transfers and
servers go on. Links that several ranks share are to be given as what each gets while all use them.

Where two ticks take turns beside reserved servers (`alternate`), a server is at the other tick until one arrives, and
what it found may come home later by what trainers have to do in the other tick. `begin_in_place`: when ranks begin.
"""

from typing import NamedTuple

import numpy as np

from deepspeed_cad.cost import CostModel
from deepspeed_cad.layout import Ints, Tick
from deepspeed_cad.planner.constants import BISECTIONS, FORWARD_SHARE, TRAVELS, WAVE_SECONDS
from deepspeed_cad.planner.plan import Alternation, Bools, Floats, Flows, PlanInput


class Routes(NamedTuple):
    """Who exchanges with whom in a layer ([pairs]), the same in all its passes."""

    home: Ints
    server: Ints
    where: Ints
    """INSIDE or BETWEEN (planner/plan.py)."""
    waves: Floats
    """[ranks]: in how many parts travels what each serves: no more than there are head groups, where a server has fewer
    the other waves are empty."""


class Trip(NamedTuple):
    """What moves one way in a pass."""

    home: Floats
    """[2, ranks]: seconds in which each rank's links are busy with it as a home, INSIDE and BETWEEN."""
    server: Floats
    pairs: Bools
    """[pairs]: between which anything moves."""


def common_finish(work: Floats, base: Floats, speed: Floats, group: Ints | None = None) -> Floats:
    """[groups]: when all work ([groups], at speed 1) is done if ranks start at their base loads ([ranks]) and all of a
    group ([ranks] its number; None: all are one) stop together. `speed`: [ranks]; 0: runs none."""
    group = np.zeros(len(base), np.int64) if group is None else group
    # Sums in rank order: the same on every machine.
    speeds = np.bincount(group, speed, len(work))
    low, high = np.zeros(len(work)), np.zeros(len(work))
    np.maximum.at(high, group, np.where(speed > 0.0, base, 0.0))
    high += work / np.where(speeds > 0.0, speeds, 1.0)
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        done = np.bincount(group, speed * np.maximum(middle[group] - base, 0.0), len(work))
        low, high = np.where(done < work, middle, low), np.where(done < work, high, middle)
    return np.where(speeds > 0.0, high, 0.0)


def mean_finish(problem: PlanInput, work: Floats) -> float:
    """When all work of all ranks is done if they stop together."""
    if problem.base_load is None:
        return float(work.sum() / problem.speeds.sum())
    # Summed in rank order, as a group is.
    return float(common_finish(np.cumsum(work)[-1:], problem.floors, problem.speeds)[0])


def finish_best(problem: PlanInput, work: Floats, flows: Flows) -> tuple[Floats, int]:
    """When each rank is done ([ranks]) with the number of waves that ends first, and that number."""
    if not len(flows.pairs):
        return finish_times(problem, work, flows), 1
    best, waves = finish_times(problem, work, flows, problem.waves[0]), problem.waves[0]
    without = problem.ends(work).max()
    for count in problem.waves[1:]:
        if best.max() <= without:
            break
        ends = finish_times(problem, work, flows, count)
        if ends.max() < best.max():
            best, waves = ends, count
    return best, waves


def finish_times(problem: PlanInput, work: Floats, flows: Flows, waves: int = 1) -> Floats:
    """When each rank is done ([ranks]) if what moves goes in so many waves."""
    base, ends = problem.floors, problem.ends(work)
    link = np.array([problem.cost.byte_inside, problem.cost.byte_between]) / TRAVELS
    if not len(flows.pairs) or not link.any():
        return ends
    seconds, waiting = work / problem.divisors, np.minimum(flows.waiting, work) / problem.divisors
    routes, trips = find_trips(flows, problem.hosts, link, waves)
    begun = (waves - 1) * WAVE_SECONDS if problem.cost.unit == "seconds" else 0.0
    total = np.zeros(len(work))
    shares = (FORWARD_SHARE, 1.0 - FORWARD_SHARE) if problem.backward else (1.0,)
    for share, (out, back) in zip(shares, trips):
        if (turns := problem.alternation) is not None:
            turns = turns._replace(later=turns.later * share)
        total += end_of_pass(routes, out, back, seconds * share, waiting * share, base * share, turns) + begun
    return total


def find_trips(
    flows: Flows, hosts: Ints | None, per_byte: Floats, waves: int
) -> tuple[Routes, tuple[tuple[Trip, Trip], tuple[Trip, Trip]]]:
    """Who exchanges with whom; what moves there and back in forward, and in backward. `per_byte`: [2] seconds."""
    home, server, with_rows = flows.pairs.T
    qkv_sent, qkv_received, o_sent, o_received = flows.bytes * per_byte[:, None]
    host = np.zeros(len(flows.parts), np.int64) if hosts is None else np.asarray(hosts)
    where = (host[home] != host[server]).astype(np.int64)
    every = np.ones(len(home), bool)
    qkv = Trip(qkv_sent, qkv_received, every)
    o = Trip(o_received, o_sent, with_rows > 0)
    # Backward: dO goes out, and Q, K and V once more, which servers do not keep; dQ, dK and dV come home.
    again = Trip(o.home + qkv.home, o.server + qkv.server, every)
    return Routes(home, server, where, np.clip(flows.parts, 1.0, waves)), ((qkv, o), (again, qkv))


def end_of_pass(
    routes: Routes, out: Trip, back: Trip, own: Floats, waiting: Floats, start: Floats | float = 0.0,
    alternation: Alternation | None = None,
) -> Floats:  # fmt: skip
    """When each rank is done with a pass ([ranks]) of `own` seconds of tasks, of which `waiting` wait for what other
    ranks send, from its base load `start` on."""
    homes, servers, where, count = routes
    arrive = out.server.max(0)
    np.maximum.at(arrive, servers[out.pairs], out.home[where, homes][out.pairs])
    later = (count - 1.0) / count
    first = start + arrive / count + waiting / count
    slower = np.maximum(arrive, waiting)
    served = first + later * slower
    is_late = waiting > 0.0 if alternation is None else (waiting > 0.0) & ~alternation.servers
    done = np.maximum(start + own, np.where(is_late, served, 0.0))
    trip = np.maximum(back.server[where, servers], back.home[where, homes])
    home_at = first[servers] + trip / count[servers] + later[servers] * np.maximum(slower[servers], trip)
    if alternation is not None:
        home_at -= np.where(alternation.servers[servers], alternation.later, 0.0)
    np.maximum.at(done, homes[back.pairs], home_at[back.pairs])
    return done


def alternate(other_work: float, linear: Floats, speed: Floats, servers: Bools) -> Alternation:
    """How late what reserved servers found in a tick may come home, where another tick takes turns with it.

        forward    hands A over │ own B │ linear B, hands B over │ own A │ linear A …
        backward   hands A over, own A │ linear B, hands B over, own B │ linear A …
        server              B, as far as it came │ A …                   │ B …

    A goes out, is served and comes home while all of that runs. Of a round it has everything but the linear layers that
    follow on it: beyond its own tick, that is the other tick less these linear layers, those of the slowest trainer,
    because servers begin when the last trainer has handed over. That needs a transport on which results come home while
    the next tick goes out (Transport.two_ways). Figures are of forward and backward together.

    `other_work`: attention of the other tick, of all ranks, at speed 1. `linear`: [ranks] linear layers of this tick's
    rows, which run while the other tick is attended. `speed`: [ranks] of attention. `servers`: [ranks] who only serves.
    """
    slowest = float(linear.max())
    return Alternation(servers, max(float(common_finish(np.array([other_work]), linear, speed)[0]), slowest) - slowest)


def begin_in_place(
    seconds: Floats, tick: Tick, cost: CostModel, groups: int, window: int | None, speeds: Floats | None = None
) -> Floats | None:
    """[ranks] seconds when every rank begins, in a tick that no other alternates with; None where all begin together.

    A rank with more to do outside attention should attend less, and whoever is early more: as base loads these make
    whole layers even. An early rank runs attention of its own until keys and queries of the late ones arrive; where it
    has too little of that it is idle for the rest. Rows that read keys of a late rank fill no time.

    `seconds`: [ranks] per token of one layer outside attention, forward and backward. `cost`: of attention, in seconds
    too. `speeds`: [ranks] in attention, beside what costs say."""
    before = seconds * tick.query_tokens
    speed = np.ones(tick.ranks) if speeds is None else speeds
    runs = np.where(speed > 0.0, speed, np.inf)
    rows = tick.query
    work = cost.of(rows.begin, rows.end, window) * groups
    own = np.bincount(rows.rank, work, tick.ranks)
    late = before + own / runs > common_finish(own.sum(keepdims=True), before, speed)
    if not late.any():
        return None
    # When the last keys are there that the rows of a segment read, on whatever ranks.
    keys = before[rows.rank]
    documents, ranks = rows.count_ranks()
    for document in documents[ranks > 1]:
        parts = np.flatnonzero(rows.document == document)
        parts = parts[np.argsort(rows.begin[parts])]
        keys[parts] = np.maximum.accumulate(keys[parts])
    free = keys <= before[rows.rank]
    meanwhile = np.bincount(rows.rank[free], work[free], tick.ranks) / runs
    there = np.full(tick.ranks, before[late].max())
    np.maximum.at(there, rows.rank, keys)
    begin = np.maximum(before, there - meanwhile)
    begin -= begin.min()
    return begin if begin.any() else None
