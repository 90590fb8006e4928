"""A Hugging Face model with CAD against each document alone: losses and parameter gradients, fp64, real processes."""

from typing import Any

import pytest
import torch
import training
from pool import WorkerPool

import deepspeed_cad
from deepspeed_cad.exchange.failure.board import open_board
from deepspeed_cad.exchange.group import numbers_of

LENGTHS = {
    2: [[260], [40, 30, 9, 1, 50]], 3: [[130, 70], [], [31, 33, 5]], 4: [[300, 20], [64] * 3, [7] * 20, [1, 1, 120]],
}  # fmt: skip


def _train(rank: int, world: int, block: dict[str, Any], checkpoint: str | None, steps: int) -> dict[str, Any]:
    reference, model = training.tiny_llama(), training.tiny_llama()
    for _ in range(2):
        deepspeed_cad.apply(model, training.BLOCK | block)
    training.checkpointed(model, checkpoint).train()
    for step in range(steps):
        own = training.documents(LENGTHS[world][(rank + step) % world], seed=100 * step + rank)
        training.step_as_alone(model, reference, own)
    session = deepspeed_cad.current_session()
    counts, statistics = session.counts, session.statistics
    return training.figures() | {
        "exchanges": session.transport.exchanges, "waves": statistics.waves, "landing": statistics.landing_bytes,
        "calls": [counts.forwards, counts.backwards, counts.replays],
    }  # fmt: skip


def _even_and_not(rank: int, world: int, overlap: str) -> list[int]:
    """Exchanges of micro-batches of which only the second has anything to move."""
    reference, model = training.tiny_llama(), training.tiny_llama()
    training.checkpointed(deepspeed_cad.apply(model, training.BLOCK | {"overlap": overlap}), True)
    counts = []
    for lengths in ([70, 26], LENGTHS[world][rank], [96]):
        training.step_as_alone(model, reference, training.documents(lengths, seed=rank))
        counts.append(deepspeed_cad.current_session().transport.exchanges)
    return counts


@pytest.mark.parametrize(("overlap", "parts"), [("local_first", 1), ("interleave", 2)])
def test_nothing_is_exchanged_where_nothing_moves(workers: WorkerPool, overlap: str, parts: int) -> None:
    assert workers.run(_even_and_not, 2, overlap) == [[0, 8 * parts, 8 * parts]] * 2


@pytest.mark.parametrize(("overlap", "kib"), [("local_first", 150), ("interleave", 200)])
def test_the_same_in_waves_and_in_little_memory(workers: WorkerPool, overlap: str, kib: int) -> None:
    """As many waves as fit, by head groups and then by rows; what each rank needs at once stays below the limit."""
    plain, waves, less = (
        workers.run(_train, 3, {"overlap": overlap, **more}, "non-reentrant", 2)
        for more in ({}, {"waves": 3}, {"memory": kib / 2**20})
    )
    assert [r["exchanges"] for r in waves] == [3 * r["exchanges"] for r in plain]
    assert [r["sent"] for r in waves] == [r["sent"] for r in plain], "no byte travels twice"
    assert plain[0]["landing"] > 1.5 * kib * 2**10 and kib * 2**10 >= less[0]["landing"] > 0
    assert all(one["waves"] == less[0]["waves"] >= 4 * plain[0]["waves"] for one in less)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("overlap", ["local_first", "interleave"])
@pytest.mark.parametrize("checkpoint", ["reentrant", "non-reentrant"])
def test_checkpointing(workers: WorkerPool, checkpoint: str, overlap: str, recompute: bool) -> None:
    """Exact, and by default neither attention nor an exchange runs again."""
    calls = 4 if overlap == "interleave" else 2
    for one in workers.run(_train, 2, {"overlap": overlap, "recompute_attention": recompute}, checkpoint, 1):
        assert one["calls"] == [calls * (2 if recompute else 1), calls, 0 if recompute else calls]
        assert one["exchanges"] == calls * (6 if recompute else 4)


def _profiled(rank: int, world: int) -> dict[str, Any]:
    board = open_board(torch.distributed.group.WORLD, rank, world)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            assert [numbers_of(torch.distributed.group.WORLD, board, one) for one in range(300)][-1] == [299] * world
        return _train(rank, world, {}, "non-reentrant", 3)


def test_under_a_profiler(workers: WorkerPool) -> None:
    """It lets gloo's threads want the GIL, which whoever waits for them must not hold."""
    assert workers.run(_profiled, 2)[0]["after"] < 1.05
