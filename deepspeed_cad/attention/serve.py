"""Serving: run the batches of a schedule on buffers, forward and backward. Pure functions of tensors and schedule.

No autograd, no communication, no model: the autograd functions (call.py) and the loop of a server are
thin callers. `T` tokens at home, `R` served query rows, `S` served key rows, `H` query heads, `K` head groups, `G`
query heads per group, `D` and `V` sizes of a query/key and a value head. Home tensors are [T, K·G, D]; served ones are
group-major: [R, G, D], [S, 1, D].
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from deepspeed_cad.attention.device_schedule import Batches, DeviceSchedule, Wave
from deepspeed_cad.kernels.interface import Kernel, MaskRule, Sequences
from deepspeed_cad.schedule import Batch


def fold_sinks(o: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of a softmax with one more logit per head that has no value: sinks [H] or [rows, H]."""
    # On a CPU the last numbers of a vector loop round otherwise than those before them, by where they lie: not in fp64.
    wide = torch.float64 if lse.device.type == "cpu" else lse.dtype
    total = torch.logaddexp(lse.to(wide), sinks.to(wide))
    return o * torch.exp(lse.to(wide) - total).unsqueeze(-1).to(o.dtype), total.to(lse.dtype)


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


def run_half_local(
    wave: Wave,
    kernel: Kernel,
    rule: MaskRule,
    q_THD: torch.Tensor,
    k_S1D: torch.Tensor,
    v_S1V: torch.Tensor,
    o_THV: torch.Tensor,
    lse_TH: torch.Tensor,
    sinks_H: torch.Tensor | None = None,
) -> None:
    """Run the rank's own rows of a wave's tasks where they are, and write their rows and heads of O and LSE.

    Args:
        wave: says which batches.
        kernel: runs them.
        rule: scale, window and soft-cap.
        q_THD: queries of the rank.
        k_S1D: keys that arrived.
        v_S1V: values that arrived.
        o_THV: written.
        lse_TH: written.
        sinks_H: one logit more per head, or None.
    """
    share = q_THD.shape[1] // wave.host.groups
    for batch, sequences in wave.half_local:
        rows, _, _, heads = _ranges(batch, share)
        out = o_THV[rows, heads]
        k, v = keys_by_group(k_S1D, batch), keys_by_group(v_S1V, batch)
        o, lse = kernel.forward(q_THD[rows, heads], k, v, sequences, rule, out)
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
        q_RGD: what arrived, with the rank's own rows of served tasks that are not run in place.
        k_S1D: what arrived, with the rank's own rows.
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


class HomeRows(NamedTuple):
    """A rank's own rows in the backward, as half-local batches read them; `dq_THD` is written."""

    do_THV: torch.Tensor
    q_THD: torch.Tensor
    o_THV: torch.Tensor
    lse_TH: torch.Tensor
    dq_THD: torch.Tensor


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
    home: HomeRows,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dQ [R, G, D], dK [S, 1, D], dV [S, 1, V] of the served and half-local tasks, made here; dQ of half-local ones is
    written at home.

    Args:
        wave: says which batches.
        kernel: runs them.
        rule: scale, window and soft-cap.
        do_RGV: what arrived, with the rank's own rows of served tasks that are not run in place.
        q_RGD: likewise, or kept since the forward.
        k_S1D: what arrived, with the rank's own rows, or kept since the forward.
        v_S1V: likewise.
        o_RGV: what `run_served` gave.
        lse_RG: likewise.
        home: own rows.
    """
    if not wave.served and not wave.half_local:
        return torch.empty_like(q_RGD), torch.empty_like(k_S1D), torch.empty_like(v_S1V)
    if len(wave.served) == 1 and not wave.half_local and not wave.keys_overlap:
        _, sequences = wave.served[0]
        return kernel.backward(do_RGV, q_RGD, k_S1D, v_S1V, o_RGV, lse_RG, sequences, rule)
    dq = torch.empty(q_RGD.shape, dtype=q_RGD.dtype, device=q_RGD.device)
    new = torch.zeros if wave.keys_overlap else torch.empty
    dk, dv = (
        new(x.shape, dtype=_wide(x.dtype) if wave.keys_overlap else x.dtype, device=x.device) for x in (k_S1D, v_S1V)
    )

    def run(own: tuple[torch.Tensor, ...], batch: Batch, sequences: Sequences, dq_QHD: torch.Tensor) -> None:
        k, v, into_k, into_v = (keys_by_group(x, batch) for x in (k_S1D, v_S1V, dk, dv))
        do, q, o, lse = own
        into = None if wave.keys_overlap else (dq_QHD, into_k, into_v)
        made = kernel.backward(do, q, k, v, o, lse, sequences, rule, into)
        if into is None:
            dq_QHD.copy_(made[0])
            into_k += made[1]
            into_v += made[2]
        elif made[0] is not into[0]:
            for target, value in zip(into, made, strict=True):
                target.copy_(value)

    for batch, sequences in wave.served:
        rows = slice(batch.q_row, batch.q_row + batch.q_rows)
        run(tuple(x[rows] for x in (do_RGV, q_RGD, o_RGV, lse_RG)), batch, sequences, dq[rows])
    share = home.q_THD.shape[1] // wave.host.groups
    for batch, sequences in wave.half_local:
        rows, _, _, heads = _ranges(batch, share)
        do, q, o, lse, own_dq = (x[rows, heads] for x in home)
        run((do, q, o, lse), batch, sequences, own_dq)
    return dq, dk.to(k_S1D.dtype), dv.to(v_S1V.dtype)


def by_group(x_THD: torch.Tensor, k_UKD: torch.Tensor) -> torch.Tensor:
    """[T, K, G·D]: the heads of a group side by side, a view; a copy where the heads of a row are not contiguous."""
    x = x_THD if x_THD.stride(2) == 1 and x_THD.stride(1) == x_THD.shape[2] else x_THD.contiguous()
    return x.unflatten(1, (k_UKD.shape[1], -1)).flatten(2)


def keys_by_group(x_S1D: torch.Tensor, batch: Batch) -> torch.Tensor:
    """[keys, groups, D]: key rows of a batch in a group-major tensor, a view; one group where the batch is served."""
    row, width = x_S1D.stride(0), x_S1D.shape[2]
    groups = batch.group_end - batch.group_begin
    at = x_S1D.storage_offset() + batch.k_row * row
    return x_S1D.as_strided((batch.k_rows, groups, width), (row, batch.k_step * row, 1), at)


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
