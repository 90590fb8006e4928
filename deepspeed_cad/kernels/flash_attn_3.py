"""FlashAttention-3 (`flash_attn_interface`): compiled kernels for Hopper. Shapes as in interface.py."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed_cad.kernels.interface import KernelNeed, MaskRule, Sequences
from deepspeed_cad.kernels.support import accepts, call_with, new_gradients, refuse_common, try_import, window_of


class FlashAttention3:
    """Hopper; any mask; value heads of the size of query heads."""

    name = "flash_attn_3"

    def refuse(self, need: KernelNeed) -> str | None:
        """See Kernel.refuse."""
        reason = refuse_common(need, largest_head=256, least_capability=(9, 0))
        if reason is not None:
            return reason
        if torch.cuda.get_device_capability(need.device)[0] != 9:
            return "it has kernels for Hopper GPUs only"
        if need.head_dim != need.value_dim:
            return f"value heads have size {need.value_dim}, query heads {need.head_dim}; its backward needs them equal"
        if need.deterministic and need.head_dim > 192:
            return "its gradients are not deterministic with heads above 192"
        module, missing = try_import("flash_attn_interface")
        if module is None:
            return missing
        backward = getattr(module, "_flash_attn_backward", None)
        if backward is None or not accepts(backward, "cu_seqlens_q"):
            return "this version of flash_attn_interface has no backward for sequences of different lengths"
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
        """See Kernel.forward; the LSE is a transposed view of the library's [H, Q]."""
        o_QHV, lse_HQ, *_ = call_with(
            _interface()._flash_attn_forward, q=q_QHD, k=k_KGD, v=v_KGV, **_arguments(sequences, rule)
        )
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
        dq, dk, dv = new_gradients(q_QHD, k_KGD, v_KGV)
        call_with(
            _interface()._flash_attn_backward,
            dout=do_QHV, q=q_QHD, k=k_KGD, v=v_KGV, out=o_QHV, softmax_lse=lse_QH.t().contiguous(),
            dq=dq, dk=dk, dv=dv, deterministic=torch.are_deterministic_algorithms_enabled(),
            **_arguments(sequences, rule),
        )  # fmt: skip
        return dq, dk, dv


def _interface() -> Any:
    return try_import("flash_attn_interface")[0]


def _arguments(sequences: Sequences, rule: MaskRule) -> dict[str, Any]:
    left, right = window_of(rule.window)
    return {
        "cu_seqlens_q": sequences.cu_q,
        "cu_seqlens_k": sequences.cu_k,
        "max_seqlen_q": sequences.max_q,
        "max_seqlen_k": sequences.max_k,
        "softmax_scale": rule.scale,
        "causal": rule.window is None,
        "is_causal": rule.window is None,
        "window_size": (left, right),
        "window_size_left": left,
        "window_size_right": right,
        "softcap": rule.softcap or 0.0,
    }
