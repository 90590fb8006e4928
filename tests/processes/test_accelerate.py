"""`Accelerator(kwargs_handlers=[CADPlugin(...)])`: DDP, DeepSpeed, accumulation, evaluation, LoRA; prepared loaders
announce by themselves, where that is right, and stay what they are."""

from typing import Any

import pytest
import torch
import trainers
import training
from engines import import_deepspeed
from launched import zero
from pool import WorkerPool
from torch.utils.data import DataLoader

import deepspeed_cad
from deepspeed_cad.session import find_binding

WORLD = 2


def _announcements(model: Any) -> list[int]:
    """Tokens of what is announced from now on."""
    feed, found = find_binding(model).feed, []
    announce, accept = feed.announce, feed.accept
    feed.announce = lambda mine, **how: (found.append(mine.local.tokens), announce(mine, **how))[1]
    # The first of a step that is arranged comes planned.
    feed.accept = lambda mine, *how: (found.append(mine.local.tokens), accept(mine, *how))[1]
    return found


def _accelerator(cad: bool, stage: int | None = None, compiled: bool = False, fsdp2: bool = False, **more: Any) -> Any:
    from accelerate import Accelerator, DeepSpeedPlugin, DistributedType, FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import DataLoaderConfiguration, TorchDynamoPlugin
    from deepspeed_cad.integrations.accelerate import CADPlugin

    if stage is not None:
        more["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=zero(stage, stage3_param_persistence_threshold=0))
    if compiled:
        torch._dynamo.reset()
        more["dynamo_plugin"] = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=False)
    if fsdp2:  # wants GPUs; CPUs do, where Accelerate takes them for such
        more["fsdp_plugin"] = FullyShardedDataParallelPlugin(2, auto_wrap_policy="transformer_based_wrap")
        PartialState(cpu=True)._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    more["dataloader_config"] = DataLoaderConfiguration(use_seedable_sampler=True)
    return Accelerator(cpu=True, kwargs_handlers=[CADPlugin(**training.BLOCK)] if cad else [], **more)


def _model(lora: dict[str, Any] | None, checkpoint: bool) -> Any:
    model = training.checkpointed(training.sdpa_llama(), checkpoint)
    return model if lora is None else training.with_lora(model, **lora)


def _run(
    cad: bool, data: Any, kind: str = "", lora: dict[str, Any] | None = None, checkpoint: bool = False, rows: int = 1,
    **settings: Any,
) -> dict[str, Any]:  # fmt: skip
    """The loop of Accelerate's documentation, two epochs of which for a kind of loop; entries are those of every
    micro-batch and every evaluation."""
    torch.manual_seed(3)
    accelerator, model = _accelerator(cad, **settings), _model(lora, checkpoint)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    loader, another = (DataLoader(data, rows, shuffle=bool(kind), collate_fn=trainers.collate) for _ in range(2))
    check = DataLoader(trainers.PackedRows(4, seed=50), batch_size=1, collate_fn=trainers.collate)
    model, optimizer, loader, another, check = accelerator.prepare(model, optimizer, loader, another, check)
    assert hasattr(model, "unshard") == settings.get("fsdp2", False)
    model.train()
    announced = _announcements(model) if cad and kind else []
    entries: list[dict[str, Any]] = []
    ends, held = [], []
    for epoch in range(2 if kind else 1):
        if kind == "another model" and accelerator.is_main_process and cad and epoch:
            held.append(deepspeed_cad.apply(_model(None, False), training.BLOCK))
        if kind == "broken off":
            loader, another = another, loader
        if kind == "looked at by rank 0" and accelerator.is_main_process:
            assert len(list(DataLoader(loader.dataset, collate_fn=trainers.collate))) == len(data)
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
            entries.append(trainers.step_entry(loss))
            ends += [loader.end_of_dataloader, accelerator.gradient_state.end_of_dataloader, accelerator.sync_gradients]
            if kind == "looked at by rank 0" and accelerator.is_main_process:
                with torch.no_grad():
                    accelerator.unwrap_model(model)(**batch)
            if kind == "evaluated" and number == 2:
                model.eval()
                with torch.no_grad():
                    entries += [{"eval_loss": float(model(**(last := one)).loss)} for one in check]
                    if accelerator.is_main_process:
                        accelerator.unwrap_model(model)(**last)
                model.train()
            if kind.startswith("broken off") and number == 3:
                break
    return {"entries": entries, "ends": ends, "announced": len(announced)}


