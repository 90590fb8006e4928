"""The reference planner: what csrc/planner*.cpp does, in plain Python, to the task.

In: a `PlanInput` and an `Aim`. Out: a `Solution`. The heuristic is told in words in `deepspeed_cad.planner`.
"""

from __future__ import annotations

import math

import numpy as np

from deepspeed_cad.planner.aim import Aim, Solution, Units
from deepspeed_cad.planner.columns import Columns
from deepspeed_cad.planner.constants import AIMS, BAND, SLACK
from deepspeed_cad.planner.flows import count_flows
from deepspeed_cad.planner.levels import finish_time, settle_levels, settle_units, work_until
from deepspeed_cad.planner.offers import Levels, Limits
from deepspeed_cad.planner.plan import PlanInput
from deepspeed_cad.planner.round import Round
from deepspeed_cad.planner.spread import spread


def solve(problem: PlanInput, aim: Aim) -> Solution:
    """Make a plan in plain Python."""
    state = Columns(problem)
    ranks = state.ranks
    limits = Limits(
        _floats(problem.base_load, ranks, 0.0),
        _floats(problem.speed, ranks, 1.0),
        _floats(problem.memory, ranks, math.inf),
    )
    before = list(state.load)
    everyone, hosts = list(range(ranks)), ranks_by_host(state.host)
    if aim.kept >= 0:
        spread(state, limits, aim.tolerance, aim.kept)
    if aim.units == Units.NONE:
        _balance(state, aim.tolerance, limits, everyone)
    elif aim.units == Units.RANKS:
        _bring_down(state, aim, limits, [[rank] for rank in everyone])
    else:
        if aim.units == Units.HOSTS_LAST:
            for pool in hosts:
                _balance(state, aim.tolerance, limits, pool)
        _bring_down(state, aim, limits, hosts)
        for pool in hosts:
            _balance(state, aim.tolerance, limits, pool)
    if _slowest(state.load, limits) > _slowest(before, limits):
        state = Columns(problem)
    tasks = np.array(state.tasks(), np.int64).reshape(-1, 6)
    work = np.zeros(ranks)
    cost = problem.cost.of(tasks[:, 1], tasks[:, 2], problem.window) * (tasks[:, 4] - tasks[:, 3])
    np.add.at(work, tasks[:, 5], cost)
    return Solution(tasks, work, np.array(before), count_flows(state))


def ranks_by_host(host: list[int]) -> list[list[int]]:
    """The ranks of each host, in rank order."""
    found: list[list[int]] = [[] for _ in range(max(host, default=-1) + 1)]
    for rank, at in enumerate(host):
        found[at].append(rank)
    return found


def _balance(state: Columns, tolerance: float, limits: Limits, pool: list[int]) -> None:
    """Bring the ranks of a pool within the tolerance of the time at which all of its work would be done."""
    base, speed = [limits.base[rank] for rank in pool], [limits.speed[rank] for rank in pool]
    band = tolerance
    for part in AIMS:
        for phase in range(3):
            load = [state.load[rank] for rank in pool]
            total = 0.0
            for one in load:
                total += one
            finish = finish_time(total, base, speed)
            most = work_until(finish * (1.0 + band), base, speed)
            least = work_until(finish * (1.0 - band), base, speed)
            too_much = any(one > bound for one, bound in zip(load, most, strict=True))
            too_little = any(one < bound for one, bound in zip(load, least, strict=True))
            if not too_much and not too_little:
                return
            band = tolerance * BAND
            if (phase == 1 and not too_much) or (phase == 2 and not too_little):
                continue
            aim = band * part
            room = work_until(finish * (1.0 + aim), base, speed)
            if phase == 0:
                give, take = settle_levels(load, base, speed, finish, aim)
            elif phase == 1:
                give, take = room, work_until(finish, base, speed)
            else:
                give, take = work_until(finish, base, speed), work_until(finish * (1.0 - aim), base, speed)
            levels = Levels.closed(state.ranks, limits)
            for at, rank in enumerate(pool):
                levels.most[rank], levels.give[rank], levels.take[rank] = room[at], give[at], take[at]
                levels.slack[rank] = SLACK * band * finish * speed[at]
            Round(state, levels, pool).run()
            _evacuate(state, levels, pool)


def _bring_down(state: Columns, aim: Aim, limits: Limits, units: list[list[int]]) -> None:
    """Units that would end above the level give what is above; those that end first take it."""
    total = 0.0
    for rank in range(state.ranks):
        total += state.load[rank]
    finish = finish_time(total, limits.base, limits.speed)
    settled = settle_units(state.load, limits.base, limits.speed, units, max(aim.level, finish))
    levels = Levels.closed(state.ranks, limits)
    levels.give[:], levels.take[:], levels.most[:] = settled
    for rank in range(state.ranks):
        levels.slack[rank] = SLACK * aim.tolerance * BAND * finish * limits.speed[rank]
    everyone = list(range(state.ranks))
    Round(state, levels, everyone).run()
    _evacuate(state, levels, everyone)


def _evacuate(state: Columns, levels: Levels, pool: list[int]) -> None:
    """What a rank of speed 0 still has goes to whoever of its pool is farthest below its level."""
    if not any(levels.speed[rank] > 0.0 for rank in pool):
        return
    for rank in pool:
        if levels.speed[rank] > 0.0:
            continue
        for index in state.of_rank[rank]:
            document = state.segments[index][0]
            for group in range(state.groups):
                for begin, end, server, _ in list(state.cells[document][group]):
                    if server == rank:
                        state.move(document, group, begin, end, _emptiest(state, levels, pool))


def _emptiest(state: Columns, levels: Levels, pool: list[int]) -> int:
    best, most = -1, 0.0
    for rank in pool:
        if levels.speed[rank] <= 0.0:
            continue
        room = (levels.take[rank] - state.load[rank]) / levels.speed[rank]
        if best < 0 or room > most:
            best, most = rank, room
    return best


def _slowest(load: list[float], limits: Limits) -> float:
    slowest = 0.0
    for rank in range(len(load)):
        if limits.speed[rank] > 0.0:
            slowest = max(slowest, limits.base[rank] + load[rank] / limits.speed[rank])
        elif load[rank] > 0.0:
            return math.inf
    return slowest


def _floats(values: object, ranks: int, default: float) -> list[float]:
    return [default] * ranks if values is None else [float(value) for value in values]  # type: ignore[attr-defined]
