"""Examples: the commands of docs/ that need no GPU are run as they stand there, and what they save loads without this
package; the one for a long document, from a checkpoint to a checkpoint, against the same documents on one rank."""

import json
import re
import shlex
from pathlib import Path

import pipeline_picture
import pytest
import torch
import trainers
from forked import launch
from scripts import ROOT, printed_losses
from transformers import AutoModelForCausalLM, AutoTokenizer

PAGES = "\n".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
COMMANDS = sorted(set(re.findall(r"```\n(torchrun --nproc_per_node 2 [^\n]*)\n```", PAGES)))
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
@pytest.mark.parametrize("command", [
    command if any(name in command for name in OFTEN) else pytest.param(command, marks=pytest.mark.long)
    for command in (*COMMANDS, "torchrun --nproc_per_node 2 examples/lora.py --tiny --steps 2")
])  # fmt: skip
def test_command(tmp_path, command: str) -> None:
    """What torchrun starts; torchrun itself is tried in test_run.py."""
    done = launch(2, [*shlex.split(command)[3:], "--save", str(tmp_path)], ROOT, DS_ACCELERATOR="cpu")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "attention max/mean" in done.stdout and "loss" in done.stdout
    if "own_model.py" in command:
        return  # no model of transformers, and it saves nothing
    parameters, attention = launch(1, ["-c", LOAD, str(tmp_path)], ROOT).stdout.split()[-2:]
    assert int(parameters) > 50_000 and attention != "cad"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="compares in fp32, on the CPU")
def test_a_checkpoint_is_trained_on_a_document_that_spans_ranks(tmp_path: Path) -> None:
    """From a checkpoint to one that loads, as on one rank."""
    trainers.write_inputs(tmp_path)
    config = json.loads((ROOT / "examples" / "ds_million_cad.json").read_text())
    config["cad"] |= {"granularity": 16}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    out, losses, words = tmp_path / "out", [], "--steps 3 --tokens 400 --tile 64".split()
    files = {"deepspeed_config": "ds.json", "model": "model", "data": "data.jsonl", "save": "out"}
    words += [word for name, file in files.items() for word in (f"--{name}", str(tmp_path / file))]
    for ranks in (1, 2):
        done = launch(ranks, ["examples/million_tokens.py", *words], ROOT, PYTHONWARNINGS="ignore")
        assert done.returncode == 0, done.stderr[-4000:]
        losses.append(printed_losses(done.stdout))
    assert losses[1] == pytest.approx(losses[0], abs=2e-5) and len(set(losses[0])) == 3
    AutoModelForCausalLM.from_pretrained(out)
    AutoTokenizer.from_pretrained(out)
    assert "cad" not in (out / "config.json").read_text()


@pytest.mark.slow
def test_tokens_that_do_not_divide() -> None:
    done = launch(2, "examples/million_tokens.py --tiny --tokens 511".split(), ROOT, PYTHONWARNINGS="ignore")
    assert done.returncode != 0 and "--tokens 511: ranks hold equally many tokens" in done.stderr


@pytest.mark.slow
def test_the_example_there_and_without_cad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same losses with the block and without; a checkpoint that transformers loads; a timeline with every tick."""
    monkeypatch.setenv("DEEPSPEED_CAD_TRACE_STEPS", "14")
    config = json.loads((ROOT / "examples" / "ds_pipeline_cad.json").read_text())
    config["cad"] = {"trace": str(tmp_path / "timeline.json"), "granularity": 16, "cost": "pairs"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = "examples/finetune_pipeline.py --tiny --stages 2 --micro-batches 3 --steps 3 --deepspeed_config".split()
    command.append(str(tmp_path / "config.json"))
    cad = launch(2, [*command, "--save", str(tmp_path / "saved")], ROOT)
    assert cad.returncode == 0, cad.stderr
    plain = launch(2, [*command, "--no-cad"], ROOT)
    assert plain.returncode == 0, plain.stderr
    assert printed_losses(cad.stdout) == pytest.approx(printed_losses(plain.stdout), abs=1e-5)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "saved").config.model_type == "llama"

    step = 2 * (3 + 2 - 1)
    ticks = pipeline_picture.read_ticks(tmp_path / "timeline.json", step)
    names = [[f"{one['cat'][0]} {one['name'].split(', ')[1]}" for one in own] for own in ticks]
    idle = [sum("serving" in name for name in own) for own in names]
    assert idle == [2, 2]  # each stage has no forward in one forward tick, and no backward in one backward tick
    for direction in "fb":
        assert [sum(name.startswith(f"{direction} micro-batch") for name in own) for own in names] == [3, 3]
    assert pipeline_picture.draw(ticks).count("<rect") == 1 + 2 * step + 3
