"""The plugin of Accelerate in one process: what it takes, what it binds, what it refuses, whom it leaves alone."""

from argparse import Namespace
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import training

pytest.importorskip("accelerate")

from accelerate import Accelerator, DeepSpeedPlugin, skip_first_batches
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from accelerate.state import AcceleratorState
from accelerate.utils import DataLoaderConfiguration, DistributedType, InitProcessGroupKwargs
from deepspeed_cad.integrations import accelerate as ours
from deepspeed_cad.integrations.accelerate import CADPlugin

import deepspeed_cad
from deepspeed_cad.ahead.loader import LookAheadLoader
from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADConfigError, CADUnsupportedError


@pytest.fixture(autouse=True)
def fresh(monkeypatch) -> Iterator[list[str]]:
    """A state of Accelerate of the test's own, and who asked for checks."""
    checks: list[str] = []
    monkeypatch.setattr(ours, "ActivationCheck", checks.append)
    AcceleratorState._reset_state(True)
    yield checks
    AcceleratorState._reset_state(True)


@pytest.fixture
def bound(monkeypatch) -> list[Any]:
    """Models that CAD was turned on for."""
    models: list[Any] = []
    monkeypatch.setattr(ours, "apply", lambda model, config: models.append((model, config)))
    return models


def test_the_plugin_is_taken_out_and_others_stay(fresh) -> None:
    other, plugin = InitProcessGroupKwargs(), CADPlugin(tolerance=0.2)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[other, plugin])
    assert accelerator.init_handler is other
    assert getattr(accelerator, ours._PLUGIN) is plugin and plugin.config == CADConfig(tolerance=0.2)
    assert fresh == ["CADPlugin"]
    Accelerator(cpu=True, kwargs_handlers=[plugin])
    assert fresh == ["CADPlugin"]  # one check per plugin


@pytest.mark.parametrize("handlers", [None, [], [CADPlugin(enabled=False)]])
def test_without_a_plugin_nothing_is_bound(fresh, bound, handlers) -> None:
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
    accelerator.prepare(training.tiny_llama())
    assert not bound and not fresh and getattr(accelerator, ours._PLUGIN, None) is None


def test_models_that_are_prepared_for_training_are_bound(bound) -> None:
    accelerator = Accelerator(cpu=True, kwargs_handlers=[CADPlugin(tolerance=0.2)])
    model = accelerator.prepare(training.tiny_llama())
    accelerator.prepare(training.tiny_llama().requires_grad_(False), torch.nn.Linear(2, 2))
    accelerator.prepare_model(training.tiny_llama(), evaluation_mode=True)
    assert bound == [(model, CADConfig(tolerance=0.2))]


@pytest.mark.parametrize("kind, fsdp2, block, models", [
    (DistributedType.DEEPSPEED, False, {"cad": {"tolerance": 0.2}}, 0),
    (DistributedType.FSDP, True, {}, 1),
    (DistributedType.FSDP, False, {}, 0),  # prepare_model binds it
])  # fmt: skip
def test_what_is_done_before_everything_is_wrapped(bound, kind, fsdp2: bool, block: dict, models: int) -> None:
    json: dict[str, Any] = {}
    host = Namespace(
        distributed_type=kind, is_fsdp2=fsdp2, state=Namespace(deepspeed_plugin=Namespace(deepspeed_config=json)),
        **{ours._PLUGIN: CADPlugin(tolerance=0.2)},
    )  # fmt: skip
    model, original = training.tiny_llama(), lambda self, *args: (dict(json), len(bound))
    assert ours._prepare(original, host, model, "an optimizer") == (block, models)
    assert ours._prepare(original, Namespace(), model) == (json, models)


