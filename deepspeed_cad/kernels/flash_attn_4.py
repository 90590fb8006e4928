"""FlashAttention-4 (`flash_attn.cute`): Hopper and newer, kernels compiled on first use.

Uses the functions below its autograd layer, with outputs allocated here.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch

from deepspeed_cad.kernels.flash import FlashAttention, Three, new_gradients, try_import
from deepspeed_cad.kernels.interface import KernelNeed, MaskRule, Sequences

ONE_TILE = 256
"""Lengths are announced as more than this: the library compiles other kernels where everything fits in one tile, and
those of a layer should be the same whatever lengths a step brings."""


class FlashAttention4(FlashAttention):
    """Any mask and head sizes up to 256 on Hopper; on newer GPUs what the library takes there."""

    name, least_capability, equal_heads = "flash_attn_4", (9, 0), False

    def refuse_more(self, need: KernelNeed, capability: tuple[int, int]) -> str | None:
        major, sizes = capability[0], (need.head_dim, need.value_dim)
        if major in (10, 11) and max(sizes) > 128 and sizes not in ((192, 128), (256, 256)):
            return f"query and value heads of sizes {sizes}; on this GPU it takes up to 128, (192, 128) and (256, 256)"
        if major == 10 and sizes == (256, 256) and need.softcap:
            return "no soft-cap with heads of size 256 on this GPU"
        if major >= 12 and (need.softcap or need.deterministic):
            return "neither soft-cap nor deterministic gradients on this GPU"
        module, missing = try_import("flash_attn.cute.interface")
        if module is None:
            return missing
        if not hasattr(module, "_flash_attn_fwd") or not hasattr(module, "_flash_attn_bwd"):
            return "this version of flash_attn.cute has not the functions that are used here"
        return None

    def attend(
        self, qkv: Three, sequences: Sequences, rule: MaskRule, out_QHV: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q_QHD, _, v_KGV = qkv
        rows, heads = q_QHD.shape[:2]
        o_QHV = out_QHV
        if o_QHV is None:
            o_QHV = torch.empty(rows, heads, v_KGV.shape[2], dtype=q_QHD.dtype, device=q_QHD.device)
        lse_HQ = torch.empty(heads, rows, dtype=torch.float32, device=q_QHD.device)
        _interface()._flash_attn_fwd(*qkv, softcap=rule.softcap, out=o_QHV, lse=lse_HQ, **_arguments(sequences, rule))
        return o_QHV, lse_HQ

    def differentiate(
        self, do_QHV: torch.Tensor, qkv: Three, o_QHV: torch.Tensor, lse_HQ: torch.Tensor,
        sequences: Sequences, rule: MaskRule, into: Three | None,
    ) -> Three:  # fmt: skip
        dq, dk, dv = made = new_gradients(qkv) if into is None else into
        _interface()._flash_attn_bwd(
            *qkv, o_QHV, do_QHV, lse_HQ, softcap=rule.softcap or 0.0,
            deterministic=torch.are_deterministic_algorithms_enabled(), dq=dq, dk=dk, dv=dv,
            **_arguments(sequences, rule),
        )  # fmt: skip
        return made


@functools.cache
def _interface() -> Any:
    # Said by its compiler about every kernel, and of no consequence.
    warnings.filterwarnings("ignore", message="Argument aux_data .* cannot be converted to a JitArgument")
    return try_import("flash_attn.cute.interface")[0]


def _arguments(sequences: Sequences, rule: MaskRule) -> dict[str, Any]:
    return {
        "cu_seqlens_q": sequences.cu_q,
        "cu_seqlens_k": sequences.cu_k,
        "max_seqlen_q": max(sequences.max_q, ONE_TILE + 1),
        "max_seqlen_k": max(sequences.max_k, ONE_TILE + 1),
        "softmax_scale": rule.scale,
        "causal": rule.window is None,
        "window_size_left": None if rule.window is None else rule.window - 1,
        "window_size_right": None if rule.window is None else 0,
    }
