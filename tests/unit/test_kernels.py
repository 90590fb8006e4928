"""Kernels: torch_math against plain softmax and autograd in fp64; refusals and choices of the registry."""

import logging
import types
from importlib import metadata
from typing import Any
from unittest import mock

import pytest
import torch
from cases import document_attention, sequences_of

from deepspeed_cad.attention.serve import fold_sinks
from deepspeed_cad.errors import CADUnsupportedError
from deepspeed_cad.kernels import flash, registry, torch_math
from deepspeed_cad.kernels.flash import FlashAttention2, FlashAttention4, TorchVarlen
from deepspeed_cad.kernels.interface import KernelNeed, MaskRule, Sequences
from deepspeed_cad.kernels.registry import KERNELS, choose, names, try_all
from deepspeed_cad.kernels.torch_math import TorchMath

CPU = torch.device("cpu")


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences, rule: MaskRule) -> torch.Tensor:
    """O of every sequence: its query rows are the last ones of a document as long as its keys."""
    found = []
    for i in range(len(sequences.host_q) - 1):
        rows = slice(*sequences.host_q[i : i + 2])
        keys = slice(*sequences.host_k[i : i + 2])
        missing = (keys.stop - keys.start) - (rows.stop - rows.start)
        whole = torch.cat([q.new_zeros(missing, *q.shape[1:]), q[rows]])
        found.append(document_attention(whole, k[keys], v[keys], rule.scale, rule.window, rule.softcap)[missing:])
    return torch.cat(found)