def test_every_accelerator_of_a_process_that_was_asked(bound) -> None:
    given = CADPlugin.of(CADConfig(tolerance=0.2), "a launcher")
    undo = ours.give_every_accelerator(given)
    try:
        assert getattr(Accelerator(cpu=True), ours._PLUGIN) is given
        same = CADPlugin(tolerance=0.2)
        assert getattr(Accelerator(cpu=True, kwargs_handlers=[same]), ours._PLUGIN) is same
        with pytest.raises(CADConfigError, match="a launcher and the script's CADPlugin disagree in tolerance"):
            Accelerator(cpu=True, kwargs_handlers=[CADPlugin(tolerance=0.3)])
    finally:
        undo()
    assert not hasattr(Accelerator(cpu=True), ours._PLUGIN)


@pytest.mark.parametrize("changes, said", [
    ({"parallelism_config": Namespace(cp_enabled=True)}, "context parallelism"),
    ({"distributed_type": DistributedType.MEGATRON_LM}, "Megatron-LM"),
])  # fmt: skip
def test_refusals(changes: dict[str, Any], said: str) -> None:
    parallel = Namespace(cp_enabled=False, sp_enabled=True, tp_enabled=True)
    fine = {"parallelism_config": parallel, "distributed_type": DistributedType.NO}
    fine |= {"dataloader_config": Namespace(dispatch_batches=None)}
    ours.refuse_accelerator(Namespace(**fine))
    with pytest.raises(CADUnsupportedError, match=said):
        ours.refuse_accelerator(Namespace(**fine | changes))


def test_handlers_and_loaders_are_refused() -> None:
    """When an Accelerator is made, and when a loader is prepared."""
    with pytest.raises(CADConfigError, match="more than one CADPlugin"):
        Accelerator(cpu=True, kwargs_handlers=[CADPlugin(), CADPlugin()])
    AcceleratorState._reset_state(True)
    dispatches, loader = DataLoaderConfiguration(dispatch_batches=True), object.__new__(DataLoaderDispatcher)
    for prepare in (
        lambda: Accelerator(cpu=True, kwargs_handlers=[CADPlugin()], dataloader_config=dispatches),
        lambda: ours._prepare_data_loader(lambda _, one: one, Namespace(**{ours._PLUGIN: CADPlugin()}), loader),
    ):
        with pytest.raises(CADUnsupportedError, match="dispatch_batches=False"):
            prepare()
    assert ours._prepare_data_loader(lambda _, one: one, Namespace(), loader) is loader


def test_the_block_is_handed_to_deepspeed() -> None:
    config, json = CADConfig(tolerance=0.2), {}
    ours.give_deepspeed(json, config, "a launcher")
    assert json == {"cad": {"tolerance": 0.2}}
    ours.give_deepspeed(json, config, "a launcher")
    with pytest.raises(CADConfigError, match="disagree in tolerance: 0.2 and 0.3"):
        ours.give_deepspeed({"cad": {"tolerance": 0.3}}, config, "a launcher")


@pytest.mark.parametrize("cad", [{"cad": {}}, {"cad": {"enabled": False}}, {}])
def test_a_json_that_accelerate_does_not_read_on_a_cpu(monkeypatch, cad: dict[str, Any]) -> None:
    """ACCELERATE_USE_CPU leaves DeepSpeed out without a word."""
    pytest.importorskip("deepspeed")
    deepspeed_cad.install()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "false")  # set by Accelerate, put back afterwards
    plugin = DeepSpeedPlugin(hf_ds_config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {}, **cad})
    if cad.get("cad") == {}:
        with pytest.raises(CADConfigError, match="Accelerate trains without DeepSpeed and reads neither: it found NO"):
            Accelerator(deepspeed_plugin=plugin)
    else:
        assert Accelerator(deepspeed_plugin=plugin).distributed_type == DistributedType.NO


def test_what_is_read_ahead_is_a_loader_of_accelerate() -> None:
    """That says which batch is the last, also where some are skipped."""
    loader = LookAheadLoader(DataLoaderShard(torch.arange(5), batch_size=1), mock.MagicMock())
    assert isinstance(loader, DataLoaderShard)
    skipped = skip_first_batches(loader, 3)
    assert [skipped.end_of_dataloader for _ in skipped] == [False, True]
