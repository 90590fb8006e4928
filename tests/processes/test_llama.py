"""A Hugging Face model with CAD against each document alone: losses and parameter gradients, fp64, real processes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import training
from pool import WorkerPool
from torch.distributed.utils import _apply_to_tensors
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

import deepspeed_cad
from deepspeed_cad.attention.microbatch import MaskDescriptor
from deepspeed_cad.attention.setup import Modes

LENGTHS = {
    2: [[260], [40, 30, 9, 1, 50]],
    3: [[130, 70], [], [31, 33, 5]],
    4: [[300, 20], [64] * 3, [7] * 20, [1, 1, 120]],
}


def _train(rank: int, world: int, block: dict[str, Any], checkpoint: str | None, steps: int) -> dict[str, Any]:
    block = {"granularity": 16, "tolerance": 0.02, "links": training.LINKS, **block}
    reference = training.tiny_llama()
    model = training.tiny_llama()
    deepspeed_cad.apply(model, block)
    deepspeed_cad.apply(model, block)
    if checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": checkpoint == "reentrant"})
    model.train()
    session = deepspeed_cad.current_session()
    for step in range(steps):
        own = training.documents(LENGTHS[world][(rank + step) % world], seed=100 * step + rank)
        training.step_as_alone(model, reference, own)
    statistics = session.statistics
    return {
        "before": statistics.imbalance_before,
        "after": statistics.imbalance,
        "sent": session.transport.bytes_sent,
        "exchanges": session.transport.exchanges,
        "forwards": session.counts.forwards,
        "backwards": session.counts.backwards,
        "replays": session.counts.replays,
        "waves": statistics.waves,
        "landing": statistics.landing_bytes,
    }


@pytest.mark.parametrize(
    ("world", "overlap"),
    [(2, "none"), (3, "interleave"), (4, "local_first")],
)
def test_same_as_each_document_alone(workers: WorkerPool, world: int, overlap: str) -> None:
    results = workers.run(_train, world, {"overlap": overlap}, None, 2)
    assert len({(r["before"], r["after"]) for r in results}) == 1
    assert results[0]["before"] > 1.3
    assert results[0]["after"] < 1.05
    assert sum(r["sent"] for r in results) > 0


def _ddp(rank: int, world: int, overlap: str) -> int:
    reference, own = training.tiny_llama(), [training.documents(LENGTHS[2][one], seed=one) for one in range(world)]
    block = {"granularity": 16, "tolerance": 0.02, "links": training.LINKS, "overlap": overlap}
    wrapped = DistributedDataParallel(deepspeed_cad.apply(training.tiny_llama(), block))
    for micro_batch in range(3):
        with nullcontext() if micro_batch == 2 else wrapped.no_sync():
            training.loss_sum(wrapped, training.pack(own[rank])).backward()
    alone = [training.alone(reference, docs)[1] for docs in own]
    training.assert_gradients(
        wrapped.module, {name: sum(3 * one[name] / world for one in alone) for name in alone[0]}, 1e-9
    )
    return deepspeed_cad.current_session().transport.exchanges


@pytest.mark.parametrize(("overlap", "parts"), [("local_first", 1), ("interleave", 2)])
def test_data_parallel_wrapper_and_accumulation(workers: WorkerPool, overlap: str, parts: int) -> None:
    assert workers.run(_ddp, 2, overlap) == [3 * 2 * parts * 4] * 2


def test_wrappers_pass_the_descriptor_on_as_it_is() -> None:
    """FSDP's mixed precision and DDP rebuild containers of tensors among arguments; a descriptor is none."""
    descriptor = MaskDescriptor(None, 7, None, Modes())
    assert _apply_to_tensors(lambda x: x, {"attention_mask": descriptor})["attention_mask"] is descriptor
    assert tree_map(lambda x: x, [descriptor])[0] is descriptor


@pytest.mark.parametrize("overlap", ["local_first", "interleave"])
def test_the_same_in_waves(workers: WorkerPool, overlap: str) -> None:
    block = {"overlap": overlap, "waves": 3}
    plain, waves = (workers.run(_train, 3, one, "non-reentrant", 2) for one in ({"overlap": overlap}, block))
    assert [r["exchanges"] for r in waves] == [3 * r["exchanges"] for r in plain]
    assert [r["sent"] for r in waves] == [r["sent"] for r in plain], "no byte travels twice"


@pytest.mark.parametrize("overlap, kib", [("local_first", 150), ("interleave", 200)])
def test_the_same_in_little_memory(workers: WorkerPool, overlap: str, kib: int) -> None:
    """As many waves as fit, by head groups and then by rows; what each rank needs at once stays below the limit."""
    block = {"overlap": overlap}
    (plain, *_), (less, *others) = (
        workers.run(_train, 3, one, "non-reentrant", 2) for one in (block, {**block, "memory": kib / 2**20})
    )
    assert plain["landing"] > 1.5 * kib * 2**10 and kib * 2**10 >= less["landing"] > 0
    assert less["waves"] >= 4 * plain["waves"] and all(one["waves"] == less["waves"] for one in others)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("overlap", ["local_first", "interleave"])
@pytest.mark.parametrize("checkpoint", ["reentrant", "non-reentrant"])
def test_checkpointing(workers: WorkerPool, checkpoint: str, overlap: str, recompute: bool) -> None:
    """Exact, and by default neither attention nor an exchange runs again."""
    block = {"overlap": overlap, "recompute_attention": recompute}
    results = workers.run(_train, 2, block, checkpoint, 1)
    parts = 2 if overlap == "interleave" else 1
    calls = 2 * parts
    for r in results:
        assert r["backwards"] == calls
        assert r["forwards"] == calls * (2 if recompute else 1)
        assert r["replays"] == (0 if recompute else calls)
        assert r["exchanges"] == calls * (6 if recompute else 4)
