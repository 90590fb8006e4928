"""`-m deepspeed_cad.run` and `accelerate-cad` under real launchers: a script without CAD in it, and bad input."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from trainers import assert_same, losses_of

import _deepspeed_cad_autoload as hook
from deepspeed_cad.cli import accelerate_cad
from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADConfigError
from deepspeed_cad.request import VARIABLE, Request, read_environment

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(Path(__file__).with_name("script_train.py"))
CAD = ["-m", "deepspeed_cad.run", "--cad", '{"granularity": 16, "tolerance": 0.02}']
LAUNCH = "from accelerate.commands.accelerate_cli import main; main()"
YAML = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
mixed_precision: 'no'
num_machines: 1
num_processes: 2
use_cpu: false
"""


def _port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def _run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        env.pop(name, None)
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    env["HF_HOME"] = str(folder)
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=200
    )  # fmt: skip


def _torchrun(world: int) -> list[str]:
    return ["-m", "torch.distributed.run", "--nproc_per_node", str(world), "--master_port", _port()]


def _trained(words: list[str], folder: Path, *script: str) -> dict:
    out = folder / f"out{len(list(folder.iterdir()))}.json"
    done = _run([*words, SCRIPT, script[0], str(out), *script[1:]], folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


def _losses(found: dict) -> list[float]:
    return losses_of(found["log"])


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> list[float]:
    """Losses without CAD; the same for every loop of the script that shards data as DistributedSampler does."""
    return _losses(_trained(_torchrun(2), tmp_path_factory.mktemp("plain"), "ddp"))


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["accelerate", "ddp", "fsdp2"])
def test_torchrun(plain, tmp_path, loop: str) -> None:
    found = _trained([*_torchrun(2), *CAD], tmp_path, loop)
    assert_same(_losses(found), plain)
    before, after = found["balance"]
    assert before > 1.2 and after < 1.05
    assert found["argv"][0] == SCRIPT and found["argv"][1] == loop


@pytest.mark.slow
def test_four_processes_with_the_trainer(tmp_path) -> None:
    without = _trained(_torchrun(4), tmp_path, "trainer")
    found = _trained([*_torchrun(4), *CAD], tmp_path, "trainer")
    assert_same(_losses(found), _losses(without))
    for entry in found["log"]:
        assert entry["cad/attention_max_over_mean"] < 1.05 < entry["cad/attention_max_over_mean_before"]


@pytest.mark.slow
def test_accelerate_launch(plain, tmp_path) -> None:
    flags = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--main_process_port", _port()]
    found = _trained(["-c", LAUNCH, "launch", *flags, *CAD], tmp_path, "accelerate")
    assert_same(_losses(found), plain)
    assert found["balance"][1] < 1.05


@pytest.mark.slow
def test_accelerate_cad_launch_with_a_yaml(plain, tmp_path) -> None:
    config = tmp_path / "launch.yaml"
    config.write_text(YAML)
    command = ["-m", "deepspeed_cad.cli.accelerate_cad", "launch", *CAD[2:]]
    command += ["--config_file", str(config), "--main_process_port", _port()]
    found = _trained(command, tmp_path, "accelerate", "--steps", "4")
    assert_same(_losses(found), plain)
    assert found["balance"][1] < 1.05


@pytest.mark.slow
def test_deepspeed_launcher(plain, tmp_path) -> None:
    """Its script calls deepspeed.initialize with a JSON that has no "cad" block."""
    (tmp_path / "ds.json").write_text(json.dumps(_zero(2)))
    launcher = "from deepspeed.launcher.runner import main; main()"
    words = ["-c", launcher, "--num_gpus", "2", "--master_port", _port(), "--module", *CAD[1:]]
    found = _trained(words, tmp_path, "deepspeed", "--json", "ds.json")
    assert_same(_losses(found), plain)
    assert found["balance"][1] < 1.05
    assert "--local_rank=0" in found["argv"]


def _zero(stage: int, **changes) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        **changes,
    }


# Bad input: one clear line, and no training


def _refused(folder: Path, *words: str, run: list[str] = CAD) -> str:
    done = _run([*run, SCRIPT, *words], folder)
    assert done.returncode == 2, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    return next(line for line in done.stderr.splitlines() if line.startswith("deepspeed_cad: rank"))


