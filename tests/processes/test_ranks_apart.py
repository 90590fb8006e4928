"""Ranks whose loops go apart train what they should, or every rank stops with an error that says where each one is."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import training
from pool import WorkerPool

import deepspeed_cad

BLOCK = {"granularity": 16, "tolerance": 0.02, "timeout_s": 300.0, "links": training.LINKS}
LENGTHS = [[120], [20, 30, 7], [64, 40], [90, 5, 31]]


def _documents(rank: int, index: int) -> list[torch.Tensor]:
    return training.documents(LENGTHS[(rank + index) % 4], seed=10 * index + rank)


def _loader(rank: int, model: torch.nn.Module, count: int, accumulation: int = 1) -> Any:
    batches = [training.pack(_documents(rank, index)) | {"index": index} for index in range(count)]
    return deepspeed_cad.current_session().look_ahead(batches, model, accumulation=accumulation)


def _model(block: dict[str, Any] = BLOCK, **changes: Any) -> torch.nn.Module:
    return deepspeed_cad.apply(training.tiny_llama(**changes), block).train()


def _step(
    model: torch.nn.Module,
    reference: torch.nn.Module,
    rank: int,
    batch: dict[str, Any],
    between: Callable[[], None] = lambda: None,
) -> None:
    """Train a micro-batch, doing something between forward and backward; its loss is that of its documents alone."""
    index = batch.pop("index")
    loss = training.loss_sum(model, batch)
    between()
    loss.backward()
    expected, _ = training.alone(reference, _documents(rank, index))
    assert abs(float(loss.detach()) - expected) < 1e-8, (rank, index)
    batch["index"] = index


# Right


def _stop_together(rank: int, world: int, how: str, accumulation: int, stop: int) -> int:
    """Loaders of 3, 4, 3, … batches; every rank trains `stop` of them in each of three epochs."""
    model, reference = _model(), training.tiny_llama()
    loader = _loader(rank, model, 3 + rank % 2, accumulation)
    trained = 0
    for _ in range(3):
        if how == "islice":
            for batch in itertools.islice(loader, stop):
                _step(model, reference, rank, batch)
                trained += 1
            continue
        for i, batch in enumerate(loader):
            if i == stop:
                break
            _step(model, reference, rank, batch)
            trained += 1
    return trained


@pytest.mark.parametrize(
    ("how", "accumulation", "stop"),
    [("break", 1, 3), ("islice", 2, 3), ("break", 2, 2), ("islice", 3, 3), ("break", 4, 3), ("islice", 1, 2)],
)
def test_loaders_of_unequal_lengths(workers: WorkerPool, how: str, accumulation: int, stop: int) -> None:
    assert workers.run(_stop_together, 2, how, accumulation, stop) == [3 * stop] * 2


def _take_turns_to_be_slow(rank: int, world: int, ahead: bool) -> tuple[int, int]:
    """Each rank in its turn plans, computes and reads until the other one has looked at the board some times.

    Gives how often this rank told that it is blocked, and how often it asked from an exchange whether others are.
    """
    from deepspeed_cad.ahead import worker
    from deepspeed_cad.exchange.failure import patience

    model, reference = _model(), training.tiny_llama()
    session, before = deepspeed_cad.current_session(), (worker.TELL_S, patience.LOOK_S)
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
            yield training.pack(_documents(rank, index)) | {"index": index}

    def slow_plan(*given: Any, **named: Any) -> Any:
        if session.plans.turn == 3 + rank:
            is_slow("told")
        return plan_tick(*given, **named)

    board.block = lambda *given: (store.add(f"told/{rank}", 1), block(*given))
    board._standstill = lambda exchange: (exchange and store.add(f"asked/{rank}", 1), standstill(exchange))[1]
    session.plans.plan_tick = slow_plan
    worker.TELL_S, patience.LOOK_S = 0.02, 0.03
    try:
        for i, batch in enumerate(session.look_ahead(batches(), model) if ahead else batches()):
            if i == 8:
                with torch.no_grad():
                    training.loss_sum(model, training.pack(_documents(rank, 9)))
            _step(model, reference, rank, batch, (lambda: is_slow("asked")) if i == 5 + rank else lambda: None)
    finally:
        worker.TELL_S, patience.LOOK_S = before
        session.plans.plan_tick = plan_tick
    return store.add(f"told/{rank}", 0), store.add(f"asked/{rank}", 0)


@pytest.mark.parametrize(
    "ahead", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["look-ahead", "at the forward"]
)
def test_ranks_that_are_only_slow_are_waited_for(workers: WorkerPool, ahead: bool) -> None:
    ranks = workers.run(_take_turns_to_be_slow, 2, ahead)
    assert all(told > 5 for told, _ in ranks) and all(asked > 5 for _, asked in ranks), ranks


# One error on every rank


def _look_alone(rank: int, world: int) -> None:
    """Rank 1 does a forward without gradients after its last batch but one was announced."""
    model, reference = _model({**BLOCK, "forward_only": "balanced"}), training.tiny_llama()
    for i, batch in enumerate(_loader(rank, model, 3)):
        if rank == 1 and i == 2:
            with torch.no_grad():
                training.loss_sum(model, training.pack(_documents(rank, 9)))
        _step(model, reference, rank, batch)


def _train_all(rank: int, world: int) -> None:
    """Rank 1 has a fourth batch and trains it; rank 0 begins the next epoch."""
    model, reference = _model(), training.tiny_llama()
    for _ in range(2):
        for batch in _loader(rank, model, 3 + rank):
            _step(model, reference, rank, batch)


def _break_alone(rank: int, world: int) -> None:
    """Rank 0 leaves its loop after two batches."""
    model, reference = _model(), training.tiny_llama()
    loader = _loader(rank, model, 5)
    for _ in range(2):
        for i, batch in enumerate(loader):
            if rank == 0 and i == 2:
                break
            _step(model, reference, rank, batch)


def _catch(rank: int, world: int, where: str, ahead: bool = True) -> None:
    """Rank 1 meets an exception in its third batch, catches it and goes on with the next."""
    model, reference = _model(), training.tiny_llama()
    failing = model.model.layers[1].mlp

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("planted")

    plain = [training.pack(_documents(rank, index)) | {"index": index} for index in range(6)]
    for i, batch in enumerate(_loader(rank, model, 6) if ahead else plain):
        try:
            handle = None
            if rank == 1 and i == 2:
                if where == "in the loss":
                    training.loss_sum(model, {name: value for name, value in batch.items() if name != "index"})
                    fail()
                handle = failing.register_forward_hook(fail)
                if where == "in the backward":
                    handle.remove()
                    handle = failing.register_full_backward_hook(fail)
            _step(model, reference, rank, batch)
        except torch.OutOfMemoryError:
            assert handle is not None or where == "in the loss"
        finally:
            if handle is not None:
                handle.remove()


def _loader_raises(rank: int, world: int) -> None:
    """Rank 1's data cannot be read at its third batch: the two before it are trained first."""
    model, reference = _model(), training.tiny_llama()

    def batches() -> Any:
        for index in range(5):
            if rank == 1 and index == 2:
                raise ValueError("a torn file")
            yield training.pack(_documents(rank, index)) | {"index": index}

    trained = 0
    try:
        for batch in deepspeed_cad.current_session().look_ahead(batches(), model):
            _step(model, reference, rank, batch)
            trained += 1
    except (ValueError, deepspeed_cad.CADError):
        assert trained == 2
        raise


