"""torchtitan itself, its Trainer and debug models, on CPUs: the same with CAD as without."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from launched import run, torchrun

SCRIPT = Path(__file__).with_name("torchtitan_on_cpu.py")
STEPS, LAYERS = 3, 2

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed (pip install torchtitan)"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "ranks", "tensor"), [("llama3", 2, 1), ("qwen3", 2, 1), ("deepseek_v3", 2, 1), ("llama3", 4, 2)]
)
def test_debug_models_train_as_without(tmp_path: Path, model: str, ranks: int, tensor: int) -> None:
    """Under FSDP2, with the selective checkpointing of their configurations, and with tensor parallelism."""
    done = run([*torchrun(ranks), str(SCRIPT), model, str(tensor), str(tmp_path / "out.json")], tmp_path)
    assert done.returncode == 0, done.stderr[-6000:]
    found = json.loads((tmp_path / "out.json").read_text())
    assert len(found["seen"]) == STEPS and len({tuple(one) for one in found["seen"]}) == STEPS
    for ours, theirs in zip(found["seen"], found["expected"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-10), "losses and norms of gradients"
    assert found["error"] < 1e-9, "parameters after all steps"
    assert found["shares"] == tensor and found["before"] > 1.2 > 1.05 > found["after"]
    assert found["micro_batches"] == STEPS
    assert found["forwards"] == found["backwards"] == found["replays"] == STEPS * LAYERS
