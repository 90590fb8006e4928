"""Waits and transfers of real ranks reach plans: the brake, and corrections of links."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import training
from pool import WorkerPool

import deepspeed_cad
from deepspeed_cad.ahead import plan as ahead
from deepspeed_cad.ahead.brake import FACTORS, WINDOW
from deepspeed_cad.exchange.transfers import Transfers
from deepspeed_cad.planner.plan import HeadShape
from deepspeed_cad.profiles import Profile, ShapeCost

LENGTHS = [[300], [40, 30]]


def _session(block: dict[str, Any]) -> tuple[Any, Any]:
    model = deepspeed_cad.apply(training.tiny_llama(torch.float32), {"granularity": 16, **block})
    return model, deepspeed_cad.current_session()


def _train(model: Any, rank: int, steps: int) -> None:
    for _ in range(steps):
        training.loss_sum(model, training.pack(training.documents(LENGTHS[rank], seed=rank))).backward()


def _brake(rank: int, world: int, path: str) -> dict[str, Any]:
    """Attention that costs next to nothing, over links that are said to be fast: waits eat the gain."""
    said: list[str] = []
    ahead.notice = said.append
    model, session = _session({"cost": path, "links": training.LINKS})
    levels, sent = [], []
    for _ in range((len(FACTORS) + 1) * WINDOW):
        _train(model, rank, 1)
        levels.append(session.traffic.brake.level)
        sent.append(session.transport.bytes_sent)
    return {"levels": levels, "sent": sent, "said": said}


@pytest.mark.slow
def test_waits_that_eat_the_gain_stop_moves(workers: WorkerPool, tmp_path: Any) -> None:
    path = tmp_path / "profile.json"
    Profile("these tests", "torch_math", (ShapeCost(HeadShape(8, 4, 8, 8, 4), pair=1e-10),)).save(path)
    first, second = workers.run(_brake, 2, str(path))
    assert first["levels"] == second["levels"], "all ranks brake at the same micro-batch"
    assert first["sent"][0] > 0 and first["levels"][0] == 0
    assert first["levels"][-1] >= 1
    assert first["sent"][-1] == first["sent"][-2], "nothing moves any more"
    assert len(first["said"]) == 1 and second["said"] == []
    assert "balance gains" in first["said"][0] and "plans move less for a while" in first["said"][0]


def _correct(rank: int, world: int) -> tuple[str, Any, Any]:
    model, session = _session({})
    # Every transfer counts, however small.
    session.transport.transfers = session.traffic._transfers = Transfers(rank, session.hosts.tolist(), 1.0, 1.0)
    start = session.traffic.now
    _train(model, rank, 7)
    return session.traffic.links.source, start, session.traffic.now


def test_transfers_correct_the_links_of_all_ranks(workers: WorkerPool) -> None:
    first, second = workers.run(_correct, 2)
    assert first == second
    source, start, now = first
    assert source == "measured, corrected" and 0 < now.inside < start.inside, "small transfers are slow ones"


def _deterministic(rank: int, world: int) -> tuple[str, Any]:
    """One rank turns deterministic algorithms on after CAD."""
    model, session = _session({})
    torch.use_deterministic_algorithms(rank == 1)
    try:
        _train(model, rank, 2)
        return str(session.traffic.links), session.traffic.now
    finally:
        torch.use_deterministic_algorithms(False)


def test_deterministic_ranks_plan_without_measured_links(workers: WorkerPool) -> None:
    first, second = workers.run(_deterministic, 2)
    assert first == second
    assert "of the profile" in first[0] and first[1] == (None, None, None)
