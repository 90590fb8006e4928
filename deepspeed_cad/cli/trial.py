"""One kernel backend on one tiny packed problem, forward and backward, against plain torch in fp64.

In: a `Kernel`. Out: whether it gave the right numbers on this machine, and the largest error or the reason why not.
"""

import numpy as np
import torch

from deepspeed_cad.kernels.interface import Kernel, KernelNeed, MaskRule, Sequences
from deepspeed_cad.kernels.torch_math import TorchMath

HEADS, GROUPS, HEAD_DIM = 4, 2, 64
LENGTHS = (1, 70, 129)
LARGEST_ERROR = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Of any output or gradient, as a share of the largest reference value."""


def try_kernel(kernel: Kernel) -> tuple[bool, str]:
    """Bfloat16 on a GPU where there is one, else fp32 on the CPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    reason = kernel.refuse(
        KernelNeed(device=device, dtype=dtype, head_dim=HEAD_DIM, value_dim=HEAD_DIM, heads_per_group=HEADS // GROUPS)
    )
    if reason is not None:
        return False, reason
    given = _problem(dtype)
    found = _run(kernel, given, device)
    expected = _run(TorchMath(), [tensor.double() for tensor in given], torch.device("cpu"))
    error = max(
        float((one.double().cpu() - other).abs().max() / other.abs().max()) for one, other in zip(found, expected)
    )
    name = str(dtype).removeprefix("torch.")
    if not error <= LARGEST_ERROR[dtype]:
        return False, f"wrong numbers in {name} on {device.type}: relative error {error:.1e}"
    return True, f"{name} on {device.type}, forward and backward, relative error {error:.0e}"


def _problem(dtype: torch.dtype) -> list[torch.Tensor]:
    """Q, K, V and dO of all sequences."""
    generator = torch.Generator().manual_seed(0)
    heads = (HEADS, GROUPS, GROUPS, HEADS)
    return [torch.randn(sum(LENGTHS), count, HEAD_DIM, generator=generator).to(dtype) for count in heads]


def _run(kernel: Kernel, given: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """O, dQ, dK and dV."""
    q_QHD, k_KGD, v_KGV, do_QHV = (tensor.to(device) for tensor in given)
    bounds = np.cumsum((0, *LENGTHS), dtype=np.int32)
    cu = torch.from_numpy(bounds).to(device)
    sequences = Sequences(
        host_q=bounds, host_k=bounds, cu_q=cu, cu_k=cu.clone(), max_q=max(LENGTHS), max_k=max(LENGTHS)
    )
    rule = MaskRule(scale=HEAD_DIM**-0.5)
    o_QHV, lse_QH = kernel.forward(q_QHD, k_KGD, v_KGV, sequences, rule)
    gradients = kernel.backward(do_QHV, q_QHD, k_KGD, v_KGV, o_QHV, lse_QH, sequences, rule)
    return [o_QHV, *gradients]