@pytest.mark.parametrize("heads, groups", [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("window", [None, 1, 7, 500])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_torch_math_equals_autograd(
    heads: int, groups: int, window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 6 heads in many small blocks, and on views."""
    torch.manual_seed(0)
    monkeypatch.setattr(torch_math, "BLOCK_ELEMENTS", 200 if heads == 6 else torch_math.BLOCK_ELEMENTS)
    sequences = sequences_of([(1, 1), (5, 40), (33, 33), (1, 90)])
    rows, keys = int(sequences.host_q[-1]), int(sequences.host_k[-1])
    q, k, v = (
        torch.randn(n, h, d, dtype=torch.float64, requires_grad=True)
        for n, h, d in ((rows, heads, 8), (keys, groups, 8), (keys, groups, 12))
    )
    rule = MaskRule(0.3, window, softcap)
    expected = reference(q, k, v, sequences, rule)
    do = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, (q, k, v), do)
    kernel = TorchMath()
    # Views with gaps between their rows.
    q, k, v = (x.detach().repeat(1, 2, 1)[:, : x.shape[1]] for x in (q, k, v))
    o, lse = kernel.forward(q, k, v, sequences, rule)
    torch.testing.assert_close(o, expected.detach(), atol=1e-12, rtol=1e-12)
    assert lse.shape == (rows, heads)
    for one, other in zip(kernel.backward(do, q, k, v, o, lse, sequences, rule), gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_row_has_the_same_bits_however_its_document_is_cut(dtype: torch.dtype, sinks: bool) -> None:
    """A document alone, and its rows as servers get them: some heads, other rows, behind other documents."""
    torch.manual_seed(2)
    q, k, v = (torch.randn(331, heads, 16).to(dtype) for heads in (6, 2, 2))
    logits = torch.randn(6) if sinks else None

    def attend(begin: int, end: int, group: slice, before: int) -> list[torch.Tensor]:
        heads = slice(group.start * 3, group.stop * 3)
        rows = torch.cat([q[:before, heads], q[begin:end, heads]])
        keys, values = (torch.cat([x[:before], x[:end]])[:, group] for x in (k, v))
        sequences = sequences_of([(before, before), (end - begin, end)])
        o, lse = TorchMath().forward(rows, keys, values, sequences, MaskRule(0.25))
        if logits is not None:
            o, lse = fold_sinks(o, lse, logits[heads])
        return [o[before:], lse[before:]]

    whole = attend(0, 331, slice(0, 2), 0)
    for begin, end, group, before in (
        (0, 331, slice(0, 2), 57), (0, 5, slice(0, 2), 0), (70, 200, slice(1, 2), 9), (129, 331, slice(0, 1), 0),
        (330, 331, slice(0, 2), 3),
    ):  # fmt: skip
        heads = slice(group.start * 3, group.stop * 3)
        for one, other in zip(attend(begin, end, group, before), whole, strict=True):
            assert torch.equal(one, other[begin:end, heads]), (begin, end)


def need(**changes: object) -> KernelNeed:
    given: dict = {"device": CPU, "dtype": torch.bfloat16, "head_dim": 64, "value_dim": 64, "heads_per_group": 4}
    return KernelNeed(**{**given, **changes})


def test_on_the_cpu_auto_takes_torch_math_and_says_why_on_rank_0_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "deepspeed_cad"):
        assert choose("auto", need(), rank=1).name == "torch_math"
        assert not caplog.records
        assert choose("auto", need()).name == "torch_math"
        assert all(name in caplog.text for name in names())
        for kernel in KERNELS[2:]:
            registry._say(kernel, need(device=torch.device("cuda")), ["x: y"])
    assert [record.levelno for record in caplog.records] == [logging.DEBUG, logging.INFO, logging.INFO, logging.WARNING]
    assert caplog.messages[1] == "core attention runs on torch_varlen for heads of 64, bfloat16 (x: y)"


def test_a_kernel_asked_for_by_name_is_refused_with_its_reason() -> None:
    for name in names()[:-1]:
        with pytest.raises(CADUnsupportedError, match=f'"{name}".*needs an NVIDIA GPU.*cpu'):
            choose(name, need())
    assert choose("torch_math", need()).name == "torch_math"
    with pytest.raises(CADUnsupportedError, match='no kernel "fast".*flash_attn_4'):
        choose("fast", need())


LIBRARY = types.SimpleNamespace(_flash_attn_fwd=None, _flash_attn_bwd=None)  # of FlashAttention-4


@pytest.mark.parametrize("changes, capability, texts", [
    ({"dtype": torch.float32}, (9, 0), dict.fromkeys(names()[:-1], "float32")),
    ({"head_dim": 60, "value_dim": 60}, (9, 0), dict.fromkeys(names()[:-1], "size 60")),
    ({}, (8, 0), {"flash_attn_4": "8.0"}), ({}, (7, 5), {"flash_attn_2": "7.5", "torch_varlen": "7.5"}),
    ({"value_dim": 128}, (9, 0), dict.fromkeys(("flash_attn_2", "torch_varlen"), "128")),
    ({"softcap": True}, (9, 0), {"torch_varlen": "soft-cap"}),
    ({"head_dim": 192, "value_dim": 192}, (10, 0), {"flash_attn_4": "192"}),
    ({"deterministic": True}, (12, 0), {"flash_attn_4": "deterministic"}),
    ({"head_dim": 264, "value_dim": 264}, (9, 0), dict.fromkeys(names()[:-1], "multiples of 8 up to 256")),
    ({"head_dim": 256, "value_dim": 256, "softcap": True}, (10, 0), {"flash_attn_4": "no soft-cap with heads"}),
    ({"head_dim": 256, "value_dim": 256, "softcap": True}, (11, 0), {"flash_attn_4": ""}),
    ({"head_dim": 192, "value_dim": 128}, (10, 0), {"flash_attn_4": ""}),
    ({"head_dim": 128, "value_dim": 136}, (11, 0), {"flash_attn_4": "sizes (128, 136)"}),
    ({"head_dim": 128, "value_dim": 128}, (11, 0), {"flash_attn_4": "", "flash_attn_2": ""}),
    ({"head_dim": 128, "value_dim": 136}, (12, 0), {"flash_attn_4": ""}),
    ({"softcap": True}, (12, 0), {"flash_attn_4": "neither soft-cap nor"}),
])  # fmt: skip
def test_refusals_name_what_is_missing(
    changes: dict, capability: tuple[int, int], texts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(flash, "try_import", lambda name: (LIBRARY, ""))
    monkeypatch.setattr(flash, "_version", lambda: flash.OLDEST)
    for kernel in KERNELS:
        if kernel.name in texts:
            reason, text = kernel.refuse(need(device=torch.device("cuda", 0), **changes)) or "", texts[kernel.name]
            assert text in reason and bool(text) == bool(reason), (kernel.name, reason)


def test_every_backend_is_tried_and_one_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(name, works, "NVIDIA" in detail) for name, works, detail in try_all(CPU)]
    assert found == [*((name, False, True) for name in names()[:-1]), ("torch_math", True, False)]
    one, other = TorchMath(), TorchMath()
    one.forward = mock.Mock(side_effect=RuntimeError("no kernel image\nmore"))  # type: ignore[method-assign]
    other.backward = lambda *given: (torch.tensor(float("inf")),)  # type: ignore[assignment, method-assign]
    monkeypatch.setattr(registry, "KERNELS", (one, other))
    said = ["RuntimeError: no kernel image", "gives numbers that are not finite"]
    assert try_all(CPU) == [("torch_math", False, text) for text in said]


@pytest.mark.parametrize("version", ["2.3.6", "2.5.6", "2.5.9.post1", "2.6.0", "2.6.1", "2.8.3.post1+cu12", "10.0", ""])
def test_old_flash_attn_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    module = types.SimpleNamespace(**({"__version__": version} if version else {}))
    monkeypatch.setattr(flash, "try_import", lambda name: (module, ""))
    for told in (version or metadata.PackageNotFoundError, metadata.PackageNotFoundError):
        monkeypatch.setattr(metadata, "version", mock.Mock(side_effect=[told]))
        reason = FlashAttention2().refuse(need(device=torch.device("cuda", 0)))
        if version in ("2.6.1", "2.8.3.post1+cu12", "10.0"):
            assert reason is None
        else:
            number = version.removesuffix(".post1") or "of unknown version"
            assert reason is not None and f"flash-attn {number} is installed" in reason and "2.6.1" in reason


def test_a_library_without_what_is_called_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    half = [types.SimpleNamespace(**{name: None}) for name in vars(LIBRARY)]
    for module, said in *((one, "has not the functions") for one in half), (None, "is not installed"):
        monkeypatch.setattr(flash, "try_import", lambda name, module=module: (module, "is not installed"))
        assert said in str(FlashAttention4().refuse_more(need(), (9, 0)))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    arguments = torch.ops.aten._flash_attention_forward.default._schema.arguments
    assert TorchVarlen().refuse_more(need(), (9, 0)) is None
    old = mock.Mock(**{"default._schema.arguments": [one for one in arguments if "window" not in one.name]})
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", old)
    assert "is too old" in str(TorchVarlen().refuse_more(need(), (9, 0)))


@pytest.mark.parametrize("kernel", [FlashAttention2(), FlashAttention4(), TorchVarlen()], ids=("2", "4", "torch"))
@pytest.mark.parametrize("first", [(None,) * 4, ()], ids=("old", "new"))
@pytest.mark.parametrize("window, softcap", [(None, 2.0), (5, None)])
def test_libraries_get_and_give_what_they_name(
    kernel: Any, first: tuple[None, ...], window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand-ins; old versions of 2 give six things back, and 4 writes all where it is told."""
    softcap = None if isinstance(kernel, TorchVarlen) else softcap
    math, rule, sequences = TorchMath(), MaskRule(0.3, window, softcap), sequences_of([(3, 9), (4, 4)])

    def read(cu_q, cu_k, max_q, max_k, scale, causal, left, right, softcap=None):  # type: ignore[no-untyped-def]
        assert causal == (window is None) and (max_q, max_k) in ((4, 9), 2 * (flash.ONE_TILE + 1,))
        assert {left, right} <= {-1, None} if causal else right == 0
        rule = MaskRule(scale, None if causal else left + 1, softcap or None)
        return Sequences(cu_q.numpy(), cu_k.numpy(), cu_q, cu_k, 4, 9), rule

    def forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size,
                softcap, dropout_p, alibi_slopes, return_softmax):  # type: ignore[no-untyped-def]  # fmt: skip
        assert (dropout_p, alibi_slopes, return_softmax) == (0, None, False)
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        o, lse = math.forward(q, k, v, *read(*lengths, softmax_scale, causal, *window_size, softcap))
        return (o, *first, lse.t()) if first else (o, lse.t(), None, None)

    def backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                 softmax_scale, causal, window_size_left, window_size_right, softcap, dropout_p, alibi_slopes,
                 deterministic):  # type: ignore[no-untyped-def]  # fmt: skip
        assert (dropout_p, alibi_slopes, deterministic) == (0, None, False)
        mask = softmax_scale, causal, window_size_left, window_size_right, softcap
        given = read(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *mask)
        for into, x in zip((dq, dk, dv), math.backward(dout, q, k, v, out, softmax_lse.t(), *given)):
            into.copy_(x)

    def cute(q, k, v, *kept, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
             window_size_left, window_size_right, softcap, **into):  # type: ignore[no-untyped-def]  # fmt: skip
        mask = softmax_scale, causal, window_size_left, window_size_right, softcap
        given = read(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *mask)
        if not kept:
            into["out"][:], into["lse"].t()[:] = math.forward(q, k, v, *given)
            return
        assert into["deterministic"] is False and softcap is not None
        into["dq"][:], into["dk"][:], into["dv"][:] = math.backward(kept[1], q, k, v, kept[0], kept[2].t(), *given)

    def aten(*given, scale, window_size_left=None, window_size_right=None):  # type: ignore[no-untyped-def]
        *tensors, cu_q, cu_k, max_q, max_k, dropout, causal = given[: 9 if len(given) == 10 else 12]
        lengths = read(cu_q, cu_k, max_q, max_k, scale, causal, window_size_left, window_size_right)
        assert dropout == 0 and (given[9:] == (False,) or [x.tolist() for x in given[12:]] == [[0, 0]] * 2)
        if len(tensors) == 3:
            o, lse = math.forward(*tensors, *lengths)
            return o, lse.t(), *first
        return math.backward(*tensors[:5], tensors[5].t(), *lengths)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", aten)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", aten)

    module = types.SimpleNamespace(_flash_attn_varlen_forward=forward, _flash_attn_varlen_backward=backward)
    monkeypatch.setattr(flash, "try_import", lambda name: (module, "") if name == FlashAttention2.module else None)
    monkeypatch.setattr(flash, "_cute", lambda: types.SimpleNamespace(_flash_attn_fwd=cute, _flash_attn_bwd=cute))
    torch.manual_seed(0)
    q, do, k, v = (torch.randn(rows, heads, 8) for rows, heads in ((7, 4), (7, 4), (13, 2), (13, 2)))
    o, lse = kernel.forward(q, k, v, sequences, rule)
    expected = math.forward(q, k, v, sequences, rule)
    found = kernel.backward(do, q, k, v, o, lse, sequences, rule)
    for one, other in zip((o, lse, *found), (*expected, *math.backward(do, q, k, v, *expected, sequences, rule))):
        torch.testing.assert_close(one, other)
