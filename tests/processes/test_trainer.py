"""The Hugging Face Trainer: a "cad" block in its DeepSpeed JSON, losses with and without CAD, log and callback."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import training
from pool import WorkerPool
from trainers import BLOCK, STEPS, Case, PackedRows, assert_same_and_balanced, collate, losses_of, zero

WORLD = 4


def _train(case: Case, cad: dict[str, Any] | None, folder: str) -> list[dict[str, Any]]:
    """One run of the Trainer; gives what it logged."""
    from transformers import Trainer, TrainingArguments

    import deepspeed_cad

    counted: list[tuple[int | None, int]] = []

    class Counting(Trainer):
        """Notes num_items_in_batch and the targets of each micro-batch that is trained."""

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if model.training:
                items = kwargs.get("num_items_in_batch")
                counted.append((None if items is None else int(items), int((inputs["labels"] != -100).sum())))
            return super().compute_loss(model, inputs, *args, **kwargs)

    model = training.tiny_llama(torch.float32, attn_implementation="sdpa", use_cache=False)
    if case.deepspeed is None and cad is not None:
        deepspeed_cad.apply(model, cad)
    deepspeed = None if case.deepspeed is None else {**case.deepspeed, **({} if cad is None else {"cad": cad})}
    settings: dict[str, Any] = {
        "output_dir": folder, "use_cpu": True, "deepspeed": deepspeed, "max_steps": STEPS,
        "per_device_train_batch_size": 1, "logging_steps": 1, "save_strategy": "no", "report_to": [],
        "learning_rate": 1e-2, "lr_scheduler_type": "constant", "disable_tqdm": True, "optim": "adamw_torch",
    }  # fmt: skip
    trainer = Counting(
        model=model, args=TrainingArguments(**{**settings, **case.arguments}), train_dataset=PackedRows(16),
        eval_dataset=PackedRows(8, seed=50), data_collator=collate,
    )  # fmt: skip
    trainer.train()
    if case.arguments.get("average_tokens_across_devices"):
        _check_counts(counted, accumulates="gradient_accumulation_steps" in case.arguments)
    return trainer.state.log_history


def _check_counts(counted: list[tuple[int | None, int]], accumulates: bool) -> None:
    """num_items_in_batch was the targets of all ranks, and of all micro-batches of a step."""
    targets = torch.tensor([own for _, own in counted])
    torch.distributed.all_reduce(targets)
    assert all(items is not None and items >= targets[i] for i, (items, _) in enumerate(counted))
    assert any(items > targets[i] for i, (items, _) in enumerate(counted)) == accumulates


def _compare(rank: int, world: int, cases: list[Case], folder: str) -> dict[str, Any]:
    import deepspeed
    from accelerate.state import AcceleratorState

    import deepspeed_cad
    from deepspeed_cad.session import close_session

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed_cad.install()
    found = {}
    for case in cases:
        logged = {}
        for name, block in (("plain", None), ("cad", BLOCK)):
            AcceleratorState._reset_state(True)
            logged[name] = _train(case, block, folder)
            assert (deepspeed_cad.current_session() is None) == (block is None)
            close_session()
        found[case.name] = logged
    return found


def _check(found: dict[str, Any]) -> None:
    for name, logged in found.items():
        assert_same_and_balanced(name, logged["plain"], logged["cad"])
        assert any("eval_loss" in entry for entry in logged["cad"]) == ("evaluation" in name)


DEEPSPEED = [
    Case("ZeRO-1, accumulation", zero(1), {"gradient_accumulation_steps": 2, "average_tokens_across_devices": True}),
    Case("ZeRO-2, evaluation", zero(2), {"eval_strategy": "steps", "eval_steps": 2}),
    Case("ZeRO-3", zero(3)),
]


@pytest.mark.slow
def test_cad_block_in_the_deepspeed_json(fresh_workers: WorkerPool, tmp_path) -> None:
    """Same losses for every ZeRO stage, statistics in the log, attention balanced."""
    for found in fresh_workers.run(_compare, WORLD, DEEPSPEED, str(tmp_path), timeout=140.0):
        _check(found)


DDP = [
    Case("DDP"),
    Case("DDP, accumulation with a rest, several epochs", arguments={
        "gradient_accumulation_steps": 3, "average_tokens_across_devices": True,
    }),
    Case("DDP, evaluation", arguments={"eval_strategy": "steps", "eval_steps": 2}),
    Case("DDP, checkpointing, clipping", arguments={
        "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False},
    }),
    Case("DDP, two rows", arguments={"per_device_train_batch_size": 2}),
    Case("DDP, average of each device", arguments={"average_tokens_across_devices": False}),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.slow
def test_trainer_with_ddp(fresh_workers: WorkerPool, tmp_path) -> None:
    for found in fresh_workers.run(_compare, WORLD, DDP, str(tmp_path), timeout=140.0):
        _check(found)


def _refusals(rank: int, world: int, folder: str) -> dict[str, Any]:
    """The callback's figures; then what the Trainer's hook refuses, and batches that change on their way."""
    from accelerate.state import AcceleratorState
    from deepspeed_cad.integrations.callback import CADCallback
    from torch.utils.data import IterableDataset
    from transformers import Trainer, TrainingArguments

    import deepspeed_cad
    from deepspeed_cad.errors import CADDataError, CADUnsupportedError
    from deepspeed_cad.session import close_session

    def trainer(data: Any, kind: type = Trainer, block: dict[str, Any] = BLOCK, **settings: Any) -> Any:
        AcceleratorState._reset_state(True)
        close_session()
        model = training.tiny_llama(torch.float32, attn_implementation="sdpa", use_cache=False)
        deepspeed_cad.apply(model, block)
        arguments = TrainingArguments(
            output_dir=folder, use_cpu=True, max_steps=4, per_device_train_batch_size=1, logging_steps=1,
            save_strategy="no", report_to=[], disable_tqdm=True, **settings,
        )  # fmt: skip
        return kind(
            model=model, args=arguments, train_dataset=data, data_collator=collate, callbacks=[CADCallback()]
        )  # fmt: skip

    first = trainer(PackedRows(16))
    first.train()
    final = first.state.log_history[-1]
    statistics = deepspeed_cad.current_session().statistics
    assert statistics.mean * world == pytest.approx(float(statistics.load.sum()))

    class Stream(IterableDataset):
        def __iter__(self):
            yield from (PackedRows(16)[i] for i in range(16))

    with pytest.raises(CADUnsupportedError, match="dispatch_batches=False"):
        trainer(Stream()).train()
    trainer(Stream(), accelerator_config={"dispatch_batches": False}).train()

    class Shortens(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(model, {k: v[:, :150] for k, v in inputs.items()}, *args, **kwargs)

    with pytest.raises(CADDataError, match='"look_ahead": 0'):
        trainer(PackedRows(16), Shortens).train()
    shortened = trainer(PackedRows(16), Shortens, {**BLOCK, "look_ahead": 0})
    shortened.train()
    assert len(losses_of(shortened.state.log_history)) == 4
    return final


@pytest.mark.slow
def test_callback_and_refusals(fresh_workers: WorkerPool, tmp_path) -> None:
    for final in fresh_workers.run(_refusals, 2, str(tmp_path), timeout=100.0):
        assert 0 <= final["cad/still_waits_s"] < final["cad/would_have_waited_s"]
        assert final["cad/saved_s"] == pytest.approx(final["cad/would_have_waited_s"] - final["cad/still_waits_s"])
        # 4 steps of 400 tokens on two layers are milliseconds of attention, not seconds and not nothing.
        assert 1e-5 < final["cad/saved_s"] < 5


def _save_and_resume(rank: int, world: int, folder: str, stage: int | None) -> None:
    """Trainer checkpoints: 3 of 6 steps, and then the rest in a new Trainer, to the losses of runs in one go."""
    import deepspeed
    from accelerate.state import AcceleratorState
    from transformers import Trainer, TrainingArguments

    import deepspeed_cad
    from deepspeed_cad.session import close_session

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed_cad.install()
    # Without CAD too, transformers 5.17 and older load optimizer states to args.device, which on a CPU with several
    # processes is "cpu:0"; torch.load knows no CPU with a number.
    torch.serialization.register_package(
        9, lambda storage: None, lambda storage, place: storage if place.startswith("cpu:") else None
    )

    def run(out: str, cad: bool, resume: str | None = None) -> list[dict[str, Any]]:
        AcceleratorState._reset_state(True)
        close_session()
        model = training.tiny_llama(torch.float32, attn_implementation="sdpa", use_cache=False)
        if stage is None and cad:
            deepspeed_cad.apply(model, BLOCK)
        json = None if stage is None else {**zero(stage), **({"cad": BLOCK} if cad else {})}
        arguments = TrainingArguments(
            output_dir=out, use_cpu=True, deepspeed=json, max_steps=STEPS, per_device_train_batch_size=1,
            gradient_accumulation_steps=2, logging_steps=1, report_to=[], save_steps=3, learning_rate=1e-2,
            lr_scheduler_type="constant", disable_tqdm=True, optim="adamw_torch",
        )  # fmt: skip
        trainer = Trainer(model=model, args=arguments, train_dataset=PackedRows(24), data_collator=collate)
        trainer.train(resume_from_checkpoint=resume)
        return trainer.state.log_history

    plain = run(f"{folder}/plain", cad=False)
    whole = run(folder, cad=True)
    again = run(folder, cad=True, resume=f"{folder}/checkpoint-3")
    assert_same_and_balanced("in one go", plain, whole)
    assert_same_and_balanced("resumed", plain, again)
    assert losses_of(again) == pytest.approx(losses_of(whole), abs=1e-6)
    assert '"cad"' not in open(f"{folder}/checkpoint-6/config.json").read()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [*(pytest.param(one, marks=pytest.mark.long) for one in (None, 2)), 3])
def test_save_and_resume(fresh_workers: WorkerPool, tmp_path, stage: int | None) -> None:
    fresh_workers.run(_save_and_resume, WORLD, str(tmp_path), stage, timeout=100.0)