def _nothing(rank: int, world: int) -> None:
    """Starts the processes, which is not what is timed. A rank that ended before all are connected would break it."""
    torch.distributed.barrier()


AT_THE_NEXT = ["rank 0 ", "backward of micro-batch 2", "rank 1 waits for", "lengths at the forward number 3"]


@pytest.mark.parametrize(
    ("function", "args", "words"),
    [
        (_train_all, (), ["loader of rank 0 ended after 3", "rank 1 trains micro-batch 3 of epoch 1"]),
        (_break_alone, (), ["rank 0 left its loop before micro-batch 2", "break"]),
        (_catch, ("in the forward",), ["rank 1", "forward of micro-batch 2", "exception"]),
        # Those who wait in an exchange, and the one that waits for them elsewhere, name both.
        (_look_alone, (), ["rank 0 ", "forward of micro-batch 2, layer 0", "forward without backward number 0"]),
        pytest.param(_catch, ("in the backward", False), AT_THE_NEXT, marks=pytest.mark.slow),
        pytest.param(_catch, ("in the loss", False), AT_THE_NEXT, marks=pytest.mark.slow),
        pytest.param(_loader_raises, (), ["rank 1", "a torn file"], marks=pytest.mark.slow),
    ],
)
def test_every_rank_stops(workers: WorkerPool, function: Any, args: tuple[Any, ...], words: list[str]) -> None:
    workers.run(_nothing, 2)
    # What a rank left unfinished would be waited for in the next case of its process.
    errors, _ = workers.try_run(function, 2, *args, grace=60.0, once=True)
    for rank, error in enumerate(errors):
        assert error is not None, rank
        assert error[0] in ("CADPeerError", "CADDataError", "EpochOverError", "ValueError"), error
        for word in words:
            assert error[0] == "ValueError" or word in error[1], (rank, error[1])
