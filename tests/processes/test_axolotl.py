"""The plugin of axolotl: in axolotl itself where it is installed, and against a stand-in that makes the same calls."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import training
from pool import WorkerPool
from trainers import PackedRows, assert_same, collate, losses_of, training_arguments, without_and_with, write_inputs

pytest.importorskip("pydantic")

INSTALLED = importlib.util.find_spec("axolotl") is not None
YAML = {
    "datasets": [{"path": "data.jsonl", "ds_type": "json", "type": "completion"}],
    "base_model": "model", "sample_packing": True, "pad_to_sequence_len": True, "sequence_len": 256,
    "micro_batch_size": 1, "max_steps": 6, "num_epochs": 1, "learning_rate": 0.01, "lr_scheduler": "constant",
    "optimizer": "adamw_torch", "logging_steps": 1, "save_strategy": "no", "val_set_size": 0, "bf16": False,
    "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "attn_implementation": "sdpa", "dataset_prepared_path": "prepared", "output_dir": "out", "use_tensorboard": False,
}  # fmt: skip
PLUGIN = {
    "plugins": ["deepspeed_cad.integrations.axolotl.CADPlugin"],
    "cad": {"granularity": 16, "tolerance": 0.02, "links": training.LINKS},
}


class _BasePlugin:
    """What plugins derive from."""


def _plugin() -> Any:
    """Our plugin, imported as axolotl imports it."""
    if not INSTALLED:
        for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
            sys.modules.setdefault(name, types.ModuleType(name))
        sys.modules["axolotl.integrations.base"].BasePlugin = _BasePlugin
    from importlib import import_module

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

    cfg = {"cad": PLUGIN["cad"], "sample_packing": True}
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


def _run_axolotl(folder: Path, config: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """The Trainer's log and what was said."""
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    here = Path(__file__).resolve().parent
    env = os.environ | {"PYTHONPATH": str(here.parents[1]), "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(here / "axolotl_on_cpu.py")]
    done = subprocess.run(
        [sys.executable, *words, str(folder / "config.yaml")],
        cwd=folder, env=env, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    log = folder / "log.json"
    return (json.loads(log.read_text()) if log.exists() else []), done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="axolotl is not installed")
def test_axolotl_itself(tmp_path) -> None:
    write_inputs(tmp_path)
    plain, said = _run_axolotl(tmp_path, YAML)
    assert len(losses_of(plain)) == 6, said[-4000:]
    (tmp_path / "log.json").unlink()
    cad, said = _run_axolotl(tmp_path, YAML | PLUGIN)
    assert_same(losses_of(cad), losses_of(plain))
    steps = [entry for entry in cad if "loss" in entry]
    assert max(entry["cad/attention_max_over_mean_before"] for entry in steps) > 1.2
    assert max(entry["cad/attention_max_over_mean"] for entry in steps) < 1.05
    assert cad[-1]["cad/saved_s"] > 0
