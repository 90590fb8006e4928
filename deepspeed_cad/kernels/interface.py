"""What every attention kernel backend takes, gives and declares.

Shapes: `Q` query rows and `K` key rows of all sequences, `H` query heads, `G` KV heads, `D` size of a query or key
head, `V` size of a value head. Tensors may be strided views as long as the last dimension is contiguous.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Sequences:
    """Sequences of one varlen call, on the host and on the device. Sequence i has query rows [cu_q[i], cu_q[i+1]) and
    key rows [cu_k[i], cu_k[i+1]); its last query row is aligned with its last key row (bottom-right causal)."""

    host_q: npt.NDArray[np.int32]
    host_k: npt.NDArray[np.int32]
    cu_q: torch.Tensor
    """[sequences + 1] int32 on the device."""
    cu_k: torch.Tensor
    max_q: int
    max_k: int


@dataclass(frozen=True)
class MaskRule:
    """What the kernel applies to Q K^T besides the causal mask: constant per layer."""

    scale: float
    window: int | None = None
    """A row reads itself and the window − 1 keys before it; None: all keys before it."""
    softcap: float | None = None
    """Scores become softcap · tanh(score / softcap)."""


@dataclass(frozen=True)
class KernelNeed:
    """What a model needs of a kernel; a backend refuses with a reason what it cannot do."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    heads_per_group: int
    window: bool = False
    softcap: bool = False
    deterministic: bool = False


class Kernel(Protocol):
    """A varlen attention backend, forward and backward, without autograd."""

    name: str

    def refuse(self, need: KernelNeed) -> str | None:
        """Why this backend cannot serve `need` on this machine, or None if it can."""

    def forward(
        self, q_QHD: torch.Tensor, k_KGD: torch.Tensor, v_KGV: torch.Tensor, sequences: Sequences, rule: MaskRule,
        out_QHV: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """O [Q, H, V] in the dtype of q, contiguous, and LSE [Q, H] (fp32, or fp64 for fp64 inputs), natural logarithm.

        LSE has any strides: most libraries make [H, Q], give a transposed view of it here and take it back in
        `backward` without a copy. `out_QHV`: where O should be written; a backend that cannot returns another tensor,
        and the caller copies it."""

    def backward(
        self, do_QHV: torch.Tensor, q_QHD: torch.Tensor, k_KGD: torch.Tensor, v_KGV: torch.Tensor, o_QHV: torch.Tensor,
        lse_QH: torch.Tensor, sequences: Sequences, rule: MaskRule, into: Three | None = None,
    ) -> Three:  # fmt: skip
        """dQ [Q, H, D], dK [K, G, D], dV [K, G, V], contiguous; `lse_QH` has any strides. `into`: where these should be
        written, with the same freedom as `out_QHV`, all three or none. O and LSE are those of the whole softmax: where
        sinks were folded in, of the softmax with sinks, and the gradients are right for it."""
