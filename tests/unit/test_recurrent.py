"""Layers that carry state: which way each is run, and that nothing crosses the border of a document."""

from __future__ import annotations

import functools
import inspect
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed_cad.integrations.borders import NAME, Borders, Way, find_borders, find_way
from deepspeed_cad.integrations.recurrent import _OF_BORDERS, Ways, _Call, _package, _run
from deepspeed_cad.integrations.spanning import why_not
from hybrids import Kernels, alone, assert_same, difference, packed, run
from model_cases import DELTA, FP32, MAMBA, NEW, family, known_kind, tiny_config
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import AutoModelForCausalLM, DynamicCache

import deepspeed_cad
from deepspeed_cad.errors import CADError, CADUnsupportedError
from deepspeed_cad.layout import segments_from_positions
from deepspeed_cad.session import close_session

ROW = [[70, 3, 39, 1]]


def _tiny(kind: str) -> Any:
    if not known_kind(kind):
        pytest.skip(f"this version of transformers has no {kind}")
    if not NEW and kind != "lfm2":
        pytest.skip(f"this version of transformers runs {kind} outside of its interfaces")
    return family(kind)


def _apply(model: Any, **changes: Any) -> Any:
    """Twice, which is as once."""
    deepspeed_cad.apply(model, {"overlap": "local_first", **changes})
    return deepspeed_cad.apply(model, {"overlap": "local_first", **changes})


def _ways() -> dict[str, Way]:
    (binding,) = deepspeed_cad.current_session().bindings.values()
    return {kind[0].__name__: way for kind, way in binding.ways.found.items()}


@pytest.mark.parametrize("positions, mask, begin", [
    ([[0, 1, 2, 0, 1, 0]], None, [0, 3, 5, 6]), ([[0, 1, 2, 3]], None, [0, 4]),
    ([[0, 1, 2], [0, 1, 2]], None, [0, 3, 6]), ([[0, 1, 0], [0, 1, 2]], None, [0, 2, 3, 6]),
    ([[0, 1, 2], [0, 1, 0]], [[1, 1, 1], [1, 1, 0]], [0, 3, 6]),
    ([[0, 0, 1], [0, 1, 2]], [[0, 1, 1], [1, 1, 1]], [0, 1, 3, 6]), ([[0, 1, 0, 1, 0]], [[1, 1, 1, 1, 0]], [0, 2, 5]),
    ([[0, 0, 1]], [[0, 0, 0]], [0, 3]),
], ids=["packed", "one", "rows", "packed rows", "right", "left", "packed and padded", "padding only"])  # fmt: skip
def test_where_pieces_begin(positions: Any, mask: Any, begin: list[int]) -> None:
    """At batch rows and at documents; padding belongs to what is before it."""
    array = np.array(positions)
    found = find_borders(segments_from_positions(array, None if mask is None else np.array(mask)), *array.shape)
    assert found.tolist() == begin
    assert Borders(found, *array.shape).are_batch_rows == (len(begin) == len(array) + 1)


PATHS = {
    "qwen3_5_text": "transformers.models.qwen3_5.modeling_qwen3_5",
    "bamba": "transformers.models.bamba.modeling_bamba",
    "lfm2": "transformers.models.lfm2.modeling_lfm2",
}
CASES: list[tuple[str, list[str], Way]] = [
    ("qwen3_5_text", [], Way.DOCUMENTS), ("qwen3_5_text", ["delta_rule"], Way.GAPS),
    ("qwen3_5_text", ["delta_rule", "convolution"], Way.BORDERS), ("qwen3_5_text", ["convolution"], Way.DOCUMENTS),
    ("bamba", ["scan", "convolution"], Way.BORDERS), ("bamba", ["scan"], Way.DOCUMENTS),
    ("lfm2", ["convolution"], Way.BORDERS), ("lfm2", [], Way.GAPS),
]  # fmt: skip


