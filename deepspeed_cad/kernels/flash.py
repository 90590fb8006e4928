"""What the FlashAttention backends share: refusals, the order of tensors, and calls that survive renamed arguments.

Shapes as in interface.py; libraries have LSE as [H, Q].
"""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from deepspeed_cad.kernels.interface import KernelNeed, MaskRule, Sequences

HALF = (torch.float16, torch.bfloat16)
LARGEST_HEAD = 256

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Q, K and V, or their gradients."""


class FlashAttention(ABC):
    """A Kernel of some library."""

    name: str
    least_capability = (8, 0)
    """Of a GPU."""
    equal_heads = True
    """Whether value heads must have the size of query heads."""

    def refuse(self, need: KernelNeed) -> str | None:
        """An NVIDIA GPU, half precision, head sizes in steps of 8; then what this backend asks for."""
        if need.device.type != "cuda":
            return f"it needs an NVIDIA GPU, the model is on {need.device.type}"
        if torch.version.hip is not None:
            return "it needs an NVIDIA GPU"
        if need.dtype not in HALF:
            return f"it computes in float16 and bfloat16, the model in {str(need.dtype).removeprefix('torch.')}"
        capability = torch.cuda.get_device_capability(need.device)
        if capability < self.least_capability:
            least = ".".join(map(str, self.least_capability))
            return f"it needs compute capability {least}, this GPU has {'.'.join(map(str, capability))}"
        for what, size in (("query", need.head_dim), ("value", need.value_dim)):
            if size % 8 or size > LARGEST_HEAD:
                return f"{what} heads have size {size}; it takes multiples of 8 up to {LARGEST_HEAD}"
        if self.equal_heads and need.head_dim != need.value_dim:
            return f"value heads have size {need.value_dim}, query heads {need.head_dim}; it needs them equal"
        return self.refuse_more(need, capability)

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
        o_QHV, lse_HQ = self.attend((q_QHD, k_KGD, v_KGV), sequences, rule, out_QHV)
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
        into: Three | None = None,
    ) -> Three:
        given = do_QHV, (q_QHD, k_KGD, v_KGV), o_QHV, lse_QH.t().contiguous()
        return self.differentiate(*given, sequences, rule, into)

    @abstractmethod
    def refuse_more(self, need: KernelNeed, capability: tuple[int, int]) -> str | None:
        """What this backend asks for beside what all do; see Kernel.refuse."""

    @abstractmethod
    def attend(
        self, qkv: Three, sequences: Sequences, rule: MaskRule, out_QHV: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """O, and LSE [H, Q]."""

    @abstractmethod
    def differentiate(
        self, do_QHV: torch.Tensor, qkv: Three, o_QHV: torch.Tensor, lse_HQ: torch.Tensor,
        sequences: Sequences, rule: MaskRule, into: Three | None,
    ) -> Three:  # fmt: skip
        """dQ, dK, dV."""


@functools.cache
def try_import(name: str) -> tuple[Any, str]:
    """(module, "") or (None, why it cannot be imported)."""
    try:
        return import_module(name), ""
    except Exception as error:  # a broken build may raise anything
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return None, f"{name} cannot be imported ({text})"


@functools.cache
def _accepted(function: Callable[..., Any]) -> frozenset[str]:
    plain = getattr(function, "_init_fn", function)  # torch.library.custom_op hides the signature
    return frozenset(inspect.signature(plain).parameters)


def accepts(function: Callable[..., Any], name: str) -> bool:
    return name in _accepted(function)


def call_with(function: Callable[..., Any], /, **given: Any) -> Any:
    """Call with those of the given arguments that this version of the function has."""
    known = _accepted(function)
    return function(**{name: value for name, value in given.items() if name in known})


def new_gradients(qkv: Three) -> Three:
    """Contiguous dQ, dK, dV to be filled."""
    q, k, v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in qkv)
    return q, k, v


def window_of(window: int | None) -> tuple[int, int]:
    """FlashAttention's (left, right): how many keys beside its own a row reads; −1 for no limit."""
    return (-1, -1) if window is None else (window - 1, 0)
