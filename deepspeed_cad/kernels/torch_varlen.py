"""The FlashAttention in torch itself (what `torch.nn.attention.varlen` calls)."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed_cad.kernels.flash import FlashAttention, Three
from deepspeed_cad.kernels.interface import KernelNeed, MaskRule, Sequences


class TorchVarlen(FlashAttention):
    """Needs nothing but torch on an Ampere or newer GPU; no soft-cap; value heads of the size of query heads."""

    name = "torch_varlen"

    def refuse_more(self, need: KernelNeed, capability: tuple[int, int]) -> str | None:
        if need.softcap:
            return "it has no soft-cap"
        if not torch.backends.cuda.is_flash_attention_available():
            return "this torch is built without FlashAttention"
        names = {argument.name for argument in torch.ops.aten._flash_attention_forward.default._schema.arguments}
        if "window_size_left" not in names:
            return f"torch {torch.__version__} is too old: its FlashAttention has no windows and another LSE"
        return None

    def attend(
        self, qkv: Three, sequences: Sequences, rule: MaskRule, out_QHV: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        o_QHV, lse_HQ, *_ = torch.ops.aten._flash_attention_forward(
            *qkv, sequences.cu_q, sequences.cu_k, sequences.max_q, sequences.max_k, 0.0, rule.window is None, False,
            **_rule(rule),
        )  # fmt: skip
        return o_QHV, lse_HQ

    def differentiate(
        self, do_QHV: torch.Tensor, qkv: Three, o_QHV: torch.Tensor, lse_HQ: torch.Tensor,
        sequences: Sequences, rule: MaskRule, into: Three | None,
    ) -> Three:  # fmt: skip
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=do_QHV.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            do_QHV, *qkv, o_QHV, lse_HQ, sequences.cu_q, sequences.cu_k, sequences.max_q, sequences.max_k, 0.0,
            rule.window is None, no_dropout, no_dropout, **_rule(rule),
        )  # fmt: skip
        return dq, dk, dv


def _rule(rule: MaskRule) -> dict[str, Any]:
    if rule.window is None:
        return {"scale": rule.scale}
    return {"scale": rule.scale, "window_size_left": rule.window - 1, "window_size_right": 0}