@pytest.mark.parametrize("kind, kernels, way", CASES, ids=[f"{kind} {'+'.join(kernels)}" for kind, kernels, _ in CASES])
def test_way_and_result(kind: str, kernels: list[str], way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels get borders where they take them, in their form; whatever they do, documents are as they are alone."""
    if not NEW and kernels:
        pytest.skip("this version of transformers chooses kernels in another way")
    model, batch = _tiny(kind), packed(ROW)
    expected, fake = alone(model, batch, ROW), Kernels(monkeypatch, PATHS[kind])
    for name in kernels:
        getattr(fake, name)()
    _apply(model)
    assert_same(run(model, batch, ROW), expected, FP32)
    assert set(_ways().values()) == {way}
    calls = set(fake.calls)
    assert len(calls) == (len(kernels) if way is Way.BORDERS else 1 if kernels == ["delta_rule"] else len(calls))
    # One tensor for the probe, one for all layers of the micro-batch: FLA keeps what it computes of it by identity.
    assert len(fake.borders) <= 2 * (1 + (way is Way.GAPS))


@pytest.mark.skipif(not NEW, reason="this version of transformers chooses kernels in another way")
@pytest.mark.parametrize("leaks", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind, changes, kernel", [
    ("qwen3_5_text", DELTA, "delta_rule"), ("bamba", {"attn_layer_indices": [1], **MAMBA}, "scan"),
])  # fmt: skip
def test_probe_sees_in_bf16(
    kind: str, changes: Any, kernel: str, autocast: bool, leaks: bool, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """With weights as they are at the start of a pre-training, and all that bf16 rounds away: right kernels, and right
    convolutions beside a recurrence that ignores borders, whose state is small."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(kind, **changes)).train()
    model = model if autocast else model.to(torch.bfloat16)
    fake = Kernels(monkeypatch, PATHS[kind]).convolution()
    obeys = fake._sequence

    def ignores(name: str, given: Any, batch: int, tokens: int) -> list[int]:
        return obeys(name, given, batch, tokens) if name.startswith("causal") else [tokens]

    for name in ("_sequence", "_cumulative") if leaks else ():
        monkeypatch.setattr(fake, name, ignores)
    getattr(fake, kernel)()
    _apply(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(**packed(ROW)).logits.float().sum().backward()
        model.eval()(**packed(ROW))
    assert set(_ways().values()) == {Way.DOCUMENTS if leaks else Way.BORDERS}
    assert caplog.text.count("runs document by document") == leaks  # not again in evaluation


@pytest.mark.parametrize("lengths", [[[30], [30]], [[30], [17]], [[20, 10], [5, 25]], [[20, 9], [5]]], ids=str)
@pytest.mark.parametrize("kind", ["qwen3_5_text", pytest.param("bamba", marks=pytest.mark.slow), "lfm2"])
def test_batch_rows(kind: str, lengths: list[list[int]]) -> None:
    model, batch = _tiny(kind), packed(lengths)
    expected = alone(model, batch, lengths)
    assert_same(run(_apply(model), batch, lengths), expected, FP32)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["qwen3_5_text", "bamba", "lfm2"])
def test_padding_is_as_without_cad(kind: str, side: str) -> None:
    """Rows of one document each, whose padding the model blanks itself."""
    if not NEW and side == "left":
        pytest.skip("this version of transformers lets padding into convolutions")
    model, batch = _tiny(kind), packed([[30], [17]])
    if side == "left":
        batch = {name: value.flip(1) for name, value in batch.items()}
        batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    real = batch["attention_mask"].bool()
    expected = model(**batch).logits[real]
    assert difference(_apply(model)(**batch).logits[real], expected) < (FP32 if side == "left" else 1e-12)


KEPT = [torch.ops.aten.mm.default, torch.ops.aten.convolution.default]
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "reentrant": {"use_reentrant": True},
    "plain": {"use_reentrant": False},
    "selective": {"use_reentrant": False, "context_fn": functools.partial(create_selective_checkpoint_contexts, KEPT)},
}


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("checkpoint", list(CHECKPOINTS))
def test_checkpointing(checkpoint: str, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recompute has the borders of its micro-batch, and the probe leaves no trace in what was recorded."""
    model = _tiny("qwen3_5_text")
    first, second = packed(ROW), packed([[5, 60, 20]])
    expected = alone(model, first, ROW)
    if kernels:
        Kernels(monkeypatch, PATHS["qwen3_5_text"]).delta_rule().convolution()
    _apply(model)
    model.gradient_checkpointing_enable(CHECKPOINTS[checkpoint])
    model.zero_grad()
    logits = model(**first).logits
    model(**second)  # another micro-batch is in flight before the backward
    weights = torch.randn(logits[0].shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    (logits[0] * weights).sum().backward()
    got = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    assert_same((logits.detach()[0], got), expected, FP32)


@pytest.mark.parametrize("rank", [0, 1])
def test_evaluation(rank: int) -> None:
    """Packed rows are right there too, although a cache is on by default; generation is left alone."""
    model, batch = _tiny("lfm2").eval(), packed(ROW)
    with torch.no_grad():
        expected, prompt = alone(model, batch, ROW)[0], batch["input_ids"][:, :20]
        generated = model.generate(prompt, max_new_tokens=4, do_sample=False)
        _apply(model)
        session = deepspeed_cad.current_session()
        session.rank = rank
        assert difference(run(model, batch, ROW)[0], expected) < 1e-10
        assert torch.equal(model.generate(prompt, max_new_tokens=4, do_sample=False), generated)


@pytest.mark.parametrize("block, says", [
    ({}, "Qwen3_5GatedDeltaNet of layer 0 lets state cross"),
    ({"verify": 2, "check": "off"}, "the output of the decoder differs"),
])  # fmt: skip
def test_leak_that_comes_later_is_found(block: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampled check asks again in forward 1, 3, 7 and so on."""
    model = _tiny("qwen3_5_text").to(torch.float32)
    fake = Kernels(monkeypatch, PATHS["qwen3_5_text"]).delta_rule().convolution()
    _apply(model, **block)
    model(**packed(ROW))
    assert set(_ways().values()) == {Way.BORDERS}
    monkeypatch.setattr(fake, "_cumulative", lambda name, given, batch, tokens: [tokens])
    with pytest.raises(CADError, match=says):
        model(**packed(ROW))


@pytest.mark.skipif(not NEW, reason="this version of transformers hands such layers the mask of attention")
def test_replaced_forward_is_refused() -> None:
    """Hub kernels put a forward on the module itself, which hides what CAD puts around its class."""
    model = _tiny("lfm2")
    layer = model.model.layers[0].conv
    layer.forward = functools.partial(type(layer).forward, layer)
    with pytest.raises(CADUnsupportedError, match="forward of Lfm2ShortConv was replaced"):
        _apply(model)
    del layer.forward
    _apply(model)
    layer.forward = functools.partial(type(layer).__mro__[2].forward, layer)
    with pytest.raises(CADUnsupportedError, match="1 layers that carry state, but 0 ran"):
        model(**packed(ROW))


@pytest.mark.skipif(not NEW, reason="transformers 4 then misses its own mask there")
def test_decoder_that_drops_arguments_is_refused() -> None:
    """Then borders reach no layer, and state would cross them silently."""
    model = _apply(_tiny("lfm2"))

    def drop(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {name: value for name, value in kwargs.items() if name != NAME}

    model.model.register_forward_pre_hook(drop, with_kwargs=True)
    with pytest.raises(CADUnsupportedError, match="Lfm2Model does not hand arguments on to its layers"):
        model(**packed(ROW))


@pytest.mark.skipif(not NEW, reason="this version of transformers has a cache of its own for each hybrid")
def test_cache_of_packed_documents_is_refused() -> None:
    model = _apply(_tiny("lfm2"))
    with pytest.raises(CADUnsupportedError, match="Lfm2ShortConv of layer 0 got a cache for packed documents"):
        model(**packed(ROW), past_key_values=DynamicCache(config=model.config))


def test_projections_sharded_apart_are_refused() -> None:
    """They would be gathered once per document, a different number of times on each rank."""
    model = _tiny("qwen3_5_text")
    layer = model.model.layers[0].linear_attn
    layer.out_proj.weight.ds_id, layer.out_proj.weight.ds_z3_leaf_module = 0, layer
    _apply(model)
    model(**packed(ROW))  # gathered as a whole
    close_session()
    model = _tiny("qwen3_5_text")
    model.model.layers[0].linear_attn.out_proj.weight.ds_id = 0
    _apply(model)
    with pytest.raises(CADUnsupportedError, match=r"its out_proj is gathered on its own \(ZeRO-3\)"):
        model(**packed(ROW))


class Toy(nn.Module):
    """A running sum behind a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 8, 4, groups=8, padding=3, dtype=torch.float64)

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None, **more: Any) -> Any:
        return self.conv(hidden_states.transpose(1, 2))[..., : hidden_states.shape[1]].transpose(1, 2).cumsum(1)


def test_arguments_with_tokens_are_refused() -> None:
    """CAD would not cut them at borders; others, such as num_items_in_batch of the Trainer, pass."""

    def fail(error: Exception) -> None:
        raise error

    def inside(lengths: list[int]) -> Any:
        return type("Inside", (), {"borders": Borders.of_lengths(lengths), "ways": Ways(fail)})()

    toy, hidden = Toy(), torch.ones(1, 7, 8, dtype=torch.float64)
    with pytest.raises(CADUnsupportedError, match="Toy of layer . gets more, which CAD cannot cut"):
        _run(toy, toy.forward, inside([1, 1]), (hidden[:, :2],), {"more": [torch.ones(1, 2)]})
    found = _run(toy, toy.forward, inside([1]), (hidden[:, :1],), {"more": torch.ones(1)})
    assert torch.equal(found, toy(hidden[:, :1]))


@pytest.mark.parametrize("servers, shares, says", [
    ([2], 1, r'Toy of layer \? does not travel beside reserved servers \("servers"\)'), ([], 2, "ranks divide heads"),
    ([], 1, "Toy of layer . has no kernel that CAD knows"),
])  # fmt: skip
def test_why_state_stays(servers: list[int], shares: int, says: str) -> None:
    session = SimpleNamespace(servers=SimpleNamespace(at_start=servers), shares=SimpleNamespace(count=shares))
    assert re.search(says, why_not(session, {"toy": Toy()}))  # type: ignore[arg-type]


@pytest.mark.parametrize("name, axes, says", [
    ("GatedDeltaNet", 0, "flash-linear-attention"), ("ShortConv", 0, "Install causal-conv1d"),
    ("Mixer", 1, "mamba-ssm"), ("Mixer", 2, "no package makes it faster"),
])  # fmt: skip
def test_what_makes_a_layer_fast(name: str, axes: int, says: str) -> None:
    assert says in _package(type(name, (nn.Module,), {"A_log": torch.ones([2] * axes) if axes else None})())


def test_blind_probe_trusts_nothing() -> None:
    """A layer whose output is still zero shows no leak: documents run alone until it does."""
    toy = Toy()
    nn.init.zeros_(toy.conv.weight)
    call = _Call(toy, toy.forward, inspect.signature(toy.forward).parameters)
    some = inspect.signature(lambda hidden_states, seq_idx: 0).parameters
    assert call.takes == set(_OF_BORDERS) and _Call(toy, toy.forward, some).takes == {"seq_idx"}
    way, _, certain = find_way(call.run, call.whole, torch.randn(1, 5, 8).double(), list(Way))
    assert (way, certain) == (Way.DOCUMENTS, False)