@pytest.mark.slow
def test_not_active_by_the_first_step(tmp_path) -> None:
    line = _refused(tmp_path, "eval", "out.json")
    assert "not active at the first optimizer step" in line and "eval mode" in line and "--cad" in line
    assert not (tmp_path / "out.json").exists()


@pytest.mark.slow
def test_dispatch_batches(tmp_path) -> None:
    assert "dispatch_batches=False" in _refused(tmp_path, "trainer", "out.json", "--dispatch")


@pytest.mark.slow
def test_a_model_that_cannot_be_switched(tmp_path) -> None:
    assert "attention_dropout" in _refused(tmp_path, "accelerate", "out.json", "--heads-dropout", "0.1")


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["deepspeed", "trainer"])
def test_two_sources_that_disagree(tmp_path, loop: str) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(_zero(1, cad={"tolerance": 0.3, "granularity": 16})))
    done = _run([*_torchrun(1), *CAD, SCRIPT, loop, "out.json", "--json", "ds.json"], tmp_path)
    assert done.returncode != 0
    line = next(line for line in done.stderr.splitlines() if line.startswith("deepspeed_cad: rank"))
    assert 'the "cad" block of the DeepSpeed JSON disagree in tolerance: 0.02 and 0.3' in line


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--cad", "{tolerance: 1}"], "is not JSON"),
        (["--cad", '{"tolerence": 1}'], 'did you mean "tolerance"?'),
        (["--cad_config", "none.json"], "cannot read"),
        ([], "is not there"),
    ],
)
def test_command_line_of_run(tmp_path, monkeypatch, capsys, flags: list[str], said: str) -> None:
    from deepspeed_cad.run import main

    monkeypatch.chdir(tmp_path)
    assert main([*flags, "train.py"]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["launch", "--cad", '{"bogus": 1}', "train.py"], 'unknown key "bogus"'),
        (["launch", "--cad={", "train.py"], "is not JSON"),
        (["launch", "--cad_config", "none.json", "train.py"], "cannot read"),
    ],
)
def test_bad_input_of_accelerate_cad(started, capsys, words: list[str], said: str) -> None:
    assert accelerate_cad.main(words) == 2 and not started
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.fixture
def started(monkeypatch) -> list[list[str]]:
    """What accelerate-cad would have become; the environment is put back afterwards."""
    words: list[list[str]] = []
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setitem(sys.modules, "_deepspeed_cad_autoload", hook)
    monkeypatch.setattr(os, "execv", lambda program, all_words: words.append(all_words))
    return words


@pytest.mark.parametrize(
    ("ours", "block", "asked_by"),
    [
        (["--cad", '{"tolerance": 0.1}'], {"tolerance": 0.1}, "--cad"),
        (["--cad_config=block.json"], {"overlap": "none"}, "--cad_config block.json"),
        ([], {}, "accelerate-cad launch"),
    ],
)
def test_what_accelerate_cad_gives_to_accelerate(started, tmp_path, monkeypatch, ours, block, asked_by) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "block.json").write_text('{"overlap": "none"}')
    theirs = ["--num_processes", "2", "train.py", "--cad", "x"]
    assert accelerate_cad.main(["launch", *ours, *theirs]) == 0
    assert started == [[sys.executable, "-m", "accelerate.commands.launch", *theirs]]
    assert read_environment() == Request(CADConfig.from_dict(block), asked_by)


def test_accelerate_cad_needs_the_hook(started, monkeypatch, capsys) -> None:
    monkeypatch.delitem(sys.modules, "_deepspeed_cad_autoload")
    assert accelerate_cad.main(["launch", "train.py"]) == 2 and not started
    assert "the installed hook is not active" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--help"], ["launch", "--help"], ["launch", "--cad", "{}", "-h"]])
def test_help_of_accelerate_cad_says_what_its_flags_mean(started, capsys, words: list[str]) -> None:
    try:
        assert accelerate_cad.main(words) == 0
    except SystemExit as end:
        assert end.code == 0
    shown = capsys.readouterr().out
    assert 'the "cad" block, such as' in shown and "a JSON file with the block in it" in shown and not started


def test_plugin_refuses_unknown_keys() -> None:
    pytest.importorskip("accelerate")
    from deepspeed_cad.integrations.accelerate import CADPlugin

    with pytest.raises(CADConfigError, match="did you mean"):
        CADPlugin(tolerence=0.1)
