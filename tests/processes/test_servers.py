"""Reserved servers in real processes, exact against each document alone (loops: test_loops.py): shares that fit what is
not attention, and waves in as little memory as was asked for."""

from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import training
from landing import counted
from pool import WorkerPool
from ports import free_port
from served import Served, play, run

import deepspeed_cad
from deepspeed_cad.planner.plan import HeadShape
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
