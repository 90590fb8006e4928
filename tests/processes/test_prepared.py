"""Prepared loaders of Accelerate announce by themselves, where that is right, and stay what they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import training
from pool import WorkerPool
from torch.utils.data import DataLoader
from trainers import BLOCK, PackedRows, collate, training_arguments, without_and_with

WORLD, ROWS = 2, 14


def _announcements(model: Any) -> list[int]:
    """Tokens of what is announced from now on."""
    from deepspeed_cad.session import find_binding

    feed, found = find_binding(model).feed, []
    announce, accept = feed.announce, feed.accept
    feed.announce = lambda mine: (found.append(mine.local.tokens), announce(mine))[1]
    # The first of a step that is arranged comes planned.
    feed.accept = lambda mine, planned: (found.append(mine.local.tokens), accept(mine, planned))[1]
    return found


def _run(cad: bool, kind: str) -> dict[str, Any]:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration
    from deepspeed_cad.integrations.accelerate import CADPlugin

    torch.manual_seed(3)
    accelerator = Accelerator(
        cpu=True, kwargs_handlers=[CADPlugin(**BLOCK)] if cad else [], gradient_accumulation_steps=3,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )  # fmt: skip
    model = training.sdpa_llama()
    loader = DataLoader(PackedRows(ROWS), batch_size=1, shuffle=True, collate_fn=collate)
    check = DataLoader(PackedRows(4, seed=50), batch_size=1, collate_fn=collate)
    model, optimizer, loader, check = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader, check
    )
    model.train()
    announced = _announcements(model) if cad else []
    losses, ends, synced, held = [], [], [], []
    for _ in range(2):
        if kind == "looked at by rank 0":
            if accelerator.is_main_process:
                assert len([batch["input_ids"] for batch in DataLoader(loader.dataset, collate_fn=collate)]) == ROWS
                next(iter(check))
        batches = iter(loader) if kind == "broken off, held" else loader
        if kind == "gone on":
            batches = accelerator.skip_first_batches(loader, 2)
        held.append(batches)  # it is still there when the next epoch begins
        for number, batch in enumerate(batches):
            if kind == "shortened":
                batch = {name: value[:, :150] for name, value in batch.items()}
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(loss.detach()))
            ends.append((loader.end_of_dataloader, accelerator.gradient_state.end_of_dataloader))
            synced.append(accelerator.sync_gradients)
            if kind == "evaluated" and number == 2:
                model.eval()
                with torch.no_grad():
                    losses += [float(model(**one).loss) for one in check]
                model.train()
            if kind.startswith("broken off") and number == 3:
                break
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"losses": losses, "ends": ends, "synced": synced, "weights": weights, "announced": announced}


def _compare(rank: int, world: int, kinds: list[str]) -> dict[str, Any]:
    found = {}
    for kind in kinds:
        plain, ours = without_and_with(_run, kind)
        assert ours["losses"] == pytest.approx(plain["losses"], abs=1e-5), kind
        assert (ours["ends"], ours["synced"]) == (plain["ends"], plain["synced"]), kind
        assert (ours["weights"] - plain["weights"]).abs().max() < 1e-4, kind
        found[kind] = len(ours["announced"])
    return found


@pytest.mark.slow
def test_losses_ends_and_what_is_announced(fresh_workers: WorkerPool) -> None:
    """7 micro-batches in each of two epochs; all but the first of an epoch are announced, where they are trained."""
    # Broken off after the fourth: the fifth was announced too.
    wanted = {"as it is": 12, "evaluated": 12, "shortened": 0, "broken off": 8, "broken off, held": 8}
    wanted |= {"looked at by rank 0": 12, "gone on": 8}
    for found in fresh_workers.run(_compare, WORLD, list(wanted), timeout=140.0):
        assert found == wanted


def _trainer(rank: int, world: int, folder: str) -> tuple[int, int]:
    from deepspeed_cad.integrations.accelerate import CADPlugin, give_every_accelerator
    from transformers import Trainer

    import deepspeed_cad

    give_every_accelerator(CADPlugin(**BLOCK))
    model = deepspeed_cad.apply(training.tiny_llama(torch.float32, use_cache=False), BLOCK)
    announced = _announcements(model)
    arguments = training_arguments(folder, max_steps=5)
    Trainer(model=model, args=arguments, train_dataset=PackedRows(16), data_collator=collate).train()
    return len(announced), deepspeed_cad.current_session().statistics.micro_batches


@pytest.mark.slow
def test_the_trainer_announces_once(fresh_workers: WorkerPool, tmp_path: Any) -> None:
    assert fresh_workers.run(_trainer, WORLD, str(tmp_path), timeout=100.0) == [(5, 5)] * 2
