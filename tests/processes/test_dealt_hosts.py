"""Documents dealt out before a step by host frameworks: weights as without CAD, and ranks with as many tokens."""

from __future__ import annotations

import re
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import training
from deepspeed_cad.integrations import trainer as trainer_room
from engines import engine_config, import_deepspeed
from pool import WorkerPool
from test_dealt import SHORT, pad, rank_batches
from trainers import losses_of, start_anew, training_arguments, without_and_with
from training import BLOCK

import deepspeed_cad
from deepspeed_cad.ahead.loader import LookAheadLoader

BEFORE, AFTER = "cad/tokens_max_over_mean_before", "cad/tokens_max_over_mean"


def _samples(documents: int) -> Any:
    """Documents of very different lengths, which are a data set."""
    lengths = np.random.default_rng(0).lognormal(3.0, 1.2, documents).astype(int) + 2
    return training.documents(np.minimum(lengths, 300).tolist(), 0)


def _loss(logits: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any = 1, **_: Any) -> torch.Tensor:
    """What the model's own loss is, which computes in fp32."""
    logits, targets = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch


def _trainer(cad: dict[str, Any] | None, folder: str, padded: bool = False, **changes: Any) -> Any:
    from transformers import Trainer
    from transformers.loss.loss_utils import LOSS_MAPPING

    model, LOSS_MAPPING["ForCausalLM"] = training.sdpa_llama(torch.float64), _loss
    trainer_room.KNOWN = re.compile(f"{__name__}|{trainer_room.KNOWN.pattern}")  # a script's own loss is not
    if cad is not None:
        deepspeed_cad.apply(model, cad)
    given = {"num_train_epochs": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "optim": "sgd"}
    # The last batch of an epoch has 3 documents on rank 0 and 2 on rank 1; one step has a single micro-batch.
    data = {"train_dataset": _samples(45), "eval_dataset": _samples(8)}
    arguments = training_arguments(folder, **given, **changes)
    return Trainer(model=model, args=arguments, data_collator=pad if padded else training.pack, **data)


def _run(trainer: Any, **given: Any) -> dict[str, Any]:
    trainer.train(**given)
    log = [one for one in trainer.state.log_history if "loss" in one]
    found = {
        "losses": losses_of(log), "tokens": [one[AFTER] for one in log if AFTER in one],
        "weights": {name: value.detach().numpy().copy() for name, value in trainer.model.named_parameters()},
        "before": [one[BEFORE] for one in log if BEFORE in one],
    }  # fmt: skip
    start_anew()
    return found


def _trainers(rank: int, world: int, folder: str, padded: bool) -> dict[str, Any]:
    looking = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 3}
    return {
        "plain": _run(_trainer(None, folder, padded)), "auto": _run(_trainer(BLOCK, folder, padded, **looking)),
        "resumed": _run(_trainer(BLOCK, folder, padded), resume_from_checkpoint=f"{folder}/checkpoint-3"),
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True])
def test_trainer(fresh_workers: WorkerPool, tmp_path: Any, padded: bool) -> None:
    """Weights as without CAD after the same steps, whatever lies between them; the default deals documents out."""
    for found in fresh_workers.run(_trainers, 2, str(tmp_path), padded, timeout=140.0):
        plain = found["plain"]
        assert len(plain["losses"]) == 6
        for name in ("auto", "resumed"):
            # The Trainer adds losses up in fp32.
            assert found[name]["losses"][-3:] == pytest.approx(plain["losses"][-3:], abs=2e-6), name
            for key, value in plain["weights"].items():
                assert np.abs(found[name]["weights"][key] - value).max() < 1e-10, (name, key)
        before, after = (np.mean(found["auto"][name]) for name in ("before", "tokens"))
        assert before > 1.1 and after < (1.2 if padded else 1.05)


def _prepared(cad: bool) -> dict[str, Any]:
    """Gradients of a loop with a prepared loader: from the second micro-batch on documents are dealt out."""
    from accelerate import Accelerator
    from deepspeed_cad.integrations.accelerate import CADPlugin

    accelerator = Accelerator(cpu=True, kwargs_handlers=[CADPlugin(**BLOCK, documents="deal")] if cad else None)
    data = torch.utils.data.DataLoader(_samples(32), batch_size=4, collate_fn=training.pack)
    model, loader = accelerator.prepare(training.sdpa_llama(torch.float64), data)
    for batch in loader:
        accelerator.backward(training.loss_sum(model, batch) / 100)
    if cad:
        figures = deepspeed_cad.current_session().statistics.as_events()
        assert figures["cad/tokens_max_over_mean"] < figures["cad/tokens_max_over_mean_before"] - 0.02
    return {key: value.grad.numpy().copy() for key, value in model.module.named_parameters()}


def _both_prepared(rank: int, world: int) -> Any:
    return without_and_with(_prepared)


@pytest.mark.slow
def test_prepared_loader(fresh_workers: WorkerPool) -> None:
    for plain, dealt in fresh_workers.run(_both_prepared, 2, timeout=140.0):
        for key, value in plain.items():
            assert np.abs(dealt[key] - value).max() < 1e-10 * (1 + np.abs(value).max()), key


ROWS = [[160, 70, 50], SHORT[:3], [80, 80], SHORT[:4], SHORT, [60, 30]]


def _engine(rank: int, world: int, folder: str) -> dict[str, Any]:
    """A raw loop over two epochs of three micro-batches, two per step: steps go on from one epoch into the next. The
    loader is DeepSpeed's own, and a monitor writes what happened."""
    found: dict[str, Any] = {}
    monitor = {"enabled": True, "output_path": folder, "job_name": "cad"}
    for name in ("keep", "deal"):
        config = engine_config(1, gradient_accumulation_steps=2, csv_monitor=monitor, cad={**BLOCK, "documents": name})
        engine, _, loader, _ = import_deepspeed().initialize(
            model=training.tiny_llama(torch.float32), config=config, training_data=rank_batches(ROWS, 0),
            collate_fn=itemgetter(0),
        )  # fmt: skip
        assert isinstance(loader, LookAheadLoader) and len(loader) == 3
        steps: list[list[float]] = [[]]
        for _ in range(2):
            for batch in loader:
                loss = training.loss_sum(engine, batch) / 250
                engine.backward(loss)
                steps[-1].append(float(loss.detach()))
                if engine.is_gradient_accumulation_boundary():
                    steps.append([])
                engine.step()
        total = torch.tensor([sum(one) for one in steps if one])
        dist.all_reduce(total)
        statistics = deepspeed_cad.current_session().statistics
        found[name] = {"losses": total.tolist(), "tokens": statistics.as_events()["cad/tokens_max_over_mean"]}
        engine.destroy()
        start_anew()
    return found


@pytest.mark.slow
def test_engine(fresh_workers: WorkerPool, tmp_path: Path) -> None:
    ranks = fresh_workers.run(_engine, 2, str(tmp_path), timeout=140.0)
    assert any("attention_max_over_mean" in path.name for path in (tmp_path / "cad").iterdir())
    for found in ranks:
        assert len(found["keep"]["losses"]) == 3
        assert found["deal"]["losses"] == pytest.approx(found["keep"]["losses"], rel=1e-5)
        assert found["deal"]["tokens"] < found["keep"]["tokens"] - 0.1
