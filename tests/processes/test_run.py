"""`-m deepspeed_cad.run` and `accelerate-cad`: what was asked for reaches the processes that a command starts, and none
that trained without CAD ends with 0. Real launchers start a script without CAD in it, in place and beside a reserved
server, whose trainers are dealt the same rows. How a process ends is tried in Pythons of their own with stand-ins for
torch and the check.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import training
from launched import ROOT, SCRIPT, accelerate_yaml, deepspeed_launcher, run, run_ranks, torchrun, trained, zero
from ports import free_port
from trainers import AFTER, BEFORE, assert_same, losses_of, write_inputs

from deepspeed_cad.launch import armed

STAND_INS = """
import sys, types
active = types.ModuleType("deepspeed_cad.integrations.active")
class ProcessCheck:
    was_active = False
    trained_without, made = "", 0
    def __init__(self, asked_by, config):
        ProcessCheck.asked = (asked_by, config.tolerance)
        ProcessCheck.made += 1
    def problem(self):
        return ProcessCheck.trained_without
active.ProcessCheck = ProcessCheck
sys.modules["deepspeed_cad.integrations.active"] = active
"""


def _run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Where modules of the folder are found too."""
    return run(list(words), folder, PYTHONPATH=f"{folder}{os.pathsep}{ROOT}")


ENDS = {
    "returns": ("", "main"), "sys.exit(0)": ("sys.exit(0)", "main"), "os._exit(0)": ("os._exit(0)", "main"),
    "a child returns": ("", "child"), "a fork calls os._exit(0)": ("os._exit(0)", "fork"),
}  # fmt: skip


def _end(folder: Path, end: str, where: str, trains: str) -> subprocess.CompletedProcess[str]:
    (folder / "sitecustomize.py").write_text(STAND_INS)
    (folder / "torch.py").write_text("")
    trained = "import os, sys, torch\nfrom deepspeed_cad.integrations.active import ProcessCheck\n" + trains + "\n"
    (folder / "trained.py").write_text(trained + end)
    starts = {
        "main": trained + end,
        "child": f"import subprocess, sys\nsys.exit(subprocess.call([sys.executable, {str(folder / 'trained.py')!r}]))",
        "fork": "import os, sys, torch\nchild = os.fork()\nif not child:\n "
        + (trained + end).replace("\n", "\n ")
        + "\nsys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))",
    }
    (folder / "script.py").write_text(starts[where])
    return _run(folder, "-m", "deepspeed_cad.run", "--cad", '{"tolerance": 0.2}', "script.py")


@pytest.mark.parametrize("without", [True, False])
@pytest.mark.parametrize(("end", "where"), ENDS.values(), ids=ENDS)
def test_a_process_that_trained_without_does_not_end_well(tmp_path, end: str, where: str, without: bool) -> None:
    trains = "ProcessCheck.trained_without = f'without {ProcessCheck.asked} {ProcessCheck.made}'"
    done = _end(tmp_path, end, where, trains if without else "")
    assert done.returncode == (armed.EXIT_CODE if without else 0), done.stderr
    said = done.stderr.count("deepspeed_cad: rank 0: without ('--cad', 0.2) 1")
    assert said == without and "Traceback" not in done.stderr and ("deepspeed_cad" in done.stderr) == without


@pytest.mark.parametrize(("end", "code"), [("sys.exit(7)", 7), ("os._exit(7)", 7), ("raise KeyError", 1)])
def test_an_exit_code_of_its_own_is_kept(tmp_path, end: str, code: int) -> None:
    assert _end(tmp_path, end, "main", "").returncode == code


@pytest.mark.parametrize("python, words, local_rank", [
    ([], ["script.py"], []), ([], ["inner/script.py"], ["--local_rank=3"]), ([], ["-m", "inner.script"], []),
    *([(["-P"], ["script.py"], [])] if sys.version_info >= (3, 11) else []),
])  # fmt: skip
def test_a_script_finds_itself_as_if_started_alone(tmp_path, python, words, local_rank) -> None:
    (tmp_path / "inner").mkdir()
    code = "import os, sys; print(__name__, sys.path, *sys.argv[1:], os.path.basename(sys.argv[0]))"
    (tmp_path / "inner" / "script.py").write_text(code)
    here = tmp_path / "inner" if words == ["script.py"] else tmp_path
    done = run([*python, "-m", "deepspeed_cad.run", *local_rank, *words, "--", "own"], here)
    alone = run([*python, *words, *local_rank, "--", "own"], here)
    assert "own script.py" in alone.stdout and done.stdout == alone.stdout, done.stderr


def test_a_python_without_the_hook_warns(tmp_path) -> None:
    (tmp_path / "script.py").write_text("")
    done = _run(tmp_path, "-S", "-m", "deepspeed_cad.run", "script.py")
    assert done.returncode == 0 and "the installed hook is not active" in done.stderr


