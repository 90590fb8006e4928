"""What a layer passes to its attention: the same kind, whoever runs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed_cad.integrations import pipeline
from deepspeed_cad.integrations.functions import attend_layer

from deepspeed_cad.attention.layer import LayerInput, LayerKind
from deepspeed_cad.errors import CADError, CADUnsupportedError
from deepspeed_cad.kernels.interface import MaskRule
from deepspeed_cad.pipeline.step import Alone
from deepspeed_cad.planner.plan import HeadShape


def heads() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q and K in fp32, as rotary embeddings leave them under autocast, V in bf16; [B, heads, S, D]."""
    q, k = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    return q, k, k.bfloat16()


def read(*given: Any) -> LayerInput:
    """What a layer hands on; `given`: from the module on, as attend_layer has it."""
    handed: list[LayerInput] = []

    def run(layer: LayerInput) -> torch.Tensor:
        handed.append(layer)
        return layer.q_THD

    assert attend_layer(run, *given).shape == (1, 6, 4, 8)
    return handed[0]


def layer() -> LayerInput:
    """The same as a layer hands it on."""
    return read(torch.nn.Module(), *heads(), 5, 1.0, 0.0, None, None, {})


class Stage:
    """Stands for the binding of a pipeline."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def see_mask(self, window: int | None, given: dict[str, Any]) -> None:
        self.seen.append((window, given["mask_function"]))

    def attend(self, layer: LayerInput) -> Any:
        self.seen.append(layer.rule.window)
        return layer.q_THD


@pytest.mark.parametrize("window", [None, 5])
def test_a_layer_of_a_pipeline_shows_its_mask(window: int | None) -> None:
    """Where it makes one; the window of the mask is that of the layer."""
    module, stage = torch.nn.Module(), Stage()
    setattr(module, pipeline._BINDING, stage)
    tensors = module, *heads()
    mask = pipeline.window_mask(mask_function=len, **({} if window is None else {"local_size": window}))
    pipeline.pipeline_attention(*tensors, mask)
    pipeline.pipeline_attention(*tensors, None, sliding_window=window)
    assert stage.seen == [(window, len), window, window]


class Mask:
    """Stands for the descriptor of a micro-batch."""

    def __init__(self, window: int | None) -> None:
        self.window = window

    def attend(self, layer: LayerInput) -> Any:
        return self.window


def test_the_first_look_at_a_pipeline_sees_layers_as_autocast_makes_them() -> None:
    """Ticks are planned for the kinds that it sees, and a layer of another kind is an error in training."""
    first = Alone(Mask, [])  # type: ignore[arg-type]
    with torch.autocast("cpu", torch.bfloat16):
        assert first.attend(layer()) == 5
    assert first.seen == [LayerKind(HeadShape(4, 2, 8, 8, 2), MaskRule(1.0, 5), torch.bfloat16)]


def test_what_a_layer_asks_for_is_read() -> None:
    sinks, tensors = torch.zeros(4), heads()
    module = torch.nn.Module()
    module.layer_idx = 7  # type: ignore[assignment]
    found = read(module, *tensors, 3, None, 0.0, 50.0, sinks, {"position_ids": None})
    assert found[:1] + found[4:] == (module, MaskRule(8**-0.5, 3, 50.0), sinks, "Module of layer 7")
    for rows, given in zip(found[1:4], tensors):
        assert torch.equal(rows, given[0].transpose(0, 1))
    assert read(module, *tensors, None, 2, 0.0, None, None, {}).rule == MaskRule(2.0)


@pytest.mark.parametrize(
    ("dropout", "others", "text"),
    [
        (0.1, {}, "attention dropout is 0.1"),
        (0.0, {"position_bias": torch.zeros(1)}, r"Module of layer \? passes position_bias"),
    ],
)
def test_what_cannot_be_reproduced_is_refused(dropout: float, others: dict[str, Any], text: str) -> None:
    with pytest.raises(CADUnsupportedError, match=text):
        read(torch.nn.Module(), *heads(), None, None, dropout, None, None, others)


def test_a_cache_is_refused() -> None:
    q, k, v = heads()
    with pytest.raises(CADError, match="12 keys for 6 queries: a KV cache is in use"):
        read(torch.nn.Module(), q, torch.cat([k, k], 2), torch.cat([v, v], 2), None, None, 0.0, None, None, {})
