"""flash-attn 2 (`flash_attn`): compiled kernels for Ampere and newer. Shapes as in interface.py."""

from __future__ import annotations

import re
from importlib import metadata
from typing import Any

import torch

from deepspeed_cad.kernels.interface import KernelNeed, MaskRule, Sequences
from deepspeed_cad.kernels.support import call_with, new_gradients, refuse_common, try_import, window_of

OLDEST = (2, 6, 1)
"""Before 2.5.7 LSE of sequences of different lengths is laid out in another way; 2.5.7 to 2.6.0 raise on such calls."""


class FlashAttention2:
    """Any mask; value heads of the size of query heads."""

    name = "flash_attn_2"

    def refuse(self, need: KernelNeed) -> str | None:
        """See Kernel.refuse."""
        reason = refuse_common(need, largest_head=256, least_capability=(8, 0))
        if reason is not None:
            return reason
        if need.head_dim != need.value_dim:
            return f"value heads have size {need.value_dim}, query heads {need.head_dim}; it needs them equal"
        module, missing = try_import("flash_attn.flash_attn_interface")
        if module is None:
            return missing
        version = _version()
        if version < OLDEST:
            return (
                f"flash-attn {'.'.join(map(str, version)) or 'of unknown version'} is installed, and before "
                f"{'.'.join(map(str, OLDEST))} it gives LSE in another layout or fails: pip install -U flash-attn"
            )
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
        found = call_with(
            _interface()._flash_attn_varlen_forward, q=q_QHD, k=k_KGD, v=v_KGV, return_softmax=False,
            **_arguments(sequences, rule),
        )  # fmt: skip
        # (out, lse, …) since 2.7; (out, q, k, v, out_padded, lse, …) before.
        o_QHV, lse = (found[0], found[1]) if len(found) == 4 else (found[0], found[5])
        return o_QHV, lse.t()

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
            _interface()._flash_attn_varlen_backward,
            dout=do_QHV, q=q_QHD, k=k_KGD, v=v_KGV, out=o_QHV, softmax_lse=lse_QH.t().contiguous(),
            dq=dq, dk=dk, dv=dv, deterministic=torch.are_deterministic_algorithms_enabled(),
            **_arguments(sequences, rule),
        )  # fmt: skip
        return dq, dk, dv


def _version() -> tuple[int, ...]:
    """What the installed package says of itself, (2, 8, 3) for "2.8.3.post1"; () where nothing does."""
    try:
        text = metadata.version("flash_attn")
    except metadata.PackageNotFoundError:
        text = getattr(try_import("flash_attn")[0], "__version__", "")
    numbers = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


def _interface() -> Any:
    return try_import("flash_attn.flash_attn_interface")[0]


def _arguments(sequences: Sequences, rule: MaskRule) -> dict[str, Any]:
    left, right = window_of(rule.window)
    return {
        "cu_seqlens_q": sequences.cu_q,
        "cu_seqlens_k": sequences.cu_k,
        "max_seqlen_q": sequences.max_q,
        "max_seqlen_k": sequences.max_k,
        "dropout_p": 0.0,
        "softmax_scale": rule.scale,
        "causal": rule.window is None,
        "window_size": (left, right),
        "window_size_left": left,
        "window_size_right": right,
        "softcap": rule.softcap or 0.0,
        "alibi_slopes": None,
    }
