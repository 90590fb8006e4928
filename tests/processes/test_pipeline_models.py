"""Checkpoints of transformers become pipelines and come back: the same losses, gradients and weights; the example of
pipelines, and the picture of its timeline."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pipeline_picture
import pipelines
import pytest
import torch
import training
from model_cases import tiny_config
from pool import WorkerPool
from scripts import printed_losses
from test_benchmarks import ROOT, torchrun
from told import told
from transformers import AutoModelForCausalLM, set_seed

import deepspeed_cad

BLOCK = {"cost": "pairs", "granularity": 2}
COUNT = 3
CHANGES: dict[str, dict[str, Any]] = {
    "qwen3": {"use_sliding_window": True, "max_window_layers": 1, "tie_word_embeddings": True},
    # Sinks, windows in every other layer, and experts.
    "gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
}


def _train_and_write(rank: int, world: int, source: str, target: str) -> tuple[float, dict[str, torch.Tensor]]:
    deepspeed = pipelines.start()
    module = deepspeed_cad.to_pipeline(source, stages=2)
    before = module.named_weights()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=pipelines.config(COUNT, cad=BLOCK))
    replica = engine.grid.get_data_parallel_id()
    batches: list[Any] = [training.pack(pipelines.documents_of(replica, m)) for m in range(COUNT)]
    batches[1] = told(pipelines.documents_of(replica, 1), "lengths")
    evaluated = float(engine.eval_batch(iter(batches), False, True, "avg", True, COUNT))
    loss = float(engine.train_batch(iter(batches)))
    assert abs(evaluated - loss) < 1e-5
    deepspeed_cad.to_hf(engine, target)
    after = module.named_weights()
    return loss, {name: before[name] - after[name] for name in before}


@pytest.mark.long
@pytest.mark.parametrize("kind", CHANGES)
def test_there_and_back(fresh_workers: WorkerPool, tmp_path: Path, kind: str) -> None:
    set_seed(0)
    config = tiny_config(kind, vocab_size=64, num_hidden_layers=4, sliding_window=16, **CHANGES[kind])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config.update(do_sample=True, top_k=7)
    model.save_pretrained(tmp_path / "before")
    found = fresh_workers.run(_train_and_write, 4, str(tmp_path / "before"), str(tmp_path / "after"), timeout=120.0)
    alone = copy.deepcopy(model)
    expected = pipelines.in_one_process(alone, 2, COUNT)
    gradients = {n: p.grad / 2 for n, p in alone.named_parameters()}
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "after", dtype=torch.float32)
    for loss, own in found:
        assert abs(loss - expected) < 1e-5
        for key, gradient in own.items():
            torch.testing.assert_close(gradient, gradients[key], atol=1e-5, rtol=0)
    assert {key for _, own in found for key in own} == set(gradients) and after.generation_config.top_k == 7
    for key, p in after.named_parameters():
        torch.testing.assert_close(p, dict(model.named_parameters())[key] - gradients[key], atol=1e-5, rtol=0)


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
