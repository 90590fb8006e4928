"""The JSON alone turns CAD on: DeepSpeed engines with and without the block give the same losses."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import training
from engines import engine_config, import_deepspeed, train_engine
from pool import WorkerPool
from trainers import STEPS, assert_same_and_balanced, start_anew, step_entry, without_and_with

import deepspeed_cad
from deepspeed_cad.errors import CADPeerError
from deepspeed_cad.exchange.failure import patience, roll_call

WORLD = 3

LENGTHS = [[220], [40, 30, 9, 1, 50], [100, 100], [64, 3, 90]]


def _train(cad: bool, rank: int, config: dict, checkpoint: str | None, block: dict) -> tuple[list[dict], Any]:
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


INTERLEAVE = {**training.BLOCK, "overlap": "interleave"}
CASES: dict[str, tuple[dict[str, Any], str | None, dict[str, Any]]] = {
    "ZeRO-0": (engine_config(0), None, training.BLOCK),
    "ZeRO-1, accumulation": (engine_config(1, gradient_accumulation_steps=2), None, training.BLOCK),
    "ZeRO-2, reentrant": (engine_config(2), "reentrant", training.BLOCK),
    "ZeRO-3, non-reentrant": (engine_config(3), "non-reentrant", training.BLOCK),
    "ZeRO-3, reentrant, offload": (engine_config(3, zero_optimization={
        "stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"},
        "stage3_param_persistence_threshold": 0,
    }, zero_force_ds_cpu_optimizer=False), "reentrant", training.BLOCK),
    # Nano-batches alternate over the decoder, but not where ZeRO-3 shards parameters.
    "interleaved, ZeRO-0, non-reentrant": (engine_config(0), "non-reentrant", INTERLEAVE),
    "interleaved, ZeRO-2, accumulation": (engine_config(2, gradient_accumulation_steps=2, zero_optimization={
        "stage": 2, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": 5000,
    }), None, INTERLEAVE),
    "interleaved, ZeRO-3, non-reentrant": (engine_config(3), "non-reentrant", INTERLEAVE),
}  # fmt: skip


def _compare(rank: int, world: int, half: int) -> dict[str, Any]:
    import_deepspeed()
    return {name: without_and_with(_train, rank, *CASES[name]) for name in list(CASES)[half::2]}


@pytest.mark.slow
@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.long)])
def test_zero_stages(fresh_workers: WorkerPool, half: int) -> None:
    """Every stage, both checkpoint modes and offload: the same losses, and attention is balanced."""
    for found in fresh_workers.run(_compare, WORLD, half, timeout=240.0):
        for name, ((plain, _), (cad, (*counts, reason))) in found.items():
            micro_batches = STEPS * (2 if "accumulation" in name else 1)
            assert_same_and_balanced(name, plain, cad, losses=micro_batches)
            # Two layers; where nano-batches turn out not to alternate, those that are planned already are cut still.
            cut = [1, 2] if reason else [micro_batches if "interleaved" in name else 0]
            calls = counts[0]
            assert calls in [2 * (micro_batches + many) for many in cut], (name, counts)
            assert counts == [calls, calls, calls if "reentrant" in name else 0], (name, counts)
            assert ("ZeRO-3 shards" in (reason or "")) == (name.startswith("interleaved, ZeRO-3")), (name, reason)


def _without_optimizer(rank: int, world: int) -> None:
    """As TRL makes the engine of a reference model: with the JSON of the policy, less its optimizer. In a process that
    only looks, one that CAD refuses keeps its attention; another one is balanced."""
    config = {name: value for name, value in engine_config(0).items() if name != "optimizer"}
    batch = training.pack(training.documents(LENGTHS[rank], seed=rank))

    def engine(model: torch.nn.Module, **more: Any) -> Any:
        return import_deepspeed().initialize(model=model, config={**config, "cad": {**training.BLOCK, **more}})[0]

    model = training.sdpa_llama()
    first = engine(model)
    with torch.no_grad():
        before = first(**batch).loss
    assert model.config._attn_implementation == "sdpa" and deepspeed_cad.current_session() is None
    trained = first(**batch).loss
    assert model.config._attn_implementation == "cad"
    assert deepspeed_cad.current_session().statistics.micro_batches == 1
    assert abs(float(before - trained.detach())) < 1e-5
    start_anew()
    with torch.no_grad():
        refused = training.sdpa_llama(attention_dropout=0.1)
        engine(refused, forward_only="balanced")(**batch)
        assert refused.config._attn_implementation == "sdpa" and deepspeed_cad.current_session() is None
        found = engine(training.sdpa_llama().eval(), forward_only="balanced")(**batch).loss
    looks = deepspeed_cad.current_session().forward_only
    assert looks.micro_batches == 1 and looks.imbalance < 1.05 < looks.imbalance_before
    assert abs(float(found - before)) < 1e-5


@pytest.mark.slow
def test_an_engine_without_optimizer_keeps_its_attention_until_it_trains(fresh_workers: WorkerPool) -> None:
    fresh_workers.run(_without_optimizer, 2, timeout=60.0)


def _without_the_block(rank: int, world: int) -> str:
    """On rank 1, which goes on alone, as where the package is not installed."""
    patience.LATE_S = roll_call.LATE_S = 0.5
    config, store = engine_config(1), dist.distributed_c10d._get_default_store()
    model, block = training.tiny_llama(), {} if rank == 1 else {"cad": {}}
    try:
        import_deepspeed().initialize(model=model, model_parameters=model.parameters(), config=config | block)
    except CADPeerError as error:
        store.set(f"told/{rank}", "1")
        return str(error)
    store.wait(["told/0", "told/2"])
    return ""


@pytest.mark.slow
def test_a_rank_without_the_package_is_named_by_the_others(fresh_workers: WorkerPool) -> None:
    for rank, error in enumerate(fresh_workers.run(_without_the_block, 3)):
        assert f"CAD is on on rank {rank} and not on rank 1" in error or rank == 1
