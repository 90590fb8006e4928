"""Baselines of the benchmarks that keep attention's output through activation checkpointing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from deepspeed_cad.attention.parking import Parking
from deepspeed_cad.kernels.interface import MaskRule
from deepspeed_cad.kernels.torch_math import TorchMath

sys.path[:0] = [str(Path(__file__).parents[2] / "benchmarks")]

from train_attention import Stopwatch, TimedKernel, VarlenAttention, make_sequences  # noqa: E402
from train_kept import KeptOutputs  # noqa: E402

CPU = torch.device("cpu")


class Layers:
    """Three projections, each with attention behind it."""

    def __init__(self, outputs: KeptOutputs | None) -> None:
        self.watch, self.outputs = Stopwatch(CPU), outputs
        self.kernel, self.sequences = TimedKernel(TorchMath(), self.watch), make_sequences([5, 7], [5, 7], CPU)
        torch.manual_seed(0)
        self.modules = [torch.nn.Linear(16, 48, dtype=torch.float64) for _ in range(3)]
        self.sinks = torch.zeros(4, dtype=torch.float64, requires_grad=True)
        self.watch.on = True

    def layer(self, module: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        q, k, v = module(hidden).view(12, 3, 4, 4).unbind(1)
        kept = None if self.outputs is None else self.outputs.of(module)
        o: Any = VarlenAttention.apply(q, k, v, self.kernel, self.sequences, MaskRule(0.5), self.sinks, kept)
        return hidden + o.flatten(1).tanh()

    def step(self, checkpointed: bool = True) -> list[torch.Tensor]:
        """Gradients of a step."""
        hidden = torch.linspace(-1, 1, 12 * 16, dtype=torch.float64).view(12, 16).requires_grad_()
        x = hidden
        for module in self.modules:
            x = checkpoint(self.layer, module, x, use_reentrant=False) if checkpointed else self.layer(module, x)
        weights = [p for module in self.modules for p in module.parameters()]
        return list(torch.autograd.grad(x.square().sum(), [hidden, self.sinks, *weights]))


@pytest.mark.parametrize("parking", [False, True])
def test_kept_outputs_are_attended_once(parking: bool) -> None:
    plain, kept = Layers(None), Layers(KeptOutputs(Parking(CPU, block=1 << 12) if parking else None))
    for _ in range(2):
        for expected, found in zip(plain.step(), kept.step()):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
    calls = [{name: count for name, (_, count) in layers.watch.take().items()} for layers in (plain, kept)]
    assert calls == [{"forward": 12, "backward": 6}, {"forward": 6, "backward": 6}]
