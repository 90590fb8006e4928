"""FlashAttention-2 (`flash_attn`), compiled for Ampere and newer, and FlashAttention-3 (`flash_attn_interface`), for
Hopper. They take the same arguments but for a few, and each call is given those that its version has.
"""

from __future__ import annotations

import re
from importlib import metadata
from typing import Any

import torch

from deepspeed_cad.kernels.flash import FlashAttention, Three, accepts, call_with, new_gradients, try_import, window_of
from deepspeed_cad.kernels.interface import KernelNeed, MaskRule, Sequences

OLDEST = (2, 6, 1)
"""Of FlashAttention-2. Before 2.5.7 LSE of sequences of different lengths is laid out in another way; 2.5.7 to 2.6.0
raise on such calls."""


class _Compiled(FlashAttention):
    module: str
    functions: tuple[str, str]
    """Forward and backward there."""

    def attend(
        self, qkv: Three, sequences: Sequences, rule: MaskRule, out_QHV: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = self._call(self.functions[0], qkv, sequences, rule, return_softmax=False)
        # (out, lse, …); (out, q, k, v, out_padded, lse, …) before FlashAttention 2.7.
        return (found[0], found[1]) if len(found) == 4 else (found[0], found[5])

    def differentiate(
        self, do_QHV: torch.Tensor, qkv: Three, o_QHV: torch.Tensor, lse_HQ: torch.Tensor,
        sequences: Sequences, rule: MaskRule, into: Three | None,
    ) -> Three:  # fmt: skip
        dq, dk, dv = made = new_gradients(qkv)
        self._call(
            self.functions[1], qkv, sequences, rule, dout=do_QHV, out=o_QHV, softmax_lse=lse_HQ, dq=dq, dk=dk, dv=dv,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        return made

    def _call(self, name: str, qkv: Three, sequences: Sequences, rule: MaskRule, **more: Any) -> Any:
        left, right = window_of(rule.window)
        return call_with(
            getattr(try_import(self.module)[0], name), q=qkv[0], k=qkv[1], v=qkv[2],
            cu_seqlens_q=sequences.cu_q, cu_seqlens_k=sequences.cu_k,
            max_seqlen_q=sequences.max_q, max_seqlen_k=sequences.max_k, softmax_scale=rule.scale,
            causal=rule.window is None, is_causal=rule.window is None,
            window_size=(left, right), window_size_left=left, window_size_right=right,
            softcap=rule.softcap or 0.0, dropout_p=0.0, alibi_slopes=None, **more,
        )  # fmt: skip


class FlashAttention2(_Compiled):
    """Any mask; value heads of the size of query heads."""

    name, module = "flash_attn_2", "flash_attn.flash_attn_interface"
    functions = "_flash_attn_varlen_forward", "_flash_attn_varlen_backward"

    def refuse_more(self, need: KernelNeed, capability: tuple[int, int]) -> str | None:
        module, missing = try_import(self.module)
        if module is None:
            return missing
        version = _version()
        if version < OLDEST:
            return (
                f"flash-attn {'.'.join(map(str, version)) or 'of unknown version'} is installed, and before "
                f"{'.'.join(map(str, OLDEST))} it gives LSE in another layout or fails: pip install -U flash-attn"
            )
        return None


class FlashAttention3(_Compiled):
    """Hopper; any mask; value heads of the size of query heads."""

    name, module, least_capability = "flash_attn_3", "flash_attn_interface", (9, 0)
    functions = "_flash_attn_forward", "_flash_attn_backward"

    def refuse_more(self, need: KernelNeed, capability: tuple[int, int]) -> str | None:
        if capability[0] != 9:
            return "it has kernels for Hopper GPUs only"
        if need.deterministic and need.head_dim > 192:
            return "its gradients are not deterministic with heads above 192"
        module, missing = try_import(self.module)
        if module is None:
            return missing
        backward = getattr(module, self.functions[1], None)
        if backward is None or not accepts(backward, "cu_seqlens_q"):
            return "this version of flash_attn_interface has no backward for sequences of different lengths"
        return None


def _version() -> tuple[int, ...]:
    """What the installed package says of itself, (2, 8, 3) for "2.8.3.post1"; () where nothing does."""
    try:
        text = metadata.version("flash_attn")
    except metadata.PackageNotFoundError:
        text = getattr(try_import("flash_attn")[0], "__version__", "")
    numbers = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()
