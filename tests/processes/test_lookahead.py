"""Look-ahead: loaders are read one micro-batch ahead, and what a step communicates is counted."""

from itertools import chain, islice
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import training
from pool import WorkerError, WorkerPool

import deepspeed_cad
from deepspeed_cad.ahead.loader import LookAheadLoader
from deepspeed_cad.session import find_binding


def _documents(rank: int, step: int) -> list[torch.Tensor]:
    return training.documents([[120], [20, 30, 7]][(rank + step) % 2], seed=10 * step + rank)


COLLECTIVES = ("all_gather", "all_to_all_single", "all_reduce", "broadcast")


def _count(rank: int, world: int, overlap: str, checkpoint: bool, ahead: bool) -> dict[str, int]:
    model = deepspeed_cad.apply(training.tiny_llama(), {**training.BLOCK, "overlap": overlap})
    training.checkpointed(model, checkpoint).train()
    reference = training.tiny_llama()
    batches: Any = [training.pack(_documents(rank, step)) for step in range(4)]
    session, feed = deepspeed_cad.current_session(), find_binding(model).feed
    loader = LookAheadLoader(batches, feed) if ahead else batches
    counted: dict[str, int] = {}
    for step, batch in enumerate(loader):
        announced = feed.next_announced
        assert (announced.local.tokens if ahead else announced) == (batch["input_ids"].numel() if ahead else None)
        before = session.transport.exchanges
        if ahead:
            session.worker.run(lambda: None)  # what was announced is planned
        with mock.patch.multiple(dist, **{name: mock.Mock(wraps=getattr(dist, name)) for name in COLLECTIVES}):
            training.step_as_alone(model, reference, _documents(rank, step), batch=batch)
            counts = {name: getattr(dist, name).call_count for name in COLLECTIVES}
        session.worker.run(lambda: None)
        if step == 2:
            # Beside each exchange its number is gathered.
            exchanges = session.transport.exchanges - before
            counted = {**counts, "exchange": exchanges, "all_gather": counts["all_gather"] - exchanges}
    return {name: count for name, count in counted.items() if count}


FIELDS = 3 + 1 + 4 + 3
"""Q, K, V and O in the forward of a layer; Q, K, V, dO and their gradients in its backward. One collective each."""


@pytest.mark.parametrize("ahead, overlap, parts, checkpoint", [
    (False, "none", 1, False), (False, "interleave", 2, True), (True, "interleave", 2, False),
])  # fmt: skip
def test_collectives_of_a_step(workers: WorkerPool, ahead: bool, overlap: str, parts: int, checkpoint: bool) -> None:
    """Four exchanges per layer and nano-batch, of FIELDS in all, and three small gathers; nothing else. With look-ahead
    the forward finds its plan made: nothing is gathered in a step."""
    for counted in workers.run(_count, 2, overlap, checkpoint, ahead):
        exchanged = {"exchange": 2 * parts * 4, "all_to_all_single": 2 * parts * FIELDS}
        assert counted == exchanged | ({} if ahead else {"all_gather": 3})


def _passes_over(rank: int, world: int, first: int, drawn: int, ahead: int) -> None:
    """A loop that goes on from micro-batch `first`, as from a checkpoint, or draws several at once and skips one."""
    model = deepspeed_cad.apply(training.tiny_llama(), {**training.BLOCK, "look_ahead": ahead}).train()
    # Those of steps 0 and 3 have the same lengths.
    documents = [training.documents([20 * (step % 3) + 9, 90 * rank + 5], seed=10 * step + rank) for step in range(6)]
    session, rows = deepspeed_cad.current_session(), [training.pack(one) for one in documents]
    assert not session.find_binding(model).feed.read_ahead
    batches = islice(session.look_ahead(rows, model), first, None)
    waiting = list(islice(batches, drawn - 1))
    for step in range(first, 6):
        waiting += islice(batches, 1)
        batch = waiting.pop(0)
        if step == (2 if ahead else 4) and drawn > 1:  # nothing drawn later shows that this one is skipped
            continue
        training.step_as_alone(model, training.tiny_llama(), documents[step], batch=batch)
    assert session.statistics.micro_batches == 6 - first - (drawn > 1)
    for batch in session.look_ahead(rows, model):  # left, and the next is one that no loader announced
        training.loss_sum(model, batch).backward()
        break
    training.loss_sum(model, rows[3 * rank + 2]).backward()


@pytest.mark.parametrize("first, drawn, ahead", [(3, 1, 1), (0, 3, 1), (0, 3, 0)])
def test_loops_may_pass_over_batches_or_draw_several(workers: WorkerPool, first: int, drawn: int, ahead: int) -> None:
    workers.run(_passes_over, 2, first, drawn, ahead)


def _a_part_of_a_step(rank: int, world: int, passed: int, left_at: int) -> int:
    """Micro-batches trained in two epochs of three steps of two; a few are passed over first, or left at the end."""
    model = deepspeed_cad.apply(training.tiny_llama(), {**training.BLOCK, "documents": "keep"}).train()
    rows = [training.pack(training.documents([40], seed=10 * step + rank)) for step in range(6)]
    for _ in range(2):
        for i, batch in enumerate(deepspeed_cad.current_session().look_ahead(rows, model, accumulation=2)):
            if i == left_at:
                break
            if i >= passed:
                training.loss_sum(model, batch).backward()
    return deepspeed_cad.current_session().statistics.micro_batches


@pytest.mark.parametrize("passed, left_at, trained", [
    (2, 6, 8), (0, 4, 8), (6, 6, 0), (4, 6, 4), (1, 6, None), (3, 6, None), (0, 3, None), (0, 5, None),
])  # fmt: skip
def test_steps_are_trained_whole(workers: WorkerPool, passed: int, left_at: int, trained: int | None) -> None:
    if trained is not None:
        assert workers.run(_a_part_of_a_step, 2, passed, left_at) == [trained] * 2
        return
    with pytest.raises(WorkerError, match="only a part of a step is trained: micro-batch . of 2 comes after") as met:
        workers.run(_a_part_of_a_step, 2, passed, left_at)
    assert all(error is not None for error in met.value.errors)


def _draws_ahead(rank: int, world: int) -> None:
    """Over three epochs a loop holds one batch more than it trains; before, it looks at one, and trains another one."""
    model = deepspeed_cad.apply(training.tiny_llama(), training.BLOCK).train()
    documents = [training.documents([30 * step + 9, 40 * rank + 5], seed=10 * step + rank) for step in range(3)]
    loader = deepspeed_cad.current_session().look_ahead([training.pack(one) for one in documents], model)
    next(iter(loader))
    training.step_as_alone(model, training.tiny_llama(), documents[2])
    next(iter(loader))
    held: Any = None
    for pair in chain((one for _ in range(3) for one in zip(loader, documents)), [None]):
        held, trained = pair, held
        if trained is not None:
            training.step_as_alone(model, training.tiny_llama(), trained[1], batch=trained[0])


def test_a_loop_may_draw_ahead_over_epochs(workers: WorkerPool) -> None:
    workers.run(_draws_ahead, 2)
