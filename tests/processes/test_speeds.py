"""Ranks of different speed, learned in place and measured where servers are reserved; what each then gets, exactly. How
long attention takes is said by the test: what a clock says depends on who else uses the machine."""

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
from deepspeed_cad.feedback import layer_times
from deepspeed_cad.kernels.interface import Sequences
from deepspeed_cad.kernels.torch_math import TorchMath
from deepspeed_cad.planner import HeadShape
from deepspeed_cad.profiles import speed
from deepspeed_cad.profiles.profile import Profile, ShapeCost

BLOCK = {"granularity": 16, "tolerance": 0.05, "links": training.LINKS, "kernel": "torch_math"}
GROUPS = 4  # KV heads of the tiny model
LENGTHS = [[300], [40, 130, 9, 1, 120]]
PAIRS = GROUPS * sum(n * (n + 1) / 2 for own in LENGTHS for n in own)
SECONDS = Profile("test", "test", (ShapeCost(HeadShape(8, GROUPS, 8, 8, 8), pair=1.0),), unit="seconds")


def _train(rank: int, trainers: int, block: dict[str, Any], cost: Profile | None = None, steps: int = 2) -> list[Any]:
    """Load and speeds with which each micro-batch was planned."""
    reference, model = training.tiny_llama(), training.tiny_llama()
    deepspeed_cad.apply(model, block).train()
    session, found = deepspeed_cad.current_session(), []
    session.plans.cost = cost or session.plans.cost
    for step in range(steps):
        training.step_as_alone(model, reference, training.documents(LENGTHS[rank], seed=10 * step + rank))
        planned = session.plans.learned_speeds(0) if cost else session.speeds
        found.append((session.take_statistics("test").load.tolist(), planned.tolist()))
    return found


def _in_place(rank: int, world: int, slow: list[int]) -> list[Any]:
    """Where a pair takes a second, so that waits are nothing, by a clock that only attention moves."""
    clock, kernel = SimpleNamespace(now=0.0), {name: getattr(TorchMath, name) for name in ("forward", "backward")}

    def timed(name: str, of_both: float) -> Any:
        def run(self: Any, *given: Any, **more: Any) -> Any:
            sequences = next(one for one in given if isinstance(one, Sequences))
            rows, keys = np.diff(sequences.host_q), np.diff(sequences.host_k)
            heads = given[1 + (name == "backward")].shape[1]
            clock.now += float((rows * (2 * keys - rows + 1) / 2).sum()) * heads * of_both * slow[rank]
            return kernel[name](self, *given, **more)

        return run

    with (
        mock.patch.object(layer_times, "time", SimpleNamespace(perf_counter=lambda: clock.now)),
        mock.patch.multiple(TorchMath, forward=timed("forward", 0.25), backward=timed("backward", 0.75)),
    ):
        return _train(rank, world, BLOCK, SECONDS, 12)


def _reserved(rank: int, world: int, port: int, times: list[float]) -> Any:
    block = {**BLOCK, "servers": {"reserved": 1}, "speeds": "measure"}
    with mock.patch.object(speed, "time_call", lambda *given: SimpleNamespace(seconds=times[rank])):
        return play(rank, world, port, block, _train)


def _shares_are_by_speed(found: list[Any], within: float) -> None:
    """Loads are in time of each rank: equal, and together all pairs of a micro-batch."""
    for load, speeds in (map(np.array, one) for one in found):
        assert load.max() < within * load.min() and (load * speeds).sum() == pytest.approx(PAIRS)


def test_a_slow_rank_is_found_while_it_trains_and_gets_less(workers: WorkerPool) -> None:
    first, second = workers.run(_in_place, 2, [1, 2])
    assert first == second and first[0][1] == [1.0, 1.0] and first[-1][1] == pytest.approx([0.97, 0.55], rel=0.05)
    _shares_are_by_speed(first, 1.08)


def test_servers_and_trainers_of_different_speed(workers: WorkerPool) -> None:
    times = [1, 1, 2]
    first, second, served = workers.run(_reserved, 3, free_port(), times, joined=False)
    assert first == second and served.code == 0 < served.micro_batches
    assert first[0][1] == pytest.approx([times[0] / one for one in times])
    _shares_are_by_speed(first, 1.15)
