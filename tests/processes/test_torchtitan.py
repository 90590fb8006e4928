"""The override of torchtitan, on a stand-in for what it derives from: as each document alone, and what is refused."""

import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import training
from cases import document_attention
from pool import WorkerPool

import deepspeed_cad
from deepspeed_cad.errors import CADUnsupportedError

LENGTHS = [[100, 28], [9] * 14 + [2]]


class _Module(torch.nn.Module):
    @dataclass(kw_only=True)
    class Config:
        inner_attention: Any = None

    def __init__(self, config: Any) -> None:
        super().__init__()

    def parallelize(self, parallel_dims: Any) -> None:
        """Nothing here."""


class _Varlen(_Module):
    @dataclass(kw_only=True)
    class Config:
        window_size: tuple[int, int] = (-1, 0)


class _Flex(_Module):
    @dataclass(kw_only=True)
    class Config:
        """It has none."""


class _Grouped(_Module):
    @dataclass(kw_only=True)
    class Config(_Module.Config):
        """As its base."""


def _room() -> Any:
    """Our module, imported as torchtitan imports it."""
    made: Any = ModuleType("torchtitan")
    made.no_typecheck, made.is_type_checking = nullcontext, lambda: False
    made.derive = lambda config, cls, **more: cls(**asdict(config), **more)
    made.override = lambda **given: lambda function: function
    made.BaseAttention, made.GQAttention, made.Attention = _Module, _Grouped, _Grouped
    made.FlexAttention, made.VarlenAttention, made.VarlenMetadata = _Flex, _Varlen, Any
    names = ("config", "models", "models.common", "models.common.attention", "models.deepseek_v3")
    names = (*(f"torchtitan.{name}" for name in (*names, "models.deepseek_v3.model")), "torchtitan", "spmd_types")
    sys.modules |= dict.fromkeys(names, made)
    return import_module("deepspeed_cad.integrations.torchtitan")


def _attend(rank: int, world: int) -> dict[str, Any]:
    """Two layers, one with a window, of two rows of documents; O and dQ, dK and dV."""
    given = _Grouped.Config(inner_attention=_Varlen.Config(window_size=(15, 0)))
    config = _room().cad(given, **training.BLOCK).inner_attention
    layers = [_room().Attention(config), _room().Attention(_room().Attention.Config(block=training.BLOCK))]
    assert [layer.window for layer in layers] == [16, None] and config.block == training.BLOCK
    gen = torch.Generator().manual_seed(rank)
    rows = [torch.randn(1, 128, heads, 16, generator=gen, dtype=torch.float64) for heads in (4, 2, 2)]
    ends = torch.tensor([0, *LENGTHS[rank]]).cumsum(0).to(torch.int32)
    for layer, scale in zip(layers, (None, 0.4)):
        own, leaves = ([x.clone().requires_grad_() for x in rows] for _ in range(2))
        layer(*own, attention_masks=SimpleNamespace(cu_seq_q=ends), scale=scale).square().sum().backward()
        for begin, end in zip(ends.tolist(), ends.tolist()[1:]):
            o = document_attention(*(x[0, begin:end] for x in leaves), scale or 0.25, layer.window)
            o.square().sum().backward()
        for one, other in zip(own, leaves):
            assert (one.grad - other.grad).abs().max() < 1e-10
    assert deepspeed_cad.current_session().statistics.micro_batches == 1
    return training.figures()


def test_as_each_document_alone(fresh_workers: WorkerPool) -> None:
    found = fresh_workers.run(_attend, 2)
    assert found[0]["after"] < 1.05 < found[0]["before"] and sum(one["sent"] for one in found) > 0


def _refused(rank: int, world: int) -> None:
    room = _room()
    plain = room.cad(_Grouped.Config(inner_attention=_Flex.Config()))  # its mask is causal inside documents
    assert plain.inner_attention.block == {}
    with pytest.raises(CADUnsupportedError, match='whose mask CAD cannot tell: build the model with attn_backend="var'):
        room.cad(_Module.Config(inner_attention=_Flex.Config()))
    with pytest.raises(CADUnsupportedError, match="CAD needs causal attention"):
        room.Attention(room.Attention.Config(window_size=(-1, -1)))
    with pytest.raises(CADUnsupportedError, match="pipeline_parallel_degree is 2"):
        room.Attention(room.Attention.Config()).parallelize(SimpleNamespace(pp=2, cp=1, tp=1))


def test_what_cannot_be_told_is_refused(fresh_workers: WorkerPool) -> None:
    fresh_workers.run(_refused, 1)
