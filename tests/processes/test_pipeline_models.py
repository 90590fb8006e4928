"""The example of pipelines, with CAD and without, and the picture of its timeline."""

import json
from pathlib import Path

import pipeline_picture
import pytest
from scripts import printed_losses
from test_benchmarks import ROOT, torchrun
from transformers import AutoModelForCausalLM


@pytest.mark.slow
def test_the_example_there_and_without_cad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same losses with the block and without; a checkpoint that transformers loads; a timeline with every tick."""
    monkeypatch.setenv("DEEPSPEED_CAD_TRACE_STEPS", "14")
    config = json.loads((ROOT / "examples" / "ds_pipeline_cad.json").read_text())
    config["cad"] = {"trace": str(tmp_path / "timeline.json"), "granularity": 16, "cost": "pairs"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [
        "examples/finetune_pipeline.py", "--tiny", "--stages", "2", "--micro-batches", "3", "--steps", "3",
        "--deepspeed_config", str(tmp_path / "config.json"),
    ]  # fmt: skip
    cad = torchrun(2, *command, "--save", str(tmp_path / "saved"))
    assert cad.returncode == 0, cad.stderr
    plain = torchrun(2, *command, "--no-cad")
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
