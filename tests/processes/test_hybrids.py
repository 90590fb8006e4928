"""Models with layers that carry state, under what shards parameters, and where documents change ranks before a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hybrids import alone, packed, run
from model_cases import FAMILIES, NEW, tiny_model
from pool import WorkerPool
from trainers import collate, losses_of

BLOCK = {"overlap": "local_first", "granularity": 16, "tolerance": 0.02}
ROWS = [[[100, 3, 17]], [[20, 5, 20, 35, 40]]]
"""Documents of each rank: unequally many, so that layers run a different number of times on each."""

pytestmark = pytest.mark.skipif(not NEW, reason="older versions of transformers have few of these models")


def _model(kind: str) -> Any:
    family = next(one for one in FAMILIES if one.kind == kind)
    return tiny_model(kind, torch.float32, **family.changes).train()


def _expected(kind: str, world: int) -> dict[str, torch.Tensor]:
    """Gradients of all ranks' documents, each run alone, averaged over ranks as engines do."""
    model, total = _model(kind), {}
    for lengths in ROWS[:world]:
        for name, gradient in alone(model, packed(lengths), lengths)[1].items():
            total[name] = total.get(name, 0) + gradient / world
    return total


def _worst(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    return max(float((got[name] - value).abs().max()) for name, value in expected.items()) / largest


def _zero3(rank: int, world: int, kind: str, checkpoint: bool) -> float:
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    import deepspeed_cad

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed_cad.install()
    model = _model(kind)
    if checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "torch_adam": True}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "cad": BLOCK,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.train()
    for _ in range(2):
        engine.backward(_loss(engine(**packed(ROWS[rank]), use_cache=False).logits, rank))
        got = {name: safe_get_full_grad(p).clone() for name, p in engine.module.named_parameters()}
        engine.step()
    engine.destroy()
    return _worst(got, _expected(kind, world))


def _loss(logits: torch.Tensor, rank: int) -> torch.Tensor:
    """That of `hybrids.run`: every logit counts."""
    lengths = ROWS[rank]
    found = torch.cat([logits[row, : sum(of)] for row, of in enumerate(lengths)])
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return (found * weights.to(found.dtype)).sum()


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", [pytest.param(False, marks=pytest.mark.long), True])
def test_zero3(fresh_workers: WorkerPool, checkpoint: bool) -> None:
    """Layers that run once per document are gathered once, as often on every rank; the gradients are right."""
    for worst in fresh_workers.run(_zero3, 2, "qwen3_5_text", checkpoint, timeout=240.0):
        assert worst < 1e-4


def _fsdp2(rank: int, world: int, kind: str, late: bool) -> float:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import deepspeed_cad

    model = _model(kind)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if not late:
        deepspeed_cad.apply(model, BLOCK)
    for layer in (*model.model.layers, model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
    if late:
        deepspeed_cad.apply(model, BLOCK)
    _loss(model(**packed(ROWS[rank])).logits, rank).backward()
    got = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    return _worst(got, _expected(kind, world))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "late"), [("qwen3_5_text", False), ("lfm2", True)])
def test_fsdp2(workers: WorkerPool, kind: str, late: bool) -> None:
    """Turned on before sharding and after it, with checkpointing."""
    for worst in workers.run(_fsdp2, 2, kind, late):
        assert worst < 1e-4


def _train(rank: int, world: int, documents: str) -> tuple[list[float], float]:
    """Losses of the Trainer, and attention max/mean as the documents lay when the first forward began."""
    from transformers import Trainer, TrainingArguments

    import deepspeed_cad
    from deepspeed_cad.session import close_session

    lengths = [[80, 80], [20] * 8, [75, 5, 3, 77], [31, 29, 20, 40, 40]] * 2
    rows = [{name: value[0] for name, value in packed([of]).items()} for of in lengths]
    rows = [{**row, "labels": row["input_ids"].masked_fill(row["position_ids"] == 0, -100)} for row in rows]
    arguments = TrainingArguments(
        output_dir="build/unused", max_steps=2, per_device_train_batch_size=1, gradient_accumulation_steps=2,
        learning_rate=1e-2, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        average_tokens_across_devices=True, seed=1, data_seed=1,
    )  # fmt: skip
    model = deepspeed_cad.apply(_model("qwen3_5_text"), {**BLOCK, "documents": documents})
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collate)
    trainer.train()
    session = deepspeed_cad.current_session()
    assert session is not None
    found = losses_of(trainer.state.log_history), session.statistics.imbalance_before
    close_session()
    return found


def _both(rank: int, world: int) -> tuple[Any, Any]:
    return _train(rank, world, "keep"), _train(rank, world, "exchange")


@pytest.mark.slow
def test_exchange_of_documents(workers: WorkerPool) -> None:
    """Whole documents change ranks, and state stays inside of them: the same losses."""
    for (keep, before), (exchange, after) in workers.run(_both, 2):
        assert len(keep) == 2 and keep == pytest.approx(exchange, rel=1e-4)
        assert after < before


def _whole_world(rank: int, world: int) -> float:
    """For `run`: gradients of this rank without any engine."""
    import deepspeed_cad

    lengths = ROWS[rank]
    expected = alone(_model("lfm2"), packed(lengths), lengths)[1]
    return _worst(run(deepspeed_cad.apply(_model("lfm2"), BLOCK), packed(lengths), lengths)[1], expected)


def test_unequally_many_documents(workers: WorkerPool) -> None:
    """Ranks run layers a different number of times, and exchange attention between."""
    assert max(workers.run(_whole_world, 2)) < 1e-4


def _evaluate(rank: int, world: int, kind: str) -> float:
    """The largest difference of logits, of documents that lie otherwise on each rank."""
    import deepspeed_cad

    family = next(one for one in FAMILIES if one.kind == kind)
    model = tiny_model(kind, torch.float64, **family.changes).eval()
    batch, lengths = packed(ROWS[rank]), ROWS[rank]
    with torch.no_grad():
        expected = alone(model, batch, lengths)[0]
        got = run(deepspeed_cad.apply(model, BLOCK), batch, lengths)[0]
    return float((got - expected).abs().max())


@pytest.mark.parametrize("kind", ["qwen3_5_text", "lfm2", "granitemoehybrid"])
def test_evaluation_on_every_rank(workers: WorkerPool, kind: str) -> None:
    """State stays inside documents there, too: the layout has one rank, and the session several."""
    assert max(workers.run(_evaluate, 2, kind)) < 1e-6
