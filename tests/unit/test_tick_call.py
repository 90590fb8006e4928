"""One layer in a pipeline's ticks, in one process: what its backward may rely on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from attention_ranks import CPU
from cases import document_attention
from test_attention_call import GROUPS, HEADS, inputs
from torch.utils.checkpoint import checkpoint

from deepspeed_cad.attention.device_schedule import upload_schedule
from deepspeed_cad.attention.planned import whole_rank_tasks
from deepspeed_cad.attention.setup import CallCounts, CallSetup, Modes
from deepspeed_cad.errors import CADError
from deepspeed_cad.kernels.interface import MaskRule
from deepspeed_cad.kernels.torch_math import TorchMath
from deepspeed_cad.layout import Layout
from deepspeed_cad.pipeline.tick_call import TickCall
from deepspeed_cad.schedule import build_slices, schedule_rank

ROWS = 8
LABEL = "Attention of layer 3"
Change = Callable[[torch.Tensor], torch.Tensor]


def tick_call() -> TickCall:
    layout = Layout.from_rank_lengths([[ROWS]])
    tick = layout.tick()
    slices = build_slices(tick, whole_rank_tasks(layout, GROUPS), None)
    schedule = upload_schedule(schedule_rank(tick, slices, 0, GROUPS, None), CPU)
    setup = CallSetup(schedule, TorchMath(), None, MaskRule(1.0), Modes(), CallCounts(), label=LABEL)
    return TickCall(setup, lambda: setup)


def rows() -> list[torch.Tensor]:
    """Q, K, V as [ROWS, heads, size]."""
    return [x.detach()[0].transpose(0, 1).contiguous().requires_grad_() for x in inputs(ROWS)]


def test_gradients_of_the_sinks_that_the_forward_used() -> None:
    """The parameter may be another's memory by the backward."""
    given, sinks = rows(), torch.linspace(-1, 1, HEADS, dtype=torch.float64).requires_grad_()
    expected = torch.autograd.grad(document_attention(*given, 1.0, sinks=sinks).sum(), [*given, sinks])
    o = tick_call()(*given, sinks)
    sinks.data.fill_(float("nan"))
    for one, other in zip(torch.autograd.grad(o.sum(), [*given, sinks]), expected, strict=True):
        assert torch.allclose(one, other, atol=1e-12)


def double(o: torch.Tensor) -> torch.Tensor:
    return o.flatten(1).mul_(2).square()


def once() -> Change:
    """Changes O where it runs first, and leaves it alone where the layer runs again."""
    first = [True]

    def change(o: torch.Tensor) -> torch.Tensor:
        if first:
            first.clear()
            o.mul_(2)
        return o.flatten(1).square()

    return change


@pytest.mark.parametrize("make", [lambda: double, once], ids=["each time", "the first time"])
@pytest.mark.parametrize("again", [False, True], ids=["whole", "checkpointed"])
def test_output_changed_in_place_is_an_error(make: Callable[[], Change], again: bool) -> None:
    """Training would go on with wrong gradients, and a layer that runs again with another input than before."""
    call, change = tick_call(), make()

    def run(*given: torch.Tensor) -> torch.Tensor:
        return change(call(*given))

    o = checkpoint(run, *rows(), use_reentrant=False) if again else run(*rows())
    with pytest.raises(CADError, match=f"{LABEL}: its output was changed in place"):
        o.sum().backward()
