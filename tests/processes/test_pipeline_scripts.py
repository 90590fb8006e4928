"""The example and the benchmark of pipelines, small, on CPU processes; and the picture of a timeline."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from test_benchmarks import ROOT, torchrun

sys.path.insert(0, str(ROOT / "docs"))

import pipeline_picture


def _losses(output: str) -> list[float]:
    return json.loads(re.search(r"losses: (\[.*\])", output).group(1))


@pytest.mark.slow
def test_the_example_there_and_without_cad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same losses with the block and without; a checkpoint that transformers loads; a timeline with every tick."""
    from transformers import AutoModelForCausalLM

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
    assert _losses(cad.stdout) == pytest.approx(_losses(plain.stdout), abs=1e-5)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "saved").config.model_type == "llama"

    step = 2 * (3 + 2 - 1)
    ticks = pipeline_picture.read_ticks(tmp_path / "timeline.json", step)
    names = [[f"{one['cat'][0]} {one['name'].split(', ')[1]}" for one in own] for own in ticks]
    idle = [sum("serving" in name for name in own) for own in names]
    assert idle == [2, 2]  # each stage has no forward in one forward tick, and no backward in one backward tick
    for direction in "fb":
        assert [sum(name.startswith(f"{direction} micro-batch") for name in own) for own in names] == [3, 3]
    assert pipeline_picture.draw(ticks).count("<rect") == 1 + 2 * step + 3


@pytest.mark.slow
def test_the_benchmark(tmp_path: Path) -> None:
    done = torchrun(
        2, "benchmarks/pipeline.py", "--workload", "benchmarks/workloads/heavy_64k_4r.json", "--tokens", "256",
        "--scale", "--layers", "2", "--hidden", "32", "--heads", "4", "--kv-heads", "2", "--ffn", "48", "--vocab", "64",
        "--micro-batches", "3", "--steps", "1", "--repeats", "1", "--cad", '{"granularity": 16, "cost": "pairs"}',
        "--output", str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (found,) = (json.loads(path.read_text()) for path in tmp_path.glob("*.json"))
    losses = found["losses"]
    assert losses["cad"] == pytest.approx(losses["1f1b"], abs=1e-4)
    assert losses["none"] != pytest.approx(losses["1f1b"], abs=1e-5)
    assert set(found["seconds"]) == {"1f1b", "cad", "none", "bound", "pool"} and found["attention_s_of_all_ranks"] > 0
