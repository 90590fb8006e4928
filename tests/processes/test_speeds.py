"""Ranks of different speed, measured in place and as reserved servers; what each then gets, exactly.

How long a call takes is said by the test: what a clock says depends on who else uses the machine.
"""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import training
from pool import WorkerPool
from ports import free_port
from served import play

import deepspeed_cad
from deepspeed_cad.profiles import speed

BLOCK = {"granularity": 16, "tolerance": 0.05, "links": training.LINKS, "kernel": "torch_math"}
GROUPS = 4
"""Of the tiny model: its KV heads."""
LENGTHS = [[300], [40, 130, 9, 1, 120]]


def slowed(seconds: float) -> Any:
    """The call that is timed takes so long."""
    return mock.patch.object(speed, "time_call", lambda *given: SimpleNamespace(seconds=seconds))


def _train(rank: int, trainers: int, block: dict[str, Any]) -> dict[str, Any]:
    reference, model = training.tiny_llama(), training.tiny_llama()
    deepspeed_cad.apply(model, block).train()
    session = deepspeed_cad.current_session()
    for step in range(2):
        training.step_as_alone(model, reference, training.documents(LENGTHS[rank], seed=10 * step + rank))
    speeds = None if session.speeds is None else session.speeds.tolist()
    return {"speeds": speeds, "seconds": session.statistics.load.tolist(), "said": session.describe()}


def _in_place(rank: int, world: int, block: dict[str, Any], times: list[float]) -> dict[str, Any]:
    with slowed(times[rank]):
        return _train(rank, world, {**BLOCK, **block})


def _reserved(rank: int, world: int, port: int, block: dict[str, Any], times: list[float]) -> Any:
    with slowed(times[rank]):
        return play(rank, world, port, {**BLOCK, "servers": {"reserved": 1}, **block}, _train)


def _shares_are_by_speed(found: dict[str, Any]) -> None:
    """Loads are in time of each rank: equal, and together all pairs of both micro-batches."""
    seconds, speeds = np.array(found["seconds"]), np.array(found["speeds"])
    assert seconds.max() < 1.15 * seconds.min()
    pairs = 2 * GROUPS * sum(n * (n + 1) / 2 for own in LENGTHS for n in own)
    assert (seconds * speeds).sum() == pytest.approx(pairs)


def test_a_slow_rank_gets_less(workers: WorkerPool) -> None:
    first, second = workers.run(_in_place, 2, {"speeds": "measure"}, [1, 2])
    assert first["speeds"] == second["speeds"] and first["seconds"] == second["seconds"]
    assert first["speeds"] == pytest.approx([1.0, 0.5])
    _shares_are_by_speed(first)
    assert ", speeds " in first["said"]


def test_servers_and_trainers_of_different_speed(workers: WorkerPool) -> None:
    times = [1, 1, 2]
    first, second, served = workers.run(_reserved, 3, free_port(), {"speeds": "measure"}, times, joined=False)
    assert first == second | {"said": first["said"]} and served.code == 0 < served.micro_batches
    assert first["speeds"] == pytest.approx([times[0] / one for one in times])
    _shares_are_by_speed(first)
