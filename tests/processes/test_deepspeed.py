"""The JSON alone turns CAD on: DeepSpeed engines with and without the block give the same losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import training
from engines import engine_config, import_deepspeed, train_engine
from pool import WorkerPool
from trainers import BLOCK, STEPS, assert_same, assert_same_and_balanced, step_entry, without_and_with

import deepspeed_cad

WORLD = 3

LENGTHS = [[220], [40, 30, 9, 1, 50], [100, 100], [64, 3, 90]]


def _train(
    cad: bool, rank: int, config: dict[str, Any], checkpoint: str | None, block: dict[str, Any] = BLOCK
) -> tuple[list[dict[str, Any]], Any]:
    """Entries of the log; with CAD also how often attention ran, and why parts alternate inside layers."""
    rows = (
        training.documents(LENGTHS[(rank + step) % len(LENGTHS)], seed=100 * step + rank)
        for step in range(STEPS * config["gradient_accumulation_steps"])
    )
    found = train_engine({**config, "cad": block} if cad else config, checkpoint, rows, step_entry)
    if not cad:
        return found, None
    session = deepspeed_cad.current_session()
    (reason,) = (binding.in_turn for binding in session.bindings.values())
    return found, (session.counts.forwards, session.counts.backwards, session.counts.replays, reason)


def _compare(rank: int, world: int, cases: list[tuple[str, Any, Any]], block: dict[str, Any] = BLOCK) -> dict[str, Any]:
    import_deepspeed()
    return {name: without_and_with(_train, rank, *case, block) for name, *case in cases}


CASES: list[tuple[str, dict[str, Any], str | None]] = [
    ("ZeRO-0", engine_config(0), None),
    ("ZeRO-1, accumulation", engine_config(1, gradient_accumulation_steps=2), None),
    ("ZeRO-2, reentrant", engine_config(2), "reentrant"),
    ("ZeRO-3, non-reentrant", engine_config(3), "non-reentrant"),
    ("ZeRO-3, reentrant, offload", engine_config(3, zero_optimization={
        "stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"},
        "stage3_param_persistence_threshold": 0,
    }, zero_force_ds_cpu_optimizer=False), "reentrant"),
]  # fmt: skip


@pytest.mark.slow
def test_zero_stages(fresh_workers: WorkerPool) -> None:
    """Every stage, both checkpoint modes and offload: the same losses, and attention is balanced."""
    for found in fresh_workers.run(_compare, WORLD, CASES, timeout=240.0):
        for name, ((plain, _), (cad, counts)) in found.items():
            assert_same_and_balanced(name, plain, cad, losses=STEPS * (2 if "accumulation" in name else 1))
            assert counts[0] == counts[1], (name, counts)
            assert counts[2] == (counts[0] if "reentrant" in name else 0), (name, counts)


INTERLEAVED: list[tuple[str, dict[str, Any], str | None]] = [
    ("ZeRO-0", engine_config(0), "non-reentrant"),
    ("ZeRO-2, overlapped, accumulation", engine_config(2, gradient_accumulation_steps=2, zero_optimization={
        "stage": 2, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": 5000,
    }), None),
    ("ZeRO-3, non-reentrant", engine_config(3), "non-reentrant"),
]  # fmt: skip


@pytest.mark.slow
def test_zero_stages_interleaved(fresh_workers: WorkerPool) -> None:
    """Nano-batches alternate over the decoder, but inside layers where ZeRO-3 shards parameters."""
    block = {**BLOCK, "overlap": "interleave"}
    for found in fresh_workers.run(_compare, 2, INTERLEAVED, block, timeout=240.0):
        for name, ((plain, _), (cad, (*counts, reason))) in found.items():
            accumulation = 2 if "accumulation" in name else 1
            assert_same([entry["loss"] for entry in cad], [entry["loss"] for entry in plain])
            assert counts[0] == counts[1] == STEPS * accumulation * 2 * 2, (name, counts)
            assert ("ZeRO-3 shards" in reason) == ("ZeRO-3" in name), (name, reason)


def _without_optimizer(rank: int, world: int) -> None:
    """As TRL makes the engine of a reference model: with the JSON of the policy, less its optimizer."""
    deepspeed = import_deepspeed()
    config = {name: value for name, value in engine_config(0).items() if name != "optimizer"}
    model = training.sdpa_llama()
    engine, *_ = deepspeed.initialize(model=model, config={**config, "cad": BLOCK})
    batch = training.pack(training.documents(LENGTHS[rank], seed=rank))
    with torch.no_grad():
        before = engine(**batch).loss
    assert model.config._attn_implementation == "sdpa" and deepspeed_cad.current_session() is None
    trained = engine(**batch).loss
    assert model.config._attn_implementation == "cad"
    assert deepspeed_cad.current_session().statistics.micro_batches == 1
    assert abs(float(before - trained.detach())) < 1e-5


def _that_only_looks(rank: int, world: int) -> None:
    """A process for log-probabilities of a reference, and then for those of another one that CAD refuses."""
    deepspeed = import_deepspeed()
    config = {name: value for name, value in engine_config(0).items() if name != "optimizer"}
    config["cad"] = {**BLOCK, "forward_only": "balanced"}
    batch = training.pack(training.documents(LENGTHS[rank], seed=rank))
    refused = training.sdpa_llama(attention_dropout=0.1)
    model, reference = training.sdpa_llama(), training.sdpa_llama()
    with torch.no_grad():
        deepspeed.initialize(model=refused, config=config)[0](**batch)
        assert refused.config._attn_implementation == "sdpa" and deepspeed_cad.current_session() is None
        found = deepspeed.initialize(model=model.eval(), config=config)[0](**batch).loss
    looks = deepspeed_cad.current_session().forward_only
    assert looks.micro_batches == 1 and looks.imbalance < 1.05 < looks.imbalance_before
    assert abs(float(found - reference(**batch).loss.detach())) < 1e-5


@pytest.mark.slow
def test_an_engine_without_optimizer_in_a_process_that_only_looks(fresh_workers: WorkerPool) -> None:
    fresh_workers.run(_that_only_looks, 2, timeout=60.0)


@pytest.mark.slow
def test_an_engine_without_optimizer_keeps_its_attention_until_it_trains(fresh_workers: WorkerPool) -> None:
    fresh_workers.run(_without_optimizer, 2, timeout=60.0)
