"""The reference planner: what csrc/planner*.cpp does, in plain Python, to the task.

In: a `PlanInput` and a tolerance. Out: a `Solution`. The heuristic is told in words in `deepspeed_cad.planner`.
"""

from __future__ import annotations

import math

import numpy as np

from deepspeed_cad.planner.answer import Solution
from deepspeed_cad.planner.columns import Columns
from deepspeed_cad.planner.constants import AIMS, BAND, SLACK
from deepspeed_cad.planner.levels import finish_time, settle_levels, work_until
from deepspeed_cad.planner.offers import Levels
from deepspeed_cad.planner.plan import PlanInput
from deepspeed_cad.planner.round import Round
from deepspeed_cad.planner.traffic import traffic_matrix


def solve(problem: PlanInput, tolerance: float) -> Solution:
    """Make a plan in plain Python."""
    state = Columns(problem)
    ranks = state.ranks
    base = _floats(problem.base_load, ranks, 0.0)
    speed = _floats(problem.speed, ranks, 1.0)
    memory = _floats(problem.memory, ranks, math.inf)
    before = list(state.load)
    _balance(state, tolerance, base, speed, memory)
    if _slowest(state.load, base, speed) > _slowest(before, base, speed):
        state = Columns(problem)
    tasks = np.array(state.tasks(), np.int64).reshape(-1, 6)
    work = np.zeros(ranks)
    cost = problem.cost.of(tasks[:, 1], tasks[:, 2], problem.window) * (tasks[:, 4] - tasks[:, 3])
    np.add.at(work, tasks[:, 5], cost)
    matrix = traffic_matrix(tasks, problem.tick, problem.shape, problem.window)
    sent, received, between = (np.zeros(ranks, np.int64) for _ in range(3))
    for (source, target), amount in matrix.items():
        sent[source] += amount
        received[target] += amount
        if state.host[source] != state.host[target]:
            between[target] += amount
    return Solution(tasks, work, np.array(before), sent, received, between)


def _balance(state: Columns, tolerance: float, base: list[float], speed: list[float], memory: list[float]) -> None:
    ranks = state.ranks
    band = tolerance
    for part in AIMS:
        for phase in range(3):
            total = 0.0
            for rank in range(ranks):
                total += state.load[rank]
            finish = finish_time(total, base, speed)
            most = work_until(finish * (1.0 + band), base, speed)
            least = work_until(finish * (1.0 - band), base, speed)
            too_much = any(state.load[rank] > most[rank] for rank in range(ranks))
            too_little = any(state.load[rank] < least[rank] for rank in range(ranks))
            if not too_much and not too_little:
                return
            band = tolerance * BAND
            if (phase == 1 and not too_much) or (phase == 2 and not too_little):
                continue
            aim = band * part
            room = work_until(finish * (1.0 + aim), base, speed)
            if phase == 0:
                give, take = settle_levels(state.load, base, speed, finish, aim)
            elif phase == 1:
                give, take = room, work_until(finish, base, speed)
            else:
                give, take = work_until(finish, base, speed), work_until(finish * (1.0 - aim), base, speed)
            slack = [SLACK * band * finish * speed[rank] for rank in range(ranks)]
            Round(state, Levels(room, give, take, slack, base, speed, memory)).run()
            _evacuate(state, take, speed)


def _evacuate(state: Columns, take: list[float], speed: list[float]) -> None:
    """What a rank of speed 0 still has goes to whoever is farthest below its level."""
    for rank in range(state.ranks):
        if speed[rank] > 0.0:
            continue
        for index in state.of_rank[rank]:
            document = state.segments[index][0]
            for group in range(state.groups):
                for begin, end, server, _ in list(state.cells[document][group]):
                    if server == rank:
                        state.move(document, group, begin, end, _emptiest(state, take, speed))


def _emptiest(state: Columns, take: list[float], speed: list[float]) -> int:
    best = -1
    for rank in range(state.ranks):
        if speed[rank] <= 0.0:
            continue
        if best < 0 or (take[rank] - state.load[rank]) / speed[rank] > (take[best] - state.load[best]) / speed[best]:
            best = rank
    return best


def _slowest(load: list[float], base: list[float], speed: list[float]) -> float:
    slowest = 0.0
    for rank in range(len(load)):
        if speed[rank] > 0.0:
            slowest = max(slowest, base[rank] + load[rank] / speed[rank])
        elif load[rank] > 0.0:
            return math.inf
    return slowest


def _floats(values: object, ranks: int, default: float) -> list[float]:
    return [default] * ranks if values is None else [float(value) for value in values]  # type: ignore[attr-defined]
