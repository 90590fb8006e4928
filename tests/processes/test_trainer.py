"""The Hugging Face Trainer: a "cad" block in its DeepSpeed JSON, losses with and without CAD, log and callback; the
plugin of axolotl, against a stand-in that makes the calls of its plugin manager."""

import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import trainers
import training
from deepspeed_cad.integrations.trainer import _AheadIterator as AheadIterator
from deepspeed_cad.integrations.trainer import _may_read_ahead as may_read_ahead
from engines import import_deepspeed
from pool import WorkerPool
from transformers import Trainer, TrainerCallback

import deepspeed_cad
from deepspeed_cad.errors import CADConfigError, CADDataError, CADUnsupportedError

WORLD = 2


def _axolotl() -> Any:
    """Our plugin, imported as axolotl imports it."""
    base: Any = ModuleType("axolotl.integrations.base")
    base.BasePlugin = object
    sys.modules |= {"axolotl": base, "axolotl.integrations": base, base.__name__: base}
    return import_module("deepspeed_cad.integrations.axolotl").CADPlugin()


def test_keys_of_the_yaml_of_axolotl() -> None:
    plugin = _axolotl()
    home, name = plugin.get_input_args().rsplit(".", 1)
    assert getattr(sys.modules[home], name)(cad={"tolerance": 0.1}).cad == {"tolerance": 0.1}
    plugin.pre_model_load({"cad": None, "sequence_parallel_degree": 1})
    with pytest.raises(CADConfigError, match="did you mean"):
        plugin.pre_model_load({"cad": {"tolerence": 0.1}})
    with pytest.raises(CADUnsupportedError, match="context_parallel_size is 2"):
        plugin.pre_model_load({"context_parallel_size": 2})


def _trainer(
    cad: bool, folder: str, kind: Any = None, rows: Any = None, stage: int | None = None, axolotl: bool = False,
    **changes: Any,
) -> Any:  # fmt: skip
    """A Trainer on a new model, with CAD by its own key, by the JSON's or by that of axolotl's YAML."""
    model = training.sdpa_llama()
    if stage is not None:
        changes["deepspeed"] = {**trainers.zero(stage), **({"cad": training.BLOCK} if cad else {})}
    elif cad and not axolotl:
        deepspeed_cad.apply(model, changes.pop("block", training.BLOCK))
    arguments = trainers.training_arguments(folder, **{"max_steps": trainers.STEPS, **changes})
    made = (kind or Trainer)(
        model=model, args=arguments, data_collator=trainers.collate,
        train_dataset=trainers.PackedRows(24) if rows is None else rows, eval_dataset=trainers.PackedRows(8, seed=50),
    )  # fmt: skip
    if cad and axolotl:
        yaml, plugin = {"cad": training.BLOCK, "sample_packing": True}, _axolotl()
        plugin.pre_model_load(yaml)
        plugin.post_trainer_create(yaml, made)
    return made


def _train(cad: bool, folder: str, **changes: Any) -> list[dict[str, Any]]:
    """What a run of the Trainer logged."""
    counted: list[tuple[int | None, int]] = []

    class Counting(Trainer):
        """Notes num_items_in_batch and the targets of each micro-batch that is trained."""

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if model.training:
                items = kwargs.get("num_items_in_batch")
                counted.append((None if items is None else int(items), int((inputs["labels"] != -100).sum())))
            return super().compute_loss(model, inputs, *args, **kwargs)

    trainer = _trainer(cad, folder, Counting, trainers.PackedRows(16), **changes)
    trainer.train()
    if changes.get("average_tokens_across_devices"):
        # The targets of all ranks, and of all micro-batches of a step.
        targets = torch.tensor([own for _, own in counted])
        torch.distributed.all_reduce(targets)
        assert all(items is not None and items > targets[i] for i, (items, _) in enumerate(counted))
    return trainer.state.log_history


ACCUMULATION = {"gradient_accumulation_steps": 2, "average_tokens_across_devices": True}
EVALUATION = {"eval_strategy": "steps", "eval_steps": 2}
DEEPSPEED: dict[str, dict[str, Any]] = {
    "ZeRO-1, accumulation": {"stage": 1, **ACCUMULATION},
    "ZeRO-2, evaluation": {"stage": 2, **EVALUATION},
    "ZeRO-3": {"stage": 3},
    "axolotl": {"axolotl": True},
}
DDP: dict[str, dict[str, Any]] = {
    "DDP, accumulation with a rest, several epochs": {**ACCUMULATION, "gradient_accumulation_steps": 3},
    "DDP, evaluation": EVALUATION,
    "DDP, two rows, checkpointing": {"per_device_train_batch_size": 2, "gradient_checkpointing": True},
    "DDP, average of each device": {"average_tokens_across_devices": False},
}  # fmt: skip


def _compare(rank: int, world: int, cases: dict[str, dict[str, Any]], folder: str) -> dict[str, Any]:
    import_deepspeed()
    return {name: trainers.without_and_with(_train, folder, **case) for name, case in cases.items()}


@pytest.mark.slow
@pytest.mark.parametrize("cases", [DEEPSPEED, pytest.param(DDP, marks=pytest.mark.long)], ids=["DeepSpeed", "DDP"])
def test_same_losses_and_balance(fresh_workers: WorkerPool, tmp_path, cases: dict[str, dict[str, Any]]) -> None:
    for found in fresh_workers.run(_compare, WORLD, cases, str(tmp_path), timeout=140.0):
        for name, (plain, cad) in found.items():
            trainers.assert_same_and_balanced(name, plain, cad)
            assert any("eval_loss" in entry for entry in cad) == ("evaluation" in name)


