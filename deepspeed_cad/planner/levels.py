"""Levels: how much attention each rank should run.

In: total work, speeds, base loads, tolerance. Out: for each rank the least and the most work it may have, and the
levels that ranks which give and ranks which take should end at. Plain loops over floats, in rank order: the native
planner does the same operations in the same order, so both get the same numbers to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from deepspeed_cad.layout import Ints
from deepspeed_cad.planner.constants import BISECTIONS
from deepspeed_cad.planner.plan import Floats


def finish_time(work: float, base: list[float], speed: list[float]) -> float:
    """The time T at which all work is done when every rank starts at its base load and all stop together."""
    low, high = 0.0, 0.0
    total_speed = 0.0
    for rank in range(len(base)):
        if speed[rank] > 0.0:
            total_speed += speed[rank]
            if base[rank] > high:
                high = base[rank]
    if total_speed <= 0.0:
        return 0.0
    high += work / total_speed

    def too_early(time: float) -> bool:
        done = 0.0
        for rank in range(len(base)):
            if speed[rank] > 0.0 and time > base[rank]:
                done += speed[rank] * (time - base[rank])
        return done < work

    return _bisect(low, high, too_early)[1]


def finish_times_of(work: Floats, base: Floats, speed: Floats, group: Ints) -> Floats:
    """The same for groups of ranks, each by itself ([groups]); `group`: number of each rank's."""
    # Sums in rank order: the same on every machine.
    total, speeds = np.bincount(group, work), np.bincount(group, speed)
    low, high = np.zeros(len(total)), np.zeros(len(total))
    np.maximum.at(high, group, np.where(speed > 0.0, base, 0.0))
    high += total / np.where(speeds > 0.0, speeds, 1.0)
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        done = np.bincount(group, speed * np.maximum(middle[group] - base, 0.0))
        low, high = np.where(done < total, middle, low), np.where(done < total, high, middle)
    return np.where(speeds > 0.0, high, 0.0)


def work_until(time: float, base: list[float], speed: list[float]) -> list[float]:
    """Work of every rank that stops at `time`; 0 where the base load is later or the speed is 0."""
    return [_work_of(rank, time, base, speed) for rank in range(len(base))]


def settle_levels(
    load: list[float], base: list[float], speed: list[float], finish: float, tolerance: float
) -> tuple[list[float], list[float]]:
    """Work that a rank which gives keeps at least, and that a rank which takes reaches, so that both sums agree.

    One of the two is the bound of the tolerance (what must move in any case), the other lies between the mean and
    its bound: nothing is moved that need not be.
    """
    upper, lower = finish * (1.0 + tolerance), finish * (1.0 - tolerance)
    shed = _above(load, work_until(upper, base, speed))
    need = _below(load, work_until(lower, base, speed))
    if shed >= need:
        _, high = _bisect(lower, finish, lambda time: _below(load, work_until(time, base, speed)) < shed)
        return work_until(upper, base, speed), work_until(high, base, speed)
    low, _ = _bisect(finish, upper, lambda time: _above(load, work_until(time, base, speed)) >= need)
    return work_until(low, base, speed), work_until(lower, base, speed)


def settle_units(
    load: list[float], base: list[float], speed: list[float], units: list[list[int]], upper: float
) -> tuple[list[float], list[float], list[float]]:
    """Levels to give and to take, and the most, where units of ranks above `upper` give what is above.

    Units that take end as early as that allows. Inside a unit that gives, the ranks with most go first, inside one that
    takes those with least: all ranks of a unit above (below) one time give (take).
    """
    ranks = len(load)
    give, take, most = [math.inf] * ranks, [0.0] * ranks, [0.0] * ranks
    work = [_sum_of(load, unit) for unit in units]
    at_upper = work_until(upper, base, speed)
    shed = 0.0
    for number, unit in enumerate(units):
        over = work[number] - _sum_of(at_upper, unit)
        if over > 0.0:
            shed += over

    def takes_too_little(time: float) -> bool:
        until = work_until(time, base, speed)
        room = 0.0
        for number, unit in enumerate(units):
            under = _sum_of(until, unit) - work[number]
            if under > 0.0:
                room += under
        return room < shed

    _, lower = _bisect(0.0, upper, takes_too_little)
    at_lower = work_until(lower, base, speed)
    for number, unit in enumerate(units):
        over, under = work[number] - _sum_of(at_upper, unit), _sum_of(at_lower, unit) - work[number]
        own = [[values[rank] for rank in unit] for values in (load, base, speed)]
        if over > 0.0:
            time = _when_above(over, upper, *own)
            for rank in unit:
                give[rank] = _work_of(rank, time, base, speed)
        elif under > 0.0:
            time = _when_below(under, lower, *own)
            for rank in unit:
                take[rank] = _work_of(rank, time, base, speed)
                most[rank] = max(take[rank], at_upper[rank])
    return give, take, most


def _when_above(over: float, earliest: float, load: list[float], base: list[float], speed: list[float]) -> float:
    """The time beyond which ranks have so much work."""
    latest = earliest
    for rank in range(len(load)):
        if speed[rank] > 0.0:
            latest = max(latest, base[rank] + load[rank] / speed[rank])
    return _bisect(earliest, latest, lambda time: _above(load, work_until(time, base, speed)) >= over)[0]


def _when_below(under: float, latest: float, load: list[float], base: list[float], speed: list[float]) -> float:
    """The time until which ranks have room for so much work."""
    return _bisect(0.0, latest, lambda time: _below(load, work_until(time, base, speed)) < under)[1]


def _bisect(low: float, high: float, too_early: Callable[[float], bool]) -> tuple[float, float]:
    """Two times so close that between them lies where `too_early` ends to hold."""
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        if too_early(middle):
            low = middle
        else:
            high = middle
    return low, high


def _work_of(rank: int, time: float, base: list[float], speed: list[float]) -> float:
    return speed[rank] * (time - base[rank]) if speed[rank] > 0.0 and time > base[rank] else 0.0


def _sum_of(values: list[float], ranks: list[int]) -> float:
    total = 0.0
    for rank in ranks:
        total += values[rank]
    return total


def _above(load: list[float], level: list[float]) -> float:
    total = 0.0
    for rank in range(len(load)):
        if load[rank] > level[rank]:
            total += load[rank] - level[rank]
    return total


def _below(load: list[float], level: list[float]) -> float:
    total = 0.0
    for rank in range(len(load)):
        if load[rank] < level[rank]:
            total += level[rank] - load[rank]
    return total