@pytest.mark.long
def test_trl_sft(tmp_path) -> None:
    """On two processes, which the command starts itself."""
    pytest.importorskip("trl.cli")
    (tmp_path / "data").mkdir()
    write_inputs(tmp_path)
    (tmp_path / "data.jsonl").rename(tmp_path / "data" / "train.jsonl")
    # As pip writes the command.
    (tmp_path / "trl_command.py").write_text("import sys\nfrom trl.cli import main\nsys.exit(main())\n")
    settings = {
        "model_name_or_path": "model", "dataset_name": str(tmp_path / "data"), "dataset_text_field": "text",
        "packing": "true", "max_length": "256", "max_steps": "4", "per_device_train_batch_size": "1",
        "logging_steps": "1", "save_strategy": "no", "report_to": "none", "learning_rate": "1e-2", "use_cpu": "true",
        "bf16": "false", "output_dir": "out",
    }  # fmt: skip
    words = [word for key, value in settings.items() for word in (f"--{key}", value)]
    two = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--main_process_port", str(free_port())]
    asked = ["-m", "deepspeed_cad.run", "--cad", json.dumps(training.BLOCK)]
    done = _run(tmp_path, *asked, "trl_command.py", "sft", *words, *two)
    assert done.returncode == 0, done.stderr[-4000:]
    logged = [json.loads(found.replace("'", '"')) for found in re.findall(r"\{'loss'.*?\}", done.stdout + done.stderr)]
    assert len(logged) == 4 and max(float(entry[BEFORE]) for entry in logged) > 1.3
    assert max(float(entry[AFTER]) for entry in logged) < 1.05


LAUNCH = "from accelerate.commands.accelerate_cli import main; main()"
STEPS = 4


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses without CAD; the same for every loop of the script that shards data as DistributedSampler does."""
    return losses_of(trained(2, tmp_path_factory.mktemp("plain"), "ddp")["log"])


def _launcher(way: str, processes: int, cad: list[str], folder: Path) -> list[str]:
    """The words in front of the script."""
    (folder / "ds.json").write_text(json.dumps(zero(3 if processes > 2 else 2, stage3_param_persistence_threshold=0)))
    (folder / "launch.yaml").write_text(accelerate_yaml(processes))
    if way == "deepspeed":
        return [*deepspeed_launcher(processes), "--module", *cad]
    if way == "accelerate launch":
        flags = ["--multi_gpu", "--num_processes", str(processes), "--num_machines", "1"]
        return ["-c", LAUNCH, "launch", *flags, "--main_process_port", str(free_port()), "-m", *cad]
    if way == "accelerate-cad":
        words = ["-m", "deepspeed_cad.cli.accelerate_cad", "launch", *cad[1:], "--config_file", "launch.yaml"]
        return [*words, "--main_process_port", str(free_port())]
    return [*torchrun(processes), "-m", *cad]


@pytest.mark.slow
@pytest.mark.parametrize("way, loop, servers", [
    ("torchrun", "ddp", 0), ("accelerate-cad", "accelerate", 0), ("deepspeed", "deepspeed", 1),
    *(pytest.param(*case, marks=pytest.mark.long) for case in (
        ("torchrun", "fsdp2", 0), ("torchrun", "ddp", 1), ("deepspeed", "deepspeed", 0),
        ("accelerate launch", "accelerate", 0), ("accelerate-cad", "accelerate", 1),
    )),
])  # fmt: skip
def test_launchers(plain: list[float], tmp_path: Path, way: str, loop: str, servers: int) -> None:
    """The JSON for DeepSpeed has no "cad" block."""
    block = training.BLOCK | ({"servers": {"reserved": servers}} if servers else {})
    words = _launcher(way, 2 + servers, ["deepspeed_cad.run", "--cad", json.dumps(block)], tmp_path)
    begin = time.perf_counter()
    found = trained(words, tmp_path, loop, "--json", "ds.json")
    took = time.perf_counter() - begin
    assert_same(losses_of(found["log"]), plain)
    before, after = found["balance"]
    assert before > 1.2 and after < 1.05
    assert found["argv"][0] == SCRIPT and found["argv"][1 + ("--local_rank=0" in found["argv"])] == loop
    if servers:
        done = rf"server 2 is done: {STEPS} micro-batches served, (.*) s busy of (.*) s, at most"
        said = re.search(done, found["said"])
        assert said and float(said[1]) <= float(said[2]) < took
    assert ("--local_rank=0" in found["argv"]) == (way == "deepspeed")


@pytest.mark.slow
def test_not_active_by_the_first_step(tmp_path: Path) -> None:
    """A script that takes an optimizer step without CAD ends with 2, and leaves nothing that looks trained."""
    words = ["-m", "deepspeed_cad.run", "--cad", json.dumps(training.BLOCK), SCRIPT, "eval", "out.json"]
    done = run_ranks(1, words, tmp_path)
    line = next(line for line in done.stderr.splitlines() if line.startswith("deepspeed_cad: rank"))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "not active at the first optimizer step" in line and "eval mode" in line and "--cad" in line
    assert not (tmp_path / "out.json").exists()
