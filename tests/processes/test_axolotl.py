"""The plugin of axolotl, against a stand-in that makes the calls of its plugin manager."""

from __future__ import annotations

import sys
import types
from importlib import import_module
from typing import Any

import pytest
import training
from pool import WorkerPool
from trainers import BLOCK, PackedRows, assert_same, collate, losses_of, training_arguments, without_and_with

pytest.importorskip("pydantic")


class _BasePlugin:
    """What plugins derive from."""


def _plugin() -> Any:
    """Our plugin, imported as axolotl imports it."""
    for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
        sys.modules.setdefault(name, types.ModuleType(name))
    sys.modules["axolotl.integrations.base"].BasePlugin = _BasePlugin
    return import_module("deepspeed_cad.integrations.axolotl").CADPlugin()


def test_keys_of_the_yaml() -> None:
    from deepspeed_cad.errors import CADConfigError, CADUnsupportedError

    plugin = _plugin()
    home, name = plugin.get_input_args().rsplit(".", 1)
    assert getattr(sys.modules[home], name)(cad={"tolerance": 0.1}).cad == {"tolerance": 0.1}
    plugin.pre_model_load({"cad": None, "sequence_parallel_degree": 1})
    with pytest.raises(CADConfigError, match="did you mean"):
        plugin.pre_model_load({"cad": {"tolerence": 0.1}})
    with pytest.raises(CADUnsupportedError, match="context_parallel_size is 2"):
        plugin.pre_model_load({"context_parallel_size": 2})


def _train(cad: bool, folder: str) -> list[dict[str, Any]]:
    from transformers import Trainer

    cfg = {"cad": BLOCK, "sample_packing": True}
    plugin = _plugin()
    plugin.pre_model_load(cfg)
    trainer = Trainer(
        model=training.sdpa_llama(), args=training_arguments(folder, max_steps=4), train_dataset=PackedRows(16),
        data_collator=collate,
    )  # fmt: skip
    if cad:
        plugin.post_trainer_create(cfg, trainer)
        for callback in plugin.add_callbacks_post_trainer(cfg, trainer):
            trainer.add_callback(callback)
    trainer.train()
    return trainer.state.log_history


def _compare(rank: int, world: int, folder: str) -> Any:
    return without_and_with(_train, folder)


@pytest.mark.slow
def test_same_losses(fresh_workers: WorkerPool, tmp_path) -> None:
    for plain, cad in fresh_workers.run(_compare, 2, str(tmp_path), timeout=60.0):
        assert_same(losses_of(cad), losses_of(plain))
        assert max(entry["cad/attention_max_over_mean"] for entry in cad if "loss" in entry) < 1.05
        assert cad[-1]["cad/saved_s"] > 0
