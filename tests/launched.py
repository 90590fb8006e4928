"""tests/processes/script_train.py under real launchers, on CPUs: commands, and what a run gives."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from forked import launch
from ports import free_port
from scripts import ROOT

SCRIPT = str(ROOT / "tests" / "processes" / "script_train.py")


def run(words: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Python with these words, in a folder; all that it starts must end within 250 s."""
    env = os.environ | _variables(folder) | variables
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        env.pop(name, None)
    return subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=250)


def run_ranks(ranks: int, words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Ranks of Python with these words, without a launcher, where none is needed for what is tested."""
    return launch(ranks, words, folder, **_variables(folder))


def _variables(folder: Path) -> dict[str, str]:
    return {
        "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "HF_HOME": str(folder),
    }  # fmt: skip


def trained(words: list[str] | int, folder: Path, *script: str) -> dict[str, Any]:
    """What the script says after a launcher's words, or as so many ranks without one; what the processes wrote is under
    "said"."""
    out = folder / f"out{len(list(folder.iterdir()))}.json"
    command = [SCRIPT, script[0], str(out), *script[1:]]
    done = run_ranks(words, command, folder) if isinstance(words, int) else run([*words, *command], folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return {**json.loads(out.read_text()), "said": done.stdout + done.stderr}


def torchrun(processes: int) -> list[str]:
    return ["-m", "torch.distributed.run", "--nproc_per_node", str(processes)]


def deepspeed_launcher(processes: int) -> list[str]:
    launcher = "from deepspeed.launcher.runner import main; main()"
    return ["-c", launcher, "--num_gpus", str(processes), "--master_port", str(free_port())]


def accelerate_yaml(processes: int) -> str:
    """What `accelerate config` writes for one host."""
    return f"""
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
mixed_precision: 'no'
num_machines: 1
num_processes: {processes}
use_cpu: false
"""


def zero(stage: int, cad: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A JSON for DeepSpeed; `changes`: of "zero_optimization"."""
    return {
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage, **changes},
        "zero_allow_untested_optimizer": True, **({} if cad is None else {"cad": cad}),
    }  # fmt: skip
