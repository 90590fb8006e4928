"""Serving: run the batches of a schedule on buffers, forward and backward. Pure functions of tensors and schedule.

No autograd, no communication, no model: the autograd functions (call.py) and the loop of a reserved server are
thin callers. `T` tokens at home, `R` served query rows, `S` served key rows, `H` query heads, `K` head groups, `G`
query heads per group, `D` and `V` sizes of a query/key and a value head. Home tensors are [T, K·G, D]; served ones are
group-major: [R, G, D], [S, 1, D].
"""

from __future__ import annotations

import torch

from deepspeed_cad.attention.device_schedule import Batches, DeviceSchedule, Wave
from deepspeed_cad.kernels.interface import Kernel, MaskRule
from deepspeed_cad.schedule import Batch


def fold_sinks(o: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of a softmax with one more logit per head that has no value: sinks [H] or [rows, H]."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype))
    return (o * torch.exp(lse - total).unsqueeze(-1).to(o.dtype)), total


def new_outputs(
    schedule: DeviceSchedule, q_THD: torch.Tensor, v_TKV: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """O [T, H, V] and LSE [T, H] to be filled; padding is zero."""
    rows, heads = q_THD.shape[:2]
    o_THV = q_THD.new_empty(rows, heads, v_TKV.shape[2])
    lse_TH = torch.empty(rows, heads, dtype=lse_dtype(q_THD.dtype), device=q_THD.device)
    if len(schedule.padding):
        o_THV[schedule.padding] = 0
        lse_TH[schedule.padding] = 0
    return o_THV, lse_TH


def run_local(
    batches: Batches,
    kernel: Kernel,
    rule: MaskRule,
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKV: torch.Tensor,
    o_THV: torch.Tensor,
    lse_TH: torch.Tensor,
    sinks_H: torch.Tensor | None = None,
) -> None:
    """Run local batches and write their rows and heads of O and LSE.

    Args:
        batches: which of the rank's local batches.
        kernel: runs them.
        rule: scale, window and soft-cap.
        q_THD: queries of the rank.
        k_TKD: keys; of the rank and, in a second nano-batch, of documents that began in the first.
        v_TKV: values, likewise.
        o_THV: written.
        lse_TH: written.
        sinks_H: one logit more per head, or None.
    """
    share = q_THD.shape[1] // k_TKD.shape[1]
    for batch, sequences in batches:
        rows, keys, groups, heads = _ranges(batch, share)
        out = o_THV[rows, heads]
        o, lse = kernel.forward(q_THD[rows, heads], k_TKD[keys, groups], v_TKV[keys, groups], sequences, rule, out)
        if sinks_H is not None:
            o, lse = fold_sinks(o, lse, sinks_H[heads])
        if o is not out:
            out.copy_(o)
        lse_TH[rows, heads] = lse


def run_served(
    wave: Wave,
    kernel: Kernel,
    rule: MaskRule,
    q_RGD: torch.Tensor,
    k_S1D: torch.Tensor,
    v_S1V: torch.Tensor,
    sinks_RG: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """O [R, G, V] and LSE [R, G] of the served tasks, made here; LSE has any strides.

    Args:
        wave: says which batches, and the head group of every row.
        kernel: runs them.
        rule: scale, window and soft-cap.
        q_RGD: what arrived, with the rank's own rows of served tasks.
        k_S1D: likewise.
        v_S1V: likewise.
        sinks_RG: one logit more per row and head, or None.
    """
    if not wave.served:
        o = q_RGD.new_empty(q_RGD.shape[0], q_RGD.shape[1], v_S1V.shape[2])
        return o, torch.empty(q_RGD.shape[:2], dtype=lse_dtype(q_RGD.dtype), device=q_RGD.device)
    results = []
    for batch, sequences in wave.served:
        rows, keys, _, _ = _ranges(batch, 1)
        results.append(kernel.forward(q_RGD[rows], k_S1D[keys], v_S1V[keys], sequences, rule))
    # Served batches lie one after the other and cover the buffer.
    o, lse = (
        results[0] if len(results) == 1 else (torch.cat([o for o, _ in results]), torch.cat([x for _, x in results]))
    )
    if sinks_RG is not None:
        o, lse = fold_sinks(o, lse, sinks_RG)
    return o, lse


def new_gradients(
    schedule: DeviceSchedule, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKV: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dQ [T, H, D] to be filled, and dK [T, K, D], dV [T, K, V], zero; wider where local batches share key rows."""
    wide = _wide(k_TKD.dtype) if schedule.local_keys_overlap else k_TKD.dtype
    dq = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    if len(schedule.padding):
        dq[schedule.padding] = 0
    dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (k_TKD, v_TKV))
    return dq, dk, dv


def run_local_backward(
    batches: Batches,
    kernel: Kernel,
    rule: MaskRule,
    do_THV: torch.Tensor,
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKV: torch.Tensor,
    o_THV: torch.Tensor,
    lse_TH: torch.Tensor,
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    add: bool,
) -> None:
    """Run local batches backward.

    Args:
        batches: which of the rank's local batches.
        kernel: runs them.
        rule: scale, window and soft-cap.
        do_THV: gradient of O.
        q_THD: queries, as in the forward.
        k_TKD: keys.
        v_TKV: values.
        o_THV: the forward's O, of all batches and of what other ranks ran.
        lse_TH: the forward's LSE, likewise.
        gradients: dQ, dK and dV of the rank; dQ is written.
        add: add to dK and dV, which batches share rows of, instead of writing.
    """
    share = q_THD.shape[1] // k_TKD.shape[1]
    dq, dk, dv = gradients
    for batch, sequences in batches:
        rows, keys, groups, heads = _ranges(batch, share)
        into = (dq[rows, heads], dk[keys, groups], dv[keys, groups])
        made = kernel.backward(
            do_THV[rows, heads], q_THD[rows, heads], k_TKD[keys, groups], v_TKV[keys, groups],
            o_THV[rows, heads], lse_TH[rows, heads], sequences, rule, None if add else into,
        )  # fmt: skip
        if add:
            into[0].copy_(made[0])
            into[1].add_(made[1])
            into[2].add_(made[2])
        elif made[0] is not into[0]:
            for target, value in zip(into, made, strict=True):
                target.copy_(value)


def run_served_backward(
    wave: Wave,
    kernel: Kernel,
    rule: MaskRule,
    do_RGV: torch.Tensor,
    q_RGD: torch.Tensor,
    k_S1D: torch.Tensor,
    v_S1V: torch.Tensor,
    o_RGV: torch.Tensor,
    lse_RG: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dQ [R, G, D], dK [S, 1, D], dV [S, 1, V] of the served tasks, made here.

    Args:
        wave: says which batches.
        kernel: runs them.
        rule: scale, window and soft-cap.
        do_RGV: what arrived, with the rank's own rows of served tasks.
        q_RGD: likewise, or kept since the forward.
        k_S1D: likewise.
        v_S1V: likewise.
        o_RGV: what `run_served` gave.
        lse_RG: likewise.
    """
    if not wave.served:
        return torch.empty_like(q_RGD), torch.empty_like(k_S1D), torch.empty_like(v_S1V)
    if len(wave.served) == 1 and not wave.keys_overlap:
        _, sequences = wave.served[0]
        return kernel.backward(do_RGV, q_RGD, k_S1D, v_S1V, o_RGV, lse_RG, sequences, rule)
    wide = _wide(k_S1D.dtype)
    dq = torch.empty(q_RGD.shape, dtype=q_RGD.dtype, device=q_RGD.device)
    dk = torch.zeros(k_S1D.shape, dtype=wide, device=q_RGD.device)
    dv = torch.zeros(v_S1V.shape, dtype=wide, device=q_RGD.device)
    for batch, sequences in wave.served:
        rows, keys, _, _ = _ranges(batch, 1)
        dq_b, dk_b, dv_b = kernel.backward(
            do_RGV[rows], q_RGD[rows], k_S1D[keys], v_S1V[keys], o_RGV[rows], lse_RG[rows], sequences, rule
        )
        dq[rows] = dq_b
        dk[keys] += dk_b
        dv[keys] += dv_b
    return dq, dk.to(k_S1D.dtype), dv.to(v_S1V.dtype)


def by_group(x_THD: torch.Tensor, k_UKD: torch.Tensor) -> torch.Tensor:
    """[T, K, G·D]: the heads of a group side by side, a view; a copy where the heads of a row are not contiguous."""
    x = x_THD if x_THD.stride(2) == 1 and x_THD.stride(1) == x_THD.shape[2] else x_THD.contiguous()
    return x.unflatten(1, (k_UKD.shape[1], -1)).flatten(2)


def _ranges(batch: Batch, share: int) -> tuple[slice, slice, slice, slice]:
    """Query rows, key rows, groups and query heads of a batch."""
    return (
        slice(batch.q_row, batch.q_row + batch.q_rows),
        slice(batch.k_row, batch.k_row + batch.k_rows),
        slice(batch.group_begin, batch.group_end),
        slice(batch.group_begin * share, batch.group_end * share),
    )


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """LSE is fp32, fp64 for fp64 inputs."""
    return _wide(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
