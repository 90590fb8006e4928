"""Reserved servers in real processes, exact against each document alone (loops: test_loops.py): shares that fit what is
not attention, and waves in as little memory as was asked for. And ranks of different speed, in place too; how long
attention takes is said by the test there: what a clock says depends on who else uses the machine."""

from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import training
from landing import counted
from pool import WorkerPool
from ports import free_port
from served import Served, play, run

import deepspeed_cad
from deepspeed_cad.feedback import layer_times
from deepspeed_cad.kernels.interface import Sequences
from deepspeed_cad.kernels.torch_math import TorchMath
from deepspeed_cad.planner.plan import HeadShape
from deepspeed_cad.profiles import speed
from deepspeed_cad.profiles.profile import Profile, ShapeCost

UNEVEN = [[400], [40, 130, 9, 1, 120]]
"""A document of one trainer is the whole micro-batch: the cut lies inside."""
STEPS = 5


def _alternate(rank: int, trainers: int, block: dict[str, Any]) -> tuple[list[float], list[float], float]:
    """The load of the last step, how long linear layers take, and the part of their time for which servers wait."""
    reference, model = training.tiny_llama(num_hidden_layers=3), training.tiny_llama(num_hidden_layers=3)
    deepspeed_cad.apply(model, block).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    session = deepspeed_cad.current_session()
    assert session is not None and session.config.overlap_used == "interleave"
    for step in range(STEPS):
        training.step_as_alone(model, reference, training.documents(UNEVEN[rank], seed=100 * step + rank))
        load = session.take_statistics("test").load.tolist()
    assert session.find_binding(model).in_turn == ""
    # Both parts of every layer.
    assert session.counts.forwards == session.counts.backwards == 2 * 3 * STEPS
    return load, session.learned.layer_times.seconds(0).tolist(), session.statistics.servers_idle


def test_trainers_attend_nothing_where_linear_layers_take_longer(workers: WorkerPool, tmp_path: Path) -> None:
    """Servers attend one part while trainers run linear layers of the other; exact all the same."""
    path = tmp_path / "costs.json"
    Profile("test", "any", (ShapeCost(HeadShape(8, 4, 8, 8, 8), pair=1e-12),), unit="seconds").save(path)
    results, _ = run(workers, 2, 1, _alternate, cost=str(path))
    # Servers tell trainer 0 how long they attended.
    assert 0 < results[0][2] < 1 and results[1][2] == 0
    for load, linear, _ in results:
        assert linear == results[0][1] and min(linear) > 0
        assert sum(load[:2]) < 1e-3 * sum(load)


LENGTHS = [[420, 3, 39], [60, 1, 230, 37], []]


class Counted(NamedTuple):
    result: Any
    most: int
    """Bytes that were landing at once."""
    waves: tuple[int, int]
    """Fewest and most of any pass."""
    tried: int


def _play(rank: int, world: int, has: float, *args: Any) -> Counted:
    with counted(has) as landing:
        result = play(rank, world, *args)
    assert landing.now == 0
    return Counted(result, landing.most, landing.span, landing.tried)


def _run_within(
    workers: WorkerPool, trainers: int, servers: int, limit: int, checkpoint: bool, has: float = inf, **block: Any
) -> list[Counted]:
    """All ranks land no more bytes than this, cut alike, into waves."""
    given = {**training.BLOCK, "servers": {"reserved": servers}, **block}
    found = workers.run(_play, trainers + servers, has, free_port(), given, _train, checkpoint, joined=False)
    for one in found[trainers:]:
        served: Served = one.result
        assert served.code == 0 and served.held == 0 and served.opened <= 2, served
        assert (served.micro_batches > 0) == (one.waves[0] > 0)
    assert all(0 < one.most <= limit for one in found), found
    assert len({(one.waves, one.tried) for one in found}) == 1 and found[0].waves[1] >= 3, found
    return found


def _train(rank: int, trainers: int, block: dict[str, Any], checkpoint: bool) -> int:
    """Most bytes that landed at once, as statistics say it, of steps that are as each document alone."""
    reference, model = training.tiny_llama(), training.tiny_llama()
    training.checkpointed(deepspeed_cad.apply(model, block).train(), checkpoint)
    for step in range(2):
        training.step_as_alone(model, reference, training.documents(LENGTHS[(rank + step) % 3], seed=rank))
    return deepspeed_cad.current_session().statistics.landing_bytes


@pytest.mark.parametrize("trainers, servers, kib, checkpoint, block", [
    (2, 1, 510, False, {"overlap": "interleave"}),
    (1, 2, 260, False, {"overlap": "local_first"}),
    pytest.param(1, 2, 620, True, {"overlap": "interleave"}, marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_exact_within_the_limit(
    workers: WorkerPool, trainers: int, servers: int, kib: int, checkpoint: bool, block: dict[str, Any]
) -> None:
    """Head groups in waves of their own, and blocks of their rows."""
    found = _run_within(workers, trainers, servers, kib * 1024, checkpoint, memory=kib / 2**20, **block)
    assert all(0 < one.result <= kib * 1024 for one in found[:trainers])


def test_waves_become_smaller_where_a_rank_lacks_memory(workers: WorkerPool) -> None:
    """Nothing is asked for, and not all is there: trainers cut again, servers hear of it and cut alike."""
    has = 330 * 1024
    found = _run_within(workers, 2, 1, has, False, has, overlap="local_first")
    assert found[0].tried > 2, "more often than there are plans"


TIMED = {"granularity": 16, "tolerance": 0.05, "links": training.LINKS, "kernel": "torch_math"}
GROUPS = 4  # KV heads of the tiny model
OF_TWO = [[300], [40, 130, 9, 1, 120]]
PAIRS = GROUPS * sum(n * (n + 1) / 2 for own in OF_TWO for n in own)
SECONDS = Profile("test", "test", (ShapeCost(HeadShape(8, GROUPS, 8, 8, 8), pair=1.0),), unit="seconds")


def _timed(rank: int, trainers: int, block: dict[str, Any], cost: Profile | None = None, steps: int = 2) -> list[Any]:
    """Load and speeds with which each micro-batch was planned."""
    reference, model = training.tiny_llama(), training.tiny_llama()
    deepspeed_cad.apply(model, block).train()
    session, found = deepspeed_cad.current_session(), []
    session.plans.cost = cost or session.plans.cost
    for step in range(steps):
        training.step_as_alone(model, reference, training.documents(OF_TWO[rank], seed=10 * step + rank))
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
        return _timed(rank, world, TIMED, SECONDS, 12)


def _reserved(rank: int, world: int, port: int, times: list[float]) -> Any:
    block = {**TIMED, "servers": {"reserved": 1}, "speeds": "measure"}
    with mock.patch.object(speed, "time_call", lambda *given: SimpleNamespace(seconds=times[rank])):
        return play(rank, world, port, block, _timed)


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
