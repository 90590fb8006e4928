"""The commands of docs/ that need no GPU are run as they stand there; what they save loads without this package."""

from __future__ import annotations

import re
import shlex
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
    """What torchrun starts; torchrun itself is tried in test_run.py."""
    torchrun, option, count, *words = shlex.split(command)
    assert (torchrun, option) == ("torchrun", "--nproc_per_node")
    done = launch(int(count), [*words, "--save", str(tmp_path)], ROOT, DS_ACCELERATOR="cpu")
    assert done.returncode == 0, done.stderr[-4000:]
    said = done.stdout
    assert "attention max/mean" in said and "loss" in said
    if "own_model.py" in command:
        return  # no model of transformers, and it saves nothing
    parameters, attention = launch(1, ["-c", LOAD, str(tmp_path)], ROOT).stdout.split()[-2:]
    assert int(parameters) > 50_000 and attention != "cad"
