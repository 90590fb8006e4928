"""What was asked for reaches the processes that a command starts, and none that trained without CAD ends with 0.

How a process ends is tried in Pythons of their own with stand-ins for torch and the check; launchers are tried with
real torchrun, accelerate and `trl sft`.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import training
from launched import ROOT, run
from ports import free_port
from trainers import AFTER, BEFORE, write_inputs

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
