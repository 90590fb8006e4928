"""Reserved servers under real launchers: a script that knows nothing of CAD trains as on its trainers alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import training
from launched import accelerate_yaml, deepspeed_launcher, losses, torchrun, trained, zero
from ports import free_port
from trainers import assert_same

BLOCK = {"granularity": 16, "tolerance": 0.02, "servers": {"reserved": 1}, "links": training.LINKS}
CAD = ["deepspeed_cad.run", "--cad", json.dumps(BLOCK)]
STEPS = 3


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of two processes without CAD; every loop of the script deals the same rows to the same ranks."""
    return losses(trained(2, tmp_path_factory.mktemp("plain"), "ddp", "--steps", str(STEPS)))


def _check(plain: list[float], words: list[str], folder: Path, *script: str) -> None:
    """Two trainers and a server train as two processes do; a larger world would have dealt other rows."""
    found = trained(words, folder, *script, "--steps", str(STEPS))
    assert_same(losses(found), plain)
    before, after = found["balance"]
    assert before > 1.2 and after < 1.05
    assert f"server 2 is done: {STEPS} micro-batches served" in found["said"]


@pytest.mark.long
@pytest.mark.slow
def test_torchrun(plain: list[float], tmp_path: Path) -> None:
    _check(plain, [*torchrun(3), "-m", *CAD], tmp_path, "fsdp2")


@pytest.mark.slow
def test_deepspeed(plain: list[float], tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(zero(3, stage3_param_persistence_threshold=0)))
    _check(plain, [*deepspeed_launcher(3), "--module", *CAD], tmp_path, "deepspeed", "--json", "ds.json")


@pytest.mark.long
@pytest.mark.slow
def test_accelerate_cad_launch(plain: list[float], tmp_path: Path) -> None:
    (tmp_path / "launch.yaml").write_text(accelerate_yaml(3))
    words = ["-m", "deepspeed_cad.cli.accelerate_cad", "launch", *CAD[1:], "--config_file", "launch.yaml"]
    _check(plain, [*words, "--main_process_port", str(free_port())], tmp_path, "accelerate")
