"""Serving: run the batches of a schedule on buffers, forward and backward. Pure functions of tensors and schedule.

No autograd, no communication, no model: the autograd functions (attention.py) and the loop of a reserved server are
thin callers. `T` tokens at home, `R` served query rows, `S` served key rows, `H` query heads, `K` head groups, `G`
query heads per group, `D` and `V` sizes of a query/key and a value head. Home tensors are [T, K·G, D]; served ones are
group-major: [R, G, D], [S, 1, D].
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from deepspeed_cad.kernels.interface import Kernel, MaskRule, Sequences
from deepspeed_cad.schedule import GROUP, KIND, QUERY, ROWS, SERVER_ROW, Batch, Schedule

Batches = tuple[tuple[Batch, Sequences], ...]
"""Batches with their cumulative lengths on the device."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """A schedule with what kernels need of it on the device."""

    schedule: Schedule
    early: Batches
    """Local batches to run while Q, K, V are on their way out: about half of the local work."""
    late: Batches
    """Local batches to run after the served ones, on their stream, while results are on their way back."""
    served: Batches
    local_keys_overlap: bool
    """Whether two local batches read the same key rows of the same group: their dK/dV add up."""
    served_keys_overlap: bool
    served_group: torch.Tensor
    """[R] head group of every served query row."""
    padding: torch.Tensor
    """Rows of the query buffer without a task."""


def prepare(schedule: Schedule, device: torch.device, two_streams: bool = False) -> Prepared:
    """Upload the cumulative lengths of a schedule's batches.

    On two streams no batch has to be cut for overlap, but those that add to the same rows of dK and dV stay on one.
    """

    def upload(values: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

    def sequences(batch: Batch) -> tuple[Batch, Sequences]:
        cu_q, cu_k = upload(batch.cu_q), upload(batch.cu_k)
        return batch, Sequences(batch.cu_q, batch.cu_k, cu_q, cu_k, batch.max_q, batch.max_k)

    group = np.zeros(int(schedule.served_rows[schedule.rank, QUERY]), np.int64)
    for table in (schedule.receives, schedule.own):
        rows = table[table[:, KIND] == QUERY]
        for first, count, value in rows[:, [SERVER_ROW, ROWS, GROUP]]:
            group[first : first + count] = value
    padding = schedule.padding_rows
    whole = (
        len(schedule.local) == 1
        and not len(schedule.own)
        and not len(schedule.sends)
        and not len(padding)
        and schedule.local[0].q_rows == schedule.query_tokens
        and schedule.local[0].k_rows == schedule.key_tokens
    )
    overlap = _keys_overlap(schedule.local)
    early: tuple[Batch, ...]
    late: tuple[Batch, ...]
    if whole or (two_streams and overlap):
        early, late = schedule.local, ()
    elif two_streams:
        early, late = schedule.local[::2], schedule.local[1::2]
    else:
        early, late = halve(schedule.local)
    return Prepared(
        schedule,
        tuple(sequences(batch) for batch in early),
        tuple(sequences(batch) for batch in late),
        tuple(sequences(batch) for batch in schedule.served),
        overlap,
        _keys_overlap(schedule.served) or _keys_missing(schedule),
        upload(group),
        upload(padding),
    )


def _keys_overlap(batches: tuple[Batch, ...]) -> bool:
    """Two batches with common groups and common key rows."""
    spans = sorted((b.group_begin, b.group_end, b.k_row, b.k_row + b.k_rows) for b in batches)
    return any(
        a[0] < b[1] and b[0] < a[1] and a[2] < b[3] and b[2] < a[3] for i, a in enumerate(spans) for b in spans[i + 1 :]
    )


def _keys_missing(schedule: Schedule) -> bool:
    held = sum(batch.k_rows for batch in schedule.served)
    return held != int(schedule.served_rows[schedule.rank, 1])


def halve(batches: tuple[Batch, ...]) -> tuple[tuple[Batch, ...], tuple[Batch, ...]]:
    """Two parts of about equal work. The batch in the middle is cut between head groups, which costs nothing."""
    work = np.array([(b.group_end - b.group_begin) * _pairs(b) for b in batches])
    early: list[Batch] = []
    late: list[Batch] = []
    done, half = 0.0, float(work.sum()) / 2
    for batch, own in zip(batches, work, strict=True):
        groups = batch.group_end - batch.group_begin
        first = round(min(max((half - done) / own, 0.0), 1.0) * groups) if own else groups
        middle = batch.group_begin + first
        if first:
            early.append(replace(batch, group_end=middle))
        if first < groups:
            late.append(replace(batch, group_begin=middle))
        done += own
    return tuple(early), tuple(late)


def _pairs(batch: Batch) -> float:
    """Query-key pairs of a batch and head group, windows aside."""
    q, k = np.diff(batch.cu_q).astype(np.float64), np.diff(batch.cu_k).astype(np.float64)
    return float((q * (k - q / 2 + 0.5)).sum())


def fold_sinks(o: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of a softmax with one more logit per head that has no value: sinks [H] or [rows, H]."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype))
    return (o * torch.exp(lse - total).unsqueeze(-1).to(o.dtype)), total


def new_outputs(prepared: Prepared, q_THD: torch.Tensor, v_TKV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """O [T, H, V] and LSE [T, H] to be filled; padding is zero."""
    rows, heads = q_THD.shape[:2]
    o_THV = q_THD.new_empty(rows, heads, v_TKV.shape[2])
    lse_TH = torch.empty(rows, heads, dtype=lse_dtype(q_THD.dtype), device=q_THD.device)
    if len(prepared.padding):
        o_THV[prepared.padding] = 0
        lse_TH[prepared.padding] = 0
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
    """Run local batches and write their rows and heads of O and LSE."""
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
    prepared: Prepared,
    kernel: Kernel,
    rule: MaskRule,
    q_RGD: torch.Tensor,
    k_S1D: torch.Tensor,
    v_S1V: torch.Tensor,
    sinks_H: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """O [R, G, V] and LSE [R, G] of the served tasks."""
    if not prepared.served:
        o = q_RGD.new_empty(q_RGD.shape[0], q_RGD.shape[1], v_S1V.shape[2])
        return o, torch.empty(q_RGD.shape[:2], dtype=lse_dtype(q_RGD.dtype), device=q_RGD.device)
    results = []
    for batch, sequences in prepared.served:
        rows, keys, _, _ = _ranges(batch, 1)
        results.append((rows, *kernel.forward(q_RGD[rows], k_S1D[keys], v_S1V[keys], sequences, rule)))
    if len(results) == 1:
        _, o, lse = results[0]
    else:
        results.sort(key=lambda item: item[0].start)
        o, lse = torch.cat([item[1] for item in results]), torch.cat([item[2] for item in results])
    if sinks_H is not None:
        o, lse = fold_sinks(o, lse, sinks_H.view(-1, q_RGD.shape[1])[prepared.served_group])
    return o, lse


def new_gradients(
    prepared: Prepared, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKV: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dQ [T, H, D] to be filled, and dK [T, K, D], dV [T, K, V], zero; wider where local batches share key rows."""
    wide = _wide(k_TKD.dtype) if prepared.local_keys_overlap else k_TKD.dtype
    dq = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    if len(prepared.padding):
        dq[prepared.padding] = 0
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
    """Run local batches backward: write dQ, write dK and dV, or add to them where batches share key rows."""
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
    prepared: Prepared,
    kernel: Kernel,
    rule: MaskRule,
    do_RGV: torch.Tensor,
    q_RGD: torch.Tensor,
    k_S1D: torch.Tensor,
    v_S1V: torch.Tensor,
    o_RGV: torch.Tensor,
    lse_RG: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dQ [R, G, D], dK [S, 1, D], dV [S, 1, V] of the served tasks."""
    if not prepared.served:
        return torch.empty_like(q_RGD), torch.empty_like(k_S1D), torch.empty_like(v_S1V)
    if len(prepared.served) == 1 and not prepared.served_keys_overlap:
        _, sequences = prepared.served[0]
        return kernel.backward(do_RGV, q_RGD, k_S1D, v_S1V, o_RGV, lse_RG, sequences, rule)
    wide = _wide(k_S1D.dtype)
    dq = torch.empty(q_RGD.shape, dtype=q_RGD.dtype, device=q_RGD.device)
    dk = torch.zeros(k_S1D.shape, dtype=wide, device=q_RGD.device)
    dv = torch.zeros(v_S1V.shape, dtype=wide, device=q_RGD.device)
    for batch, sequences in prepared.served:
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
