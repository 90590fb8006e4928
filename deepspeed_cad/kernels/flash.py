"""FlashAttention in its three libraries: `flash_attn.cute` (4), `flash_attn` (2), and torch.

Libraries have LSE as [H, Q], of which a transposed view goes in and out; else shapes are as in interface.py. Versions
of FlashAttention-2 take the same arguments but for a few, and each call is given those that its version has.
"""

import functools
import inspect
import re
import warnings
from collections.abc import Callable
from importlib import import_module, metadata
from typing import Any

import torch

from deepspeed_cad.errors import in_one_line
from deepspeed_cad.kernels.interface import Kernel, KernelNeed, MaskRule, Sequences, Three

HALF = (torch.float16, torch.bfloat16)
LARGEST_HEAD = 256
OLDEST = (2, 6, 1)
"""Of FlashAttention-2. Before 2.5.7 LSE of sequences of different lengths is laid out in another way; 2.5.7 to 2.6.0
raise on such calls."""
ONE_TILE = 256
"""Lengths are announced to FlashAttention-4 as more than this: it compiles other kernels where all fits in one tile."""


class FlashAttention(Kernel):
    """A kernel of some library, and what all of them refuse."""

    least_capability = (8, 0)
    equal_heads = True
    """Whether value heads must have the size of query heads."""

    def refuse(self, need: KernelNeed) -> str | None:
        if need.device.type != "cuda" or torch.version.hip is not None:
            return f"it needs an NVIDIA GPU, the model is on {'hip' if torch.version.hip else need.device.type}"
        if need.dtype not in HALF:
            return f"it computes in float16 and bfloat16, the model in {str(need.dtype).removeprefix('torch.')}"
        capability = torch.cuda.get_device_capability(need.device)
        if capability < self.least_capability:
            least, found = (".".join(map(str, one)) for one in (self.least_capability, capability))
            return f"it needs compute capability {least}, this GPU has {found}"
        for what, size in (("query", need.head_dim), ("value", need.value_dim)):
            if size % 8 or size > LARGEST_HEAD:
                return f"{what} heads have size {size}; it takes multiples of 8 up to {LARGEST_HEAD}"
        if self.equal_heads and need.head_dim != need.value_dim:
            return f"value heads have size {need.value_dim}, query heads {need.head_dim}; it needs them equal"
        return self.refuse_more(need, capability)

    def refuse_more(self, need: KernelNeed, capability: tuple[int, int]) -> str | None:
        """What this backend asks for beside what all do, see Kernel.refuse; nothing, unless it says."""
        return None


