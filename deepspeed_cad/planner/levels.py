"""Levels: how much attention each rank should run.

In: total work, speeds, base loads, tolerance. Out: for each rank the least and the most work it may have, and the
levels that ranks which give and ranks which take should end at. Plain loops over floats, in rank order: the native
planner does the same operations in the same order, so both get the same numbers to the last bit.
"""

from __future__ import annotations

from deepspeed_cad.planner.constants import BISECTIONS


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
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        done = 0.0
        for rank in range(len(base)):
            if speed[rank] > 0.0 and middle > base[rank]:
                done += speed[rank] * (middle - base[rank])
        if done < work:
            low = middle
        else:
            high = middle
    return high


def work_until(time: float, base: list[float], speed: list[float]) -> list[float]:
    """Work of every rank that stops at `time`; 0 where the base load is later or the speed is 0."""
    return [
        speed[rank] * (time - base[rank]) if speed[rank] > 0.0 and time > base[rank] else 0.0
        for rank in range(len(base))
    ]


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
        low, high = lower, finish
        for _ in range(BISECTIONS):
            middle = 0.5 * (low + high)
            if _below(load, work_until(middle, base, speed)) < shed:
                low = middle
            else:
                high = middle
        return work_until(upper, base, speed), work_until(high, base, speed)
    low, high = finish, upper
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        if _above(load, work_until(middle, base, speed)) < need:
            high = middle
        else:
            low = middle
    return work_until(low, base, speed), work_until(lower, base, speed)


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