def _refusals(rank: int, world: int, folder: str) -> None:
    """What the Trainer's hook refuses, and batches that change on their way."""

    def trainer(*args: Any, **changes: Any) -> Any:
        trainers.start_anew()
        return _trainer(True, folder, *args, **changes)

    trainer().train()
    statistics = deepspeed_cad.current_session().statistics
    assert statistics.mean * world == pytest.approx(float(statistics.load.sum()))

    trainer(rows=trainers.Stream(), accelerator_config={"dispatch_batches": False}).train()

    class Shortens(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(model, {k: v[:, :150] for k, v in inputs.items()}, *args, **kwargs)

    with pytest.raises(CADDataError, match='"look_ahead": 0'):
        trainer(Shortens).train()
    shortened = trainer(Shortens, block={**training.BLOCK, "look_ahead": 0})
    shortened.train()
    assert len(trainers.losses_of(shortened.state.log_history)) == trainers.STEPS


@pytest.mark.slow
def test_refusals(fresh_workers: WorkerPool, tmp_path) -> None:
    fresh_workers.run(_refusals, 2, str(tmp_path), timeout=100.0)


def test_an_error_of_the_loader_is_raised_when_its_batch_is_due() -> None:
    """Other ranks hear of it as soon as it is known, once."""
    feed = mock.MagicMock(rank=3, replicas=1)
    feed.config.documents = "auto"
    batches = AheadIterator((1 // (2 - i) for i in range(4)), feed, 1)  # 0, 1, and an error
    assert batches.arrange([next(batches)]) == [0]
    batches.read_ahead(1)
    assert batches.arrange([next(batches)]) == [1]
    batches.read_ahead(1)
    (told,) = feed.fail_later.call_args.args
    assert str(told) == "rank 3: its loader raised ZeroDivisionError: integer division or modulo by zero"
    with pytest.raises(ZeroDivisionError):
        next(batches)
    feed.fail_later.assert_called_once()


def test_a_loader_whose_state_is_saved_is_not_read_ahead() -> None:
    """It would count what it gave out and nobody trained. Behind the last step nothing follows."""
    saved = SimpleNamespace(dataloader_config=SimpleNamespace(use_stateful_dataloader=True))
    for accelerator, step, may in (saved, 1, False), (None, 3, True), (None, 4, False):
        state = SimpleNamespace(global_step=step, max_steps=5)
        assert may_read_ahead(SimpleNamespace(accelerator=accelerator, state=state)) is may


def _changes_on_one_rank(rank: int, world: int, folder: str, later: bool) -> tuple[list[float], list[float], Any]:
    """On rank 1 what a token is depends on those beside it: from the beginning, or from the second step on."""

    def run(cad: bool) -> list[float]:
        trainers.start_anew()
        trainer = _trainer(cad, folder, **ACCUMULATION, optim="sgd", max_steps=5)

        def change() -> None:
            tokens = trainer.model.get_input_embeddings()
            tokens.register_forward_hook(lambda module, given, output: output / output.detach().abs().mean())

        class Change(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
                if rank == 1 and state.global_step == 1:
                    change()

        if later:
            trainer.add_callback(Change)
        elif rank == 1:
            change()
        trainer.train()
        return [one["grad_norm"] for one in trainer.state.log_history if "grad_norm" in one]

    found = run(False), run(True)
    feed = deepspeed_cad.current_session().feeds[0]
    return *found, (feed.deals, feed.holds, feed.stays)


@pytest.mark.slow
@pytest.mark.parametrize("later", [False, True])
def test_what_one_rank_finds_counts_for_all(fresh_workers: WorkerPool, tmp_path, later: bool) -> None:
    """Found in the middle of an epoch it ends nothing: this rank says that steps stay as they are. (The rows are such
    that documents dealt out gave the same, so losses do not tell from which step on.)"""
    first, second = fresh_workers.run(_changes_on_one_rank, 2, str(tmp_path), later, timeout=100.0)
    for plain, cad, _ in (first, second):
        assert cad == pytest.approx(plain, rel=1e-5) and len(set(cad)) == 5
    assert [one[2][:2] for one in (first, second)] == [(later, False), (later, later)]
    assert ("another rank has a reason" in first[2][2]) != later
    assert "<lambda> is not transformers' own" in second[2][2]


def _save_and_resume(rank: int, world: int, folder: str) -> None:
    """Trainer checkpoints: 2 of 4 steps, and then the rest in a new Trainer, to the losses of runs in one go."""
    import_deepspeed()
    # Without CAD too, transformers 5.17 and older load optimizer states to args.device, which on a CPU with several
    # processes is "cpu:0"; torch.load knows no CPU with a number.
    torch.serialization.register_package(
        9, lambda storage: None, lambda storage, place: storage if place.startswith("cpu:") else None
    )

    def run(out: str, cad: bool, resume: str | None = None) -> list[dict[str, Any]]:
        trainers.start_anew()
        saving = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2}
        trainer = _trainer(cad, out, stage=3, **saving)
        trainer.train(resume_from_checkpoint=resume)
        return trainer.state.log_history

    plain, whole = run(f"{folder}/plain", cad=False), run(folder, cad=True)
    again = run(folder, cad=True, resume=f"{folder}/checkpoint-2")
    trainers.assert_same_and_balanced("in one go", plain, whole)
    trainers.assert_same_and_balanced("resumed", plain, again)
    assert trainers.losses_of(again) == pytest.approx(trainers.losses_of(whole), abs=1e-6)
    assert '"cad"' not in open(f"{folder}/checkpoint-4/config.json").read()


@pytest.mark.slow
def test_save_and_resume(fresh_workers: WorkerPool, tmp_path) -> None:
    fresh_workers.run(_save_and_resume, WORLD, str(tmp_path), timeout=100.0)
