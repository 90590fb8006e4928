"""Transfers of real ranks reach plans, as corrections of links."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import training
from pool import WorkerPool

import deepspeed_cad
from deepspeed_cad.exchange.links import Links
from deepspeed_cad.exchange.waits import Transfers

LENGTHS = [[300], [40, 30]]


def _session(block: dict[str, Any]) -> tuple[Any, Any]:
    model = deepspeed_cad.apply(training.tiny_llama(torch.float32), {"granularity": 16, **block})
    return model, deepspeed_cad.current_session()


def _train(model: Any, rank: int, steps: int) -> None:
    for _ in range(steps):
        training.loss_sum(model, training.pack(training.documents(LENGTHS[rank], seed=rank))).backward()


def _correct(rank: int, world: int) -> tuple[str, Any, Any]:
    with mock.patch("deepspeed_cad.exchange.probe.measure_links", lambda *given: Links(1e12, None)):
        model, session = _session({})
    # Every transfer counts, however small.
    session.transport.transfers = session.learned.links._transfers = Transfers(
        rank, session.plans.crew.hosts.tolist(), 1.0, 1.0
    )
    start = session.learned.links.now
    _train(model, rank, 7)
    return session.learned.links.links.source, start, session.learned.links.now


def test_transfers_correct_the_links_of_all_ranks(workers: WorkerPool) -> None:
    first, second = workers.run(_correct, 2)
    assert first == second
    source, start, now = first
    assert source == "measured, corrected" and 0 < now.inside < start.inside, "small transfers are slow ones"