CASES: dict[str, dict[str, Any]] = {
    "DDP": {}, "accumulation, two rows": {"rows": 2, "gradient_accumulation_steps": 2},
    "ZeRO-2": {"stage": 2}, "ZeRO-3": {"stage": 3}, "LoRA": {"lora": {"target_modules": ["q_proj", "v_proj"]}},
    # LoRA of the last layer alone, under checkpointing: the hidden states of the first need no gradient.
    "frozen inputs": {"lora": {"target_modules": ["o_proj"], "layers_to_transform": [1]}, "checkpoint": True},
    "compiled": {"compiled": True}, "FSDP2": {"fsdp2": True, "checkpoint": True},
}  # fmt: skip
OFTEN, OTHER = ["DDP", "accumulation, two rows", "ZeRO-3", "frozen inputs", "FSDP2"], ["ZeRO-2", "LoRA", "compiled"]
KINDS = {
    "as it is": 12, "evaluated": 12, "shortened": 0, "broken off": 8, "broken off, held": 8, "looked at by rank 0": 12,
    "gone on": 8, "another model": 6,
}  # fmt: skip
"""Announcements of 7 micro-batches in each of two epochs: all but the first, where they are trained. Of what is broken
off after the fourth the fifth was announced too."""


def _compare(rank: int, world: int, names: list[str]) -> dict[str, Any]:
    import_deepspeed()
    found = {}
    for name, case in ((name, CASES[name]) for name in names):
        accumulated = case.get("gradient_accumulation_steps", 1)
        data = trainers.PackedRows(WORLD * trainers.STEPS * case.get("rows", 1) * accumulated)
        found[name] = trainers.without_and_with(_run, data, **case)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("names", [OFTEN, pytest.param(OTHER, marks=pytest.mark.long)])
def test_same_losses_and_balance(fresh_workers: WorkerPool, names: list[str]) -> None:
    for found in fresh_workers.run(_compare, WORLD, names, timeout=140.0):
        for name, (plain, cad) in found.items():
            accumulated = 2 if "accumulation" in name else 1
            losses = trainers.STEPS * accumulated
            trainers.assert_same_and_balanced(name, plain["entries"], cad["entries"], losses)
            lengths = trainers.unbalanced(losses, WORLD, rows=accumulated)
            assert [entry[trainers.BEFORE] for entry in cad["entries"]] == pytest.approx(lengths), name


def _compare_kinds(rank: int, world: int) -> dict[str, int]:
    found = {}
    for kind in KINDS:
        plain, ours = trainers.without_and_with(_run, trainers.PackedRows(14), kind, gradient_accumulation_steps=3)
        losses = [[one.get("loss", one.get("eval_loss")) for one in run["entries"]] for run in (ours, plain)]
        assert losses[0] == pytest.approx(losses[1], abs=1e-5) and ours["ends"] == plain["ends"], kind
        found[kind] = ours["announced"]
    return found


@pytest.mark.slow
def test_losses_ends_and_what_is_announced(fresh_workers: WorkerPool) -> None:
    assert fresh_workers.run(_compare_kinds, WORLD, timeout=140.0) == [KINDS] * WORLD


def _trainer(rank: int, world: int, folder: str) -> tuple[int, int]:
    from deepspeed_cad.integrations.accelerate import CADPlugin, give_every_accelerator
    from transformers import Trainer

    give_every_accelerator(CADPlugin(**training.BLOCK))
    model = deepspeed_cad.apply(training.tiny_llama(torch.float32, use_cache=False), training.BLOCK)
    announced, arguments = _announcements(model), trainers.training_arguments(folder, max_steps=5)
    Trainer(model=model, args=arguments, train_dataset=trainers.PackedRows(16), data_collator=trainers.collate).train()
    return len(announced), deepspeed_cad.current_session().statistics.micro_batches


@pytest.mark.slow
def test_the_trainer_announces_once(fresh_workers: WorkerPool, tmp_path: Any) -> None:
    assert fresh_workers.run(_trainer, WORLD, str(tmp_path), timeout=100.0) == [(5, 5)] * 2
