"""Pipelines: when the stages of a step are done, by one forward and one backward in turn (1F1B).

In: seconds of the forward and backward of each micro-batch at one stage; stages are equal, but for what the last one
does besides. Out: seconds of the step.
CAD's own schedule, lockstep rounds, is in `modes_cad.py`, because its stages share their attention.
"""

from __future__ import annotations

import numpy as np

from deepspeed_cad.forecast.attention_seconds import Floats


def one_forward_one_backward(forward: Floats, backward: Floats, stages: int, last: Floats | float = 0.0) -> Floats:
    """[pipelines]: seconds of a step; `forward` and `backward` are [micro-batches, pipelines], of one stage.

    `last`: the same shape, what the last stage does before each backward: head and loss.
    """
    count, pipelines = forward.shape
    backwards = [backward] * (stages - 1) + [backward + last]
    done = {"F": np.zeros((stages, count, pipelines)), "B": np.zeros((stages, count, pipelines))}
    free = np.zeros((stages, pipelines))
    queues = [_order(stage, stages, count) for stage in range(stages)]
    position = [0] * stages
    ready = {("F", 0, m) for m in range(count)}
    remaining = 2 * count * stages
    while remaining:
        for stage in range(stages):
            while position[stage] < len(queues[stage]):
                kind, m = queues[stage][position[stage]]
                if (kind, stage, m) not in ready:
                    break
                if kind == "F":
                    before = done["F"][stage - 1, m] if stage else 0.0
                    free[stage] = np.maximum(free[stage], before) + forward[m]
                    ready.add(("F", stage + 1, m) if stage + 1 < stages else ("B", stage, m))
                else:
                    before = done["B"][stage + 1, m] if stage + 1 < stages else done["F"][stage, m]
                    free[stage] = np.maximum(free[stage], before) + backwards[stage][m]
                    ready.add(("B", stage - 1, m))
                done[kind][stage, m] = free[stage]
                position[stage] += 1
                remaining -= 1
    return np.asarray(free.max(0))


def _order(stage: int, stages: int, count: int) -> list[tuple[str, int]]:
    """What a stage runs: forwards until the pipeline is full, then one backward and one forward in turn."""
    early = min(stages - stage, count)
    order = [("F", m) for m in range(early)]
    for m in range(count):
        order.append(("B", m))
        if early + m < count:
            order.append(("F", early + m))
    return order
