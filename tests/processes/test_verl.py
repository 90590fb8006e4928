"""verl itself, where it is installed with the transformers that it takes: its SFT trainer and FSDP2 engine on a CPU."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import trainers
import transformers
from launched import run, torchrun
from packaging.version import Version

SCRIPT = str(Path(__file__).resolve().parent / "verl_on_cpu.py")
PACKAGES = ("verl", "ray", "tensordict", "hydra", "torchdata", "codetiming", "einops", "pandas")
BLOCK = json.dumps({"granularity": 16, "tolerance": 0.02, "forward_only": "balanced"})

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(None in map(importlib.util.find_spec, PACKAGES), reason=f"not installed: one of {PACKAGES}"),
    pytest.mark.skipif(Version(transformers.__version__) >= Version("5.11"), reason="verl needs transformers < 5.11"),
]


def _write_inputs(folder: Path) -> None:
    import pandas

    words = trainers.tokenizer()
    words.chat_template = (
        "{% for one in messages %}{{ one['content'] }} {% if one['role'] == 'assistant' %}</s> {% endif %}{% endfor %}"
    )
    trainers.write_model(folder, words)
    pick = random.Random(0)
    rows = []
    for _ in range(24):
        lengths = {"user": 5, "assistant": min(200, max(4, round(20 * pick.lognormvariate(0.0, 1.3))))}
        texts = {role: " ".join(f"w{pick.randrange(61)}" for _ in range(count)) for role, count in lengths.items()}
        rows.append([{"role": role, "content": text} for role, text in texts.items()])
    pandas.DataFrame({"messages": rows}).to_parquet(folder / "rows.parquet")


def _train(cad: bool, folder: Path, world: int, *words: str) -> list[dict[str, Any]]:
    """What all ranks wrote."""
    out = folder / f"out.{cad}"
    front = ["-m", "deepspeed_cad.run", "--cad", BLOCK] if cad else []
    command = [
        *torchrun(world), *front, SCRIPT, str(out), "model.path=model", "data.train_files=rows.parquet",
        "data.val_files=rows.parquet", "data.train_batch_size=8", "data.max_token_len_per_gpu=260",
        "data.max_length=300", "data.num_workers=0", "trainer.device=cpu", "engine=fsdp", "engine.strategy=fsdp2",
        "optim.lr=1e-3", "+engine.mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}",
        "trainer.resume_mode=disable", "engine.use_torch_compile=false", "trainer.total_training_steps=3",
        "trainer.logger=[console]", "checkpoint.save_contents=[]", *words,
    ]  # fmt: skip
    done = run(command, folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(f"{out}.{rank}") for rank in range(world)]


@pytest.mark.parametrize(("checkpointing", "world"), [(True, 2), (False, 4)])
def test_sft_and_the_engine(tmp_path: Path, checkpointing: bool, world: int) -> None:
    """Three steps of dynamic micro-batches with a critic and a reference beside the model, then log-probabilities of
    `infer_batch`: all equal and balanced."""
    _write_inputs(tmp_path)
    words = f"model.enable_gradient_checkpointing={checkpointing}"
    plain = _train(False, tmp_path, world, words)
    for found, expected in zip(_train(True, tmp_path, world, words), plain, strict=True):
        assert len(set(expected["losses"])) == 3
        assert len(set(expected["value losses"])) == 3
        for name in expected:
            for one, other in zip(found[name], expected[name], strict=True):
                torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(other), rtol=0, atol=1e-5)
        assert found["balance"][0] > 1.2 and found["balance"][1] < 1.05
        assert found["looks"] >= 3 and found["look_balance"] < 1.05 and found["models"] == 3
