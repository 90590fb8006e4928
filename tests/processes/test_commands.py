"""The commands of docs/ that need no GPU are run as they stand there; what they save loads without this package."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from forked import launch

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = sorted(
    {
        command
        for page in (ROOT / "docs").glob("*.md")
        for command in re.findall(r"```\n(torchrun --nproc_per_node 2 [^\n]*)\n```", page.read_text())
    }
)
LOAD = """
import sys
sys.modules["deepspeed_cad"] = None
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(sum(p.numel() for p in model.parameters()), model.config._attn_implementation)
"""


def _run(words: list[str]) -> str:
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_every_page_of_a_framework_has_a_command() -> None:
    assert len(COMMANDS) >= 4
    for page in ("accelerate", "trainer", "trl", "fsdp"):
        assert any(command in (ROOT / "docs" / f"{page}.md").read_text() for command in COMMANDS), page


OFTEN = ("trainer.py --tiny --steps 4", "trl_sft.py", "fsdp2.py")
"""One script for each framework (that of Accelerate is the Trainer's); the others before a release."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        command if any(name in command for name in OFTEN) else pytest.param(command, marks=pytest.mark.long)
        for command in (*COMMANDS, "torchrun --nproc_per_node 2 examples/lora.py --tiny --steps 2")
    ],
)
def test_command(tmp_path, command: str) -> None:
    torchrun, *words = shlex.split(command)
    assert torchrun == "torchrun"
    said = _run([sys.executable, "-m", "torch.distributed.run", "--standalone", *words, "--save", str(tmp_path)])
    assert "attention max/mean" in said and "loss" in said
    parameters, attention = launch(1, ["-c", LOAD, str(tmp_path)], ROOT).stdout.split()[-2:]
    assert int(parameters) > 50_000 and attention != "cad"
