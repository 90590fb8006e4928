"""Ranks that are only slow are waited for."""

import time
from typing import Any
from unittest import mock

import torch
import training
from pool import WorkerPool

import deepspeed_cad
from deepspeed_cad.ahead import worker
from deepspeed_cad.exchange.failure import patience

BLOCK = training.BLOCK | {"timeout_s": 300.0}
LENGTHS = [[120], [20, 30, 7], [64, 40], [90, 5, 31]]


def _documents(rank: int, index: int) -> list[torch.Tensor]:
    return training.documents(LENGTHS[(rank + index) % 4], seed=10 * index + rank)


def _take_turns_to_be_slow(rank: int, world: int) -> tuple[int, int]:
    """Each rank in its turn plans, computes and reads until the other one has looked at the board some times.

    Gives how often this rank told that it is blocked, and how often it asked from an exchange whether others are.
    """
    model, reference = deepspeed_cad.apply(training.tiny_llama(), BLOCK).train(), training.tiny_llama()
    session = deepspeed_cad.current_session()
    board, store = session.liveness, torch.distributed.distributed_c10d._get_default_store()
    block, standstill, plan_tick = board.block, board._standstill, session.plans.plan_tick

    def is_slow(*ways: str) -> None:
        """Until the other one has looked."""

        def looks() -> int:
            return sum(store.add(f"{way}/{1 - rank}", 0) for way in ways)

        enough = looks() + 6
        while looks() < enough:
            time.sleep(0.01)

    def batches() -> Any:
        for index in range(10):
            if index == 8 + rank:
                is_slow("told", "asked")
            yield training.pack(_documents(rank, index))

    def slow_plan(*given: Any, **named: Any) -> Any:
        if session.plans.turn == 3 + rank:
            is_slow("told")
        return plan_tick(*given, **named)

    board.block = lambda *given: (store.add(f"told/{rank}", 1), block(*given))
    board._standstill = lambda exchange: (exchange and store.add(f"asked/{rank}", 1), standstill(exchange))[1]
    tell, look = mock.patch.object(worker, "TELL_S", 0.02), mock.patch.object(patience, "LOOK_S", 0.03)
    with tell, look, mock.patch.object(session.plans, "plan_tick", slow_plan):
        for i, batch in enumerate(session.look_ahead(batches(), model)):
            if i == 8:
                with torch.no_grad():
                    training.loss_sum(model, training.pack(_documents(rank, 9)))
            loss = training.loss_sum(model, batch)
            if i == 5 + rank:
                is_slow("asked")
            loss.backward()
            assert abs(float(loss.detach()) - training.alone(reference, _documents(rank, i))[0]) < 1e-8, (rank, i)
    return store.add(f"told/{rank}", 0), store.add(f"asked/{rank}", 0)


def test_ranks_that_are_only_slow_are_waited_for(workers: WorkerPool) -> None:
    ranks = workers.run(_take_turns_to_be_slow, 2)
    assert all(told > 5 for told, _ in ranks) and all(asked > 5 for _, asked in ranks), ranks
