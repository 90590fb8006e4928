"""Ticks of a pipeline in waves: gradients as in one process, in as little memory as was asked for, and one error on all
ranks where there is too little."""

from __future__ import annotations

from typing import Any

import pipelines
import pytest
import torch
import training
from landing import counted
from pool import WorkerPool
from test_pipeline import BLOCK, _gradients, _in_one_process

COUNT = 3
"""Micro-batches."""


def _train(rank: int, world: int, stages: int, has: float, block: dict[str, Any]) -> dict[str, Any]:
    import deepspeed_cad
    from deepspeed_cad.errors import CADError
    from deepspeed_cad.session import close_session

    pipelines.start()
    try:
        with counted(has) as landing:
            _, own = _gradients(stages, COUNT, {**BLOCK, "links": training.LINKS, **block})
    except CADError as error:
        return {"error": str(error), "most": landing.most}
    session = deepspeed_cad.current_session()
    assert session is not None and landing.now == 0
    bytes_ = session.statistics.landing_bytes
    close_session()
    alone = _in_one_process(world // stages, COUNT)
    for name, gradient in own.items():
        torch.testing.assert_close(gradient, alone[name], atol=1e-10, rtol=0)
    return {"most": landing.most, "waves": landing.span, "tried": landing.tried, "landing": bytes_}


def _kib(size: float) -> float:
    return size / 2**20


@pytest.mark.parametrize(
    ("stages", "world", "kib", "block"),
    [
        (2, 2, 120, {}),
        pytest.param(2, 4, 10000, {"waves": 3}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_exact_within_the_limit(
    workers: WorkerPool, stages: int, world: int, kib: float, block: dict[str, Any]
) -> None:
    found = workers.run(_train, world, stages, float("inf"), {"memory": _kib(kib), **block}, timeout=120.0)
    assert len({(one["waves"], one["tried"]) for one in found}) == 1
    assert found[0]["waves"][1] >= 3 and found[0]["waves"][0] >= block.get("waves", 1)
    assert all(0 < one["most"] <= kib * 1024 and 0 < one["landing"] <= kib * 1024 for one in found), found


@pytest.mark.slow
def test_waves_become_smaller_where_a_rank_lacks_memory(workers: WorkerPool) -> None:
    has = 130 * 1024
    found = workers.run(_train, 2, 2, has, {}, timeout=120.0)
    assert len({(one["waves"], one["tried"]) for one in found}) == 1 and found[0]["waves"][1] >= 3
    assert found[0]["tried"] > 16 and all(0 < one["most"] <= has for one in found), found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("has", "block", "says"),
    [
        (float("inf"), {"memory": 1e-6}, "does not fit: cut into the smallest waves, what lands at rank"),
        (0, {}, "3 are free. Smaller waves do not help: the attention that ranks exchange does not fit"),
    ],
    ids=["a limit that is too small", "no memory"],
)
def test_too_little_is_one_error_on_all_ranks(
    fresh_workers: WorkerPool, has: float, block: dict[str, Any], says: str
) -> None:
    first, *others = fresh_workers.run(_train, 4, 2, has, block, timeout=120.0)
    assert says in first["error"] and '"memory" to at least' in first["error"] and first["most"] == 0
    assert all(one == first for one in others)
