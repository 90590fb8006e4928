"""Checkpoints of transformers become pipelines and come back: the same losses, gradients and weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pipelines
import pytest
import torch
import training
from pool import WorkerPool
from told import told

BLOCK = {"cost": "pairs", "granularity": 2}
COUNT = 3


def _config(name: str) -> Any:
    from transformers import GptOssConfig, Qwen3Config, Qwen3MoeConfig

    common = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    }  # fmt: skip
    if name == "qwen3, tied":
        return Qwen3Config(**common | {"head_dim": 8, "tie_word_embeddings": True})
    if name == "qwen3, two kinds of layers":
        return Qwen3Config(**common, head_dim=8, use_sliding_window=True, sliding_window=16, max_window_layers=1)
    if name == "gpt-oss":
        # Sinks, windows in every other layer, and experts.
        return GptOssConfig(
            **common | {"num_hidden_layers": 4}, head_dim=8, sliding_window=16, num_local_experts=4,
            num_experts_per_tok=2, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )  # fmt: skip
    moe = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return Qwen3MoeConfig(**common, **moe)


NAMES = ["qwen3, tied", "qwen3, two kinds of layers", "qwen3 moe", "gpt-oss"]


def _train_and_write(rank: int, world: int, source: str, target: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss of one step; the gradients of this stage; and the checkpoint after the step."""
    import deepspeed_cad

    deepspeed = pipelines.start()
    module = deepspeed_cad.to_pipeline(source, stages=2)
    before = module.named_weights()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    config = pipelines.config(COUNT, cad=BLOCK)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    replica = engine.grid.get_data_parallel_id()
    batches: list[Any] = [training.pack(pipelines.documents_of(replica, m)) for m in range(COUNT)]
    batches[1] = told(pipelines.documents_of(replica, 1), "lengths")
    evaluated = float(engine.eval_batch(iter(batches)))
    loss = float(engine.train_batch(iter(batches)))
    assert abs(evaluated - loss) < 1e-5
    deepspeed_cad.to_hf(engine, target)
    after = module.named_weights()
    return loss, {name: before[name] - after[name] for name in before}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_there_and_back(fresh_workers: WorkerPool, tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM, set_seed

    set_seed(0)
    model = AutoModelForCausalLM.from_config(_config(name), dtype=torch.float32)
    model.save_pretrained(tmp_path / "before")
    found = fresh_workers.run(_train_and_write, 4, str(tmp_path / "before"), str(tmp_path / "after"), timeout=120.0)
    alone = copy.deepcopy(model)
    expected = pipelines.in_one_process(alone, 2, COUNT)
    gradients = {n: p.grad / 2 for n, p in alone.named_parameters()}
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "after", dtype=torch.float32)
    seen: set[str] = set()
    for loss, own in found:
        assert abs(loss - expected) < 1e-5
        for key, gradient in own.items():
            torch.testing.assert_close(gradient, gradients[key], atol=1e-5, rtol=0)
            seen.add(key)
    assert seen == set(gradients)
    for key, p in after.named_parameters():
        torch.testing.assert_close(p, dict(model.named_parameters())[key] - gradients[key], atol=1e-5, rtol=0)
