"""A checkpoint of transformers as a pipeline: the same loss and gradients; the example, and its timeline's picture."""

from __future__ import annotations

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
TIED = {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 16, "tie_word_embeddings": True}


def _train(rank: int, world: int, source: str) -> tuple[float, dict[str, torch.Tensor]]:
    deepspeed, module = pipelines.start(), deepspeed_cad.to_pipeline(source, stages=2)
    before, optimizer = module.named_weights(), torch.optim.SGD(module.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=pipelines.config(COUNT, cad=BLOCK))
    replica = engine.grid.get_data_parallel_id()
    batches: list[Any] = [training.pack(pipelines.documents_of(replica, m)) for m in range(COUNT)]
    batches[1] = told(pipelines.documents_of(replica, 1), "lengths")
    evaluated = float(engine.eval_batch(iter(batches), False, True, "avg", True, COUNT))
    loss = float(engine.train_batch(iter(batches)))
    assert abs(evaluated - loss) < 1e-5
    after = module.named_weights()
    return loss, {name: before[name] - after[name] for name in before}


@pytest.mark.long
def test_a_tied_embedding_on_both_stages(fresh_workers: WorkerPool, tmp_path: Path) -> None:
    """Of two replicas; its gradient is the sum of both."""
    set_seed(0)
    config = tiny_config("qwen3", num_hidden_layers=4, vocab_size=64, **TIED)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    found = fresh_workers.run(_train, 4, str(tmp_path), timeout=120.0)
    expected = pipelines.in_one_process(model, 2, COUNT)
    gradients = {name: p.grad / 2 for name, p in model.named_parameters()}
    assert {name for _, own in found for name in own} == set(gradients)
    for loss, own in found:
        assert abs(loss - expected) < 1e-5
        torch.testing.assert_close(own, {name: gradients[name] for name in own}, atol=1e-5, rtol=0)


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
