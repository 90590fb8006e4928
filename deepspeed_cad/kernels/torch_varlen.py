"""The FlashAttention in torch itself (what `torch.nn.attention.varlen` calls). Shapes as in interface.py."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed_cad.kernels.interface import KernelNeed, MaskRule, Sequences
from deepspeed_cad.kernels.support import refuse_common


class TorchVarlen:
    """Needs nothing but torch on an Ampere or newer GPU; no soft-cap; value heads of the size of query heads."""

    name = "torch_varlen"

    def refuse(self, need: KernelNeed) -> str | None:
        """See Kernel.refuse."""
        reason = refuse_common(need, largest_head=256, least_capability=(8, 0))
        if reason is not None:
            return reason
        if need.head_dim != need.value_dim:
            return f"value heads have size {need.value_dim}, query heads {need.head_dim}; it needs them equal"
        if need.softcap:
            return "it has no soft-cap"
        if not torch.backends.cuda.is_flash_attention_available():
            return "this torch is built without FlashAttention"
        names = {argument.name for argument in torch.ops.aten._flash_attention_forward.default._schema.arguments}
        if "window_size_left" not in names:
            return f"torch {torch.__version__} is too old: its FlashAttention has no windows and another LSE"
        return None

    def forward(
        self,
        q_QHD: torch.Tensor,
        k_KGD: torch.Tensor,
        v_KGV: torch.Tensor,
        sequences: Sequences,
        rule: MaskRule,
        out_QHV: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Kernel.forward; the LSE is a transposed view of the operator's [H, Q]."""
        o_QHV, lse_HQ, *_ = torch.ops.aten._flash_attention_forward(
            q_QHD, k_KGD, v_KGV, sequences.cu_q, sequences.cu_k, sequences.max_q, sequences.max_k, 0.0,
            rule.window is None, False, **_rule(rule),
        )  # fmt: skip
        return o_QHV, lse_HQ.t()

    def backward(
        self,
        do_QHV: torch.Tensor,
        q_QHD: torch.Tensor,
        k_KGD: torch.Tensor,
        v_KGV: torch.Tensor,
        o_QHV: torch.Tensor,
        lse_QH: torch.Tensor,
        sequences: Sequences,
        rule: MaskRule,
        into: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See Kernel.backward."""
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q_QHD.device)
        return torch.ops.aten._flash_attention_backward(
            do_QHV, q_QHD, k_KGD, v_KGV, o_QHV, lse_QH.t().contiguous(), sequences.cu_q, sequences.cu_k,
            sequences.max_q, sequences.max_k, 0.0, rule.window is None, no_dropout, no_dropout, **_rule(rule),
        )  # fmt: skip


def _rule(rule: MaskRule) -> dict[str, Any]:
    if rule.window is None:
        return {"scale": rule.scale}
    return {"scale": rule.scale, "window_size_left": rule.window - 1, "window_size_right": 0}
