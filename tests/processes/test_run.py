"""`-m deepspeed_cad.run` and `accelerate-cad` under real launchers: a script without CAD in it, and bad input."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from trainers import assert_same, losses_of

from deepspeed_cad.cli import accelerate_cad
from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADConfigError

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
def test_accelerate_cad_launch_with_yaml_and_flags(plain, tmp_path) -> None:
    config = tmp_path / "launch.yaml"
    config.write_text(YAML + "cad_config:\n  cad_granularity: 16\n")
    command = ["-m", "deepspeed_cad.cli.accelerate_cad", "launch", "--config_file", str(config)]
    command += ["--cad_tolerance", "0.02", "--cad-overlap=local_first", "--main_process_port", _port()]
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
    return next(line for line in done.stderr.splitlines() if line.startswith("deepspeed_cad"))


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
    line = next(line for line in done.stderr.splitlines() if line.startswith("deepspeed_cad"))
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
    ("yaml", "flags", "said"),
    [
        ("cad_config:\n  cad_bogus: 1\n", [], 'unknown key "bogus"'),
        ("cad_config:\n  cad_tolerance: 7\n", [], "between 0 and 1"),
        ("cad_config: 5\n", [], "expected keys below it"),
        ("cad_tolerance: 0.1\n", [], "belong below"),
        ("cad_config:\n  tolerance: 0.1\n", ["--cad_tolerance", "0.2"], "configured twice, differently"),
        ("", ["--cad_tolerence", "0.2"], 'did you mean "tolerance"?'),
        ("", ["--num_processes", "2", "--cad-granularity=0.5"], "whole number"),
        ("", ["--no_python"], "not Python"),
    ],
)
def test_bad_input_of_accelerate_cad(tmp_path, capsys, yaml: str, flags: list[str], said: str) -> None:
    pytest.importorskip("accelerate")
    config = tmp_path / "launch.yaml"
    config.write_text(YAML + yaml)
    assert accelerate_cad.main(["launch", "--config_file", str(config), *flags, "train.py"]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_what_accelerate_cad_gives_to_accelerate(tmp_path, monkeypatch) -> None:
    launch = pytest.importorskip("accelerate.commands.launch")
    seen: list[Namespace] = []
    monkeypatch.setattr(launch, "launch_command", seen.append)
    config = tmp_path / "launch.yaml"
    config.write_text(YAML + "cad_config:\n  cad_tolerance: 0.1\n  overlap: none\n")
    flags = ["--config_file", str(config), "--cad_look_ahead", "0", "--cad_monitor", "False"]
    words = [*flags, "train.py", "--cad_x", "1"]
    assert accelerate_cad.main(["launch", *words]) == 0
    block = '{"tolerance": 0.1, "overlap": "none", "look_ahead": 0, "monitor": false}'
    assert seen[0].module and seen[0].training_script == "deepspeed_cad.run"
    assert seen[0].training_script_args == ["--cad", block, "train.py", "--cad_x", "1"]
    assert not [name for name in vars(seen[0]) if name.startswith("cad_")]
    assert accelerate_cad.main(["launch", "--num_processes", "1", "-m", "package.train", "x"]) == 0
    assert seen[1].training_script_args == ["--cad", "{}", "-m", "package.train", "x"]


def test_questions_of_accelerate_cad_config(monkeypatch, tmp_path) -> None:
    answers = iter(["yes", "5", "0.1", "", "true", "", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(answers))
    section = accelerate_cad.ask()
    assert section == {"cad_tolerance": 0.1, "cad_recompute_attention": True}
    CADConfig.from_dict({key.removeprefix("cad_"): value for key, value in section.items()})
    monkeypatch.setattr("builtins.input", lambda prompt: "no")
    assert accelerate_cad.ask() == {"cad_enabled": False}


def test_plugin_refuses_unknown_keys() -> None:
    pytest.importorskip("accelerate")
    from deepspeed_cad.integrations.accelerate import CADPlugin

    with pytest.raises(CADConfigError, match="did you mean"):
        CADPlugin(tolerence=0.1)


def test_a_run_that_never_packs_is_told_once(monkeypatch, caplog) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from deepspeed_cad.integrations import active

    statistics = Namespace(micro_batches=8, imbalance_before=1.0)
    monkeypatch.setattr(active, "current_session", lambda: Namespace(ranks=2, rank=0, statistics=statistics))
    check = active.ActivationCheck("a test")
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.step()
    assert check.was_active and not caplog.records
    statistics.micro_batches = 16
    for _ in range(3):
        optimizer.step()
    assert [record.message.count("nothing to balance") for record in caplog.records] == [1]
