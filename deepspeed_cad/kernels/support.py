"""What the FlashAttention backends share: common refusals, and calls that survive renamed arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from deepspeed_cad.kernels.interface import KernelNeed

HALF = (torch.float16, torch.bfloat16)


@functools.cache
def try_import(name: str) -> tuple[Any, str]:
    """(module, "") or (None, why it cannot be imported)."""
    try:
        return import_module(name), ""
    except Exception as error:  # a broken build may raise anything
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return None, f"{name} cannot be imported ({text})"


def refuse_common(need: KernelNeed, largest_head: int, least_capability: tuple[int, int]) -> str | None:
    """What every FlashAttention build asks for: an NVIDIA GPU, half precision, head sizes in steps of 8."""
    if need.device.type != "cuda":
        return f"it needs an NVIDIA GPU, the model is on {need.device.type}"
    if torch.version.hip is not None:
        return "it needs an NVIDIA GPU"
    if need.dtype not in HALF:
        return f"it computes in float16 and bfloat16, the model in {str(need.dtype).removeprefix('torch.')}"
    capability = torch.cuda.get_device_capability(need.device)
    if capability < least_capability:
        least = ".".join(map(str, least_capability))
        return f"it needs compute capability {least}, this GPU has {'.'.join(map(str, capability))}"
    for what, size in (("query", need.head_dim), ("value", need.value_dim)):
        if size % 8 or size > largest_head:
            return f"{what} heads have size {size}; it takes multiples of 8 up to {largest_head}"
    return None


@functools.cache
def _accepted(function: Callable[..., Any]) -> frozenset[str]:
    plain = getattr(function, "_init_fn", function)  # torch.library.custom_op hides the signature
    return frozenset(inspect.signature(plain).parameters)


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has a parameter of this name."""
    return name in _accepted(function)


def call_with(function: Callable[..., Any], /, **given: Any) -> Any:
    """Call with those of the given arguments that this version of the function has."""
    known = _accepted(function)
    return function(**{name: value for name, value in given.items() if name in known})


def new_gradients(
    q_QHD: torch.Tensor, k_KGD: torch.Tensor, v_KGV: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Contiguous dQ, dK, dV to be filled."""
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_QHD, k_KGD, v_KGV))  # type: ignore[return-value]


def window_of(window: int | None) -> tuple[int, int]:
    """FlashAttention's (left, right): how many keys beside its own a row reads; −1 for no limit."""
    return (-1, -1) if window is None else (window - 1, 0)
