"""Which kernel a layer runs on: the first of the backends that supports it, or the one that the configuration names.

Rank 0 names each choice in the log, with the reasons why faster ones were passed over.
"""

import logging

import numpy as np
import torch

from deepspeed_cad.errors import CADUnsupportedError, in_one_line
from deepspeed_cad.kernels.flash import FlashAttention2, FlashAttention4, TorchVarlen
from deepspeed_cad.kernels.interface import Kernel, KernelNeed, MaskRule, Sequences
from deepspeed_cad.kernels.torch_math import TorchMath

logger = logging.getLogger("deepspeed_cad")

KERNELS: tuple[Kernel, ...] = (FlashAttention4(), FlashAttention2(), TorchVarlen(), TorchMath())
"""In the order in which "auto" tries them; none holds any state."""


def names() -> tuple[str, ...]:
    """The backends, fastest first."""
    return tuple(kernel.name for kernel in KERNELS)


def choose(name: str, need: KernelNeed, rank: int = 0) -> Kernel:
    """The kernel for a layer; `rank`: of this process, since only rank 0 logs the choice. Raises CADUnsupportedError
    where `name` is no backend, or one that refuses: the reason is in the message."""
    wanted = [kernel for kernel in KERNELS if name in ("auto", kernel.name)]
    if not wanted:
        raise CADUnsupportedError(f'there is no kernel "{name}"; there are: auto, {", ".join(names())}')
    refusals: list[str] = []
    for kernel in wanted:
        reason = kernel.refuse(need)
        if reason is None:
            if rank == 0:
                _say(kernel, need, refusals)
            return kernel
        refusals.append(f"{kernel.name}: {reason}")
    if name == "auto":
        raise CADUnsupportedError(f"no attention kernel supports {need}: {'; '.join(refusals)}")
    raise CADUnsupportedError(
        f'the kernel "{name}" cannot run this model: {reason}. Leave "kernel" out to take the first that can.'
    )


def try_all(device: torch.device) -> list[tuple[str, bool, str]]:
    """(name, works, detail) of every backend, each really run forward and backward on two small sequences."""
    return [(kernel.name, *_try(kernel, device)) for kernel in KERNELS]


def _say(kernel: Kernel, need: KernelNeed, passed_over: list[str]) -> None:
    why = f" ({'; '.join(passed_over)})" if passed_over else ""
    dtype = str(need.dtype).removeprefix("torch.")
    # On a CPU there is nothing to choose from.
    level = logging.DEBUG if need.device.type == "cpu" else logging.INFO
    logger.log(level, "core attention runs on %s for heads of %d, %s%s", kernel.name, need.head_dim, dtype, why)
    if kernel.name == TorchMath.name and need.device.type == "cuda":
        logger.warning(
            "core attention runs on plain torch operations, which is many times slower than any kernel%s", why
        )


def _try(kernel: Kernel, device: torch.device) -> tuple[bool, str]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    reason = kernel.refuse(KernelNeed(device, dtype, head_dim=64, value_dim=64, heads_per_group=2))
    if reason is not None:
        return False, reason
    host_q, host_k = np.array([0, 5, 69], np.int32), np.array([0, 5, 139], np.int32)
    cu_q, cu_k = (torch.from_numpy(x).to(device) for x in (host_q, host_k))
    sequences = Sequences(host_q, host_k, cu_q, cu_k, max_q=64, max_k=134)
    q, do = (torch.randn(69, 4, 64, dtype=dtype, device=device) for _ in range(2))
    k, v = (torch.randn(139, 2, 64, dtype=dtype, device=device) for _ in range(2))
    rule = MaskRule(scale=0.125)
    try:
        o, lse = kernel.forward(q, k, v, sequences, rule)
        finite = all(bool(x.isfinite().all()) for x in (o, lse, *kernel.backward(do, q, k, v, o, lse, sequences, rule)))
    except Exception as error:  # a diagnosis reports whatever a backend raises
        return False, f"{type(error).__name__}: {in_one_line(error)}"
    return (True, "forward and backward") if finite else (False, "gives numbers that are not finite")