class FlashAttention2(FlashAttention):
    """Ampere and newer; any mask; value heads of the size of query heads."""

    name, module = "flash_attn_2", "flash_attn.flash_attn_interface"

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

    def forward(
        self, q_QHD: torch.Tensor, k_KGD: torch.Tensor, v_KGV: torch.Tensor, sequences: Sequences, rule: MaskRule,
        out_QHV: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        found = self._call("_flash_attn_varlen_forward", (q_QHD, k_KGD, v_KGV), sequences, rule, return_softmax=False)
        # (out, lse, …); (out, q, k, v, out_padded, lse, …) before FlashAttention 2.7.
        return found[0], found[1 if len(found) == 4 else 5].t()

    def backward(
        self, do_QHV: torch.Tensor, q_QHD: torch.Tensor, k_KGD: torch.Tensor, v_KGV: torch.Tensor, o_QHV: torch.Tensor,
        lse_QH: torch.Tensor, sequences: Sequences, rule: MaskRule, into: Three | None = None,
    ) -> Three:  # fmt: skip
        qkv = q_QHD, k_KGD, v_KGV
        dq, dk, dv = made = new_gradients(qkv)
        self._call(
            "_flash_attn_varlen_backward", qkv, sequences, rule, dout=do_QHV, out=o_QHV, dq=dq, dk=dk, dv=dv,
            softmax_lse=lse_QH.t().contiguous(), deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        return made

    def _call(self, name: str, qkv: Three, sequences: Sequences, rule: MaskRule, **more: Any) -> Any:
        # FlashAttention's (left, right): how many keys beside its own a row reads; −1 for no limit.
        left, right = (-1, -1) if rule.window is None else (rule.window - 1, 0)
        given = dict(
            q=qkv[0], k=qkv[1], v=qkv[2],
            cu_seqlens_q=sequences.cu_q, cu_seqlens_k=sequences.cu_k,
            max_seqlen_q=sequences.max_q, max_seqlen_k=sequences.max_k, softmax_scale=rule.scale,
            causal=rule.window is None, window_size=(left, right), window_size_left=left, window_size_right=right,
            softcap=rule.softcap or 0.0, dropout_p=0.0, alibi_slopes=None, **more,
        )  # fmt: skip
        function = getattr(try_import(self.module)[0], name)
        return function(**{argument: value for argument, value in given.items() if argument in _accepted(function)})


class FlashAttention4(FlashAttention):
    """Any mask and head sizes up to 256 on Hopper; on newer GPUs what the library takes there. Compiled on first use.
    Uses the functions below its autograd layer, with outputs allocated here."""

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

    def forward(
        self, q_QHD: torch.Tensor, k_KGD: torch.Tensor, v_KGV: torch.Tensor, sequences: Sequences, rule: MaskRule,
        out_QHV: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        rows, heads = q_QHD.shape[:2]
        o_QHV = q_QHD.new_empty(rows, heads, v_KGV.shape[2]) if out_QHV is None else out_QHV
        lse_HQ = torch.empty(heads, rows, dtype=torch.float32, device=q_QHD.device)
        self._call(
            "_flash_attn_fwd", q_QHD, k_KGD, v_KGV, sequences=sequences, rule=rule, softcap=rule.softcap, out=o_QHV,
            lse=lse_HQ,
        )  # fmt: skip
        return o_QHV, lse_HQ.t()

    def backward(
        self, do_QHV: torch.Tensor, q_QHD: torch.Tensor, k_KGD: torch.Tensor, v_KGV: torch.Tensor, o_QHV: torch.Tensor,
        lse_QH: torch.Tensor, sequences: Sequences, rule: MaskRule, into: Three | None = None,
    ) -> Three:  # fmt: skip
        dq, dk, dv = made = new_gradients((q_QHD, k_KGD, v_KGV)) if into is None else into
        self._call(
            "_flash_attn_bwd", q_QHD, k_KGD, v_KGV, o_QHV, do_QHV, lse_QH.t().contiguous(), sequences=sequences,
            rule=rule, softcap=rule.softcap or 0.0, deterministic=torch.are_deterministic_algorithms_enabled(),
            dq=dq, dk=dk, dv=dv,
        )  # fmt: skip
        return made

    def _call(self, name: str, *given: torch.Tensor, sequences: Sequences, rule: MaskRule, **more: Any) -> None:
        getattr(_cute(), name)(
            *given, cu_seqlens_q=sequences.cu_q, cu_seqlens_k=sequences.cu_k,
            max_seqlen_q=max(sequences.max_q, ONE_TILE + 1), max_seqlen_k=max(sequences.max_k, ONE_TILE + 1),
            softmax_scale=rule.scale, causal=rule.window is None,
            window_size_left=None if rule.window is None else rule.window - 1,
            window_size_right=None if rule.window is None else 0, **more,
        )  # fmt: skip


class TorchVarlen(FlashAttention):
    """What `torch.nn.attention.varlen` calls. Needs nothing but torch on an Ampere or newer GPU; no soft-cap; value
    heads of the size of query heads."""

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

    def forward(
        self, q_QHD: torch.Tensor, k_KGD: torch.Tensor, v_KGV: torch.Tensor, sequences: Sequences, rule: MaskRule,
        out_QHV: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        o_QHV, lse_HQ, *_ = torch.ops.aten._flash_attention_forward(
            q_QHD, k_KGD, v_KGV, sequences.cu_q, sequences.cu_k, sequences.max_q, sequences.max_k, 0.0,
            rule.window is None, False, **self._rule(rule),
        )  # fmt: skip
        return o_QHV, lse_HQ.t()

    def backward(
        self, do_QHV: torch.Tensor, q_QHD: torch.Tensor, k_KGD: torch.Tensor, v_KGV: torch.Tensor, o_QHV: torch.Tensor,
        lse_QH: torch.Tensor, sequences: Sequences, rule: MaskRule, into: Three | None = None,
    ) -> Three:  # fmt: skip
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=do_QHV.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            do_QHV, q_QHD, k_KGD, v_KGV, o_QHV, lse_QH.t().contiguous(), sequences.cu_q, sequences.cu_k,
            sequences.max_q, sequences.max_k, 0.0, rule.window is None, no_dropout, no_dropout, **self._rule(rule),
        )  # fmt: skip
        return dq, dk, dv

    def _rule(self, rule: MaskRule) -> dict[str, Any]:
        window = {} if rule.window is None else {"window_size_left": rule.window - 1, "window_size_right": 0}
        return {"scale": rule.scale, **window}


@functools.cache
def try_import(name: str) -> tuple[Any, str]:
    """(module, "") or (None, why it cannot be imported)."""
    try:
        return import_module(name), ""
    except Exception as error:  # a broken build may raise anything
        return None, f"{name} cannot be imported ({in_one_line(error)})"


@functools.cache
def _cute() -> Any:
    # Said by its compiler about every kernel, and of no consequence.
    warnings.filterwarnings("ignore", message="Argument aux_data .* cannot be converted to a JitArgument")
    return try_import("flash_attn.cute.interface")[0]


@functools.cache
def _accepted(function: Callable[..., Any]) -> frozenset[str]:
    plain = getattr(function, "_init_fn", function)  # torch.library.custom_op hides the signature
    return frozenset(inspect.signature(plain).parameters)


def new_gradients(qkv: Three) -> Three:
    q, k, v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in qkv)
    return q, k, v


def _version() -> tuple[int, ...]:
    """What the installed flash-attn says of itself, (2, 8, 3) for "2.8.3.post1"; () where nothing does."""
    try:
        text = metadata.version("flash_attn")
    except metadata.PackageNotFoundError:
        text = getattr(try_import("flash_attn")[0], "__version__", "")
    numbers = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()
