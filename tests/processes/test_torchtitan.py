"""torchtitan itself, its Trainer and debug models, on CPUs: the same with CAD as without."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

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
    # Adam makes up to 8e4 times as much (its rate / eps) of what tiny gradients differ by.
    assert found["error"] < 1e-8, "parameters after all steps"
    assert found["shares"] == tensor and found["before"] > 1.2 > 1.05 > found["after"]
    assert found["micro_batches"] == STEPS
    assert found["forwards"] == found["backwards"] == found["replays"] == STEPS * LAYERS


def test_what_cannot_be_told_is_refused() -> None:
    from deepspeed_cad.integrations.torchtitan import Attention, cad
    from torchtitan.models.gpt_oss import model_registry

    from deepspeed_cad.errors import CADUnsupportedError

    flex, varlen = (
        model_registry("debugmodel", attn_backend=backend).model.layers[0].attention for backend in ("flex", "varlen")
    )
    with pytest.raises(CADUnsupportedError, match='whose mask CAD cannot tell: build the model with attn_backend="var'):
        cad(flex)
    inner = cad(varlen, tolerance=0.1).inner_attention
    assert inner.block == {"tolerance": 0.1} and inner.window_size == varlen.inner_attention.window_size
    with pytest.raises(CADUnsupportedError, match="CAD needs causal attention"):
        Attention(Attention.Config(window_size=(-1, -1)))
    layer = Attention(Attention.Config(window_size=(15, 0)))
    assert layer.window == 16
    with pytest.raises(CADUnsupportedError, match="pipeline_parallel_degree is 2"):
        layer.parallelize(SimpleNamespace(pp=2, cp=1, tp=1))
