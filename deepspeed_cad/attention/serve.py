"""Serving: run the batches of a schedule on buffers, forward and backward.

No autograd, no communication, no model: the steps of a call (forward.py, backward.py) and the loop of a server are thin
callers. `T` tokens at home, `R` served query rows, `S` served key rows, `H` query heads, `K` head groups, `G` query
heads per group, `D` and `V` sizes of a query/key and a value head. Home tensors are [T, K·G, D]; served ones are
group-major: [R, G, D], [S, 1, D].
"""

from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed_cad.attention.device_schedule import Batches, DeviceSchedule, Wave
from deepspeed_cad.attention.setup import CallSetup
from deepspeed_cad.kernels.interface import Sequences, Three
from deepspeed_cad.schedule import Batch


class Outputs(NamedTuple):
    """O and LSE of a rank's own rows, to be filled."""

    o_THV: Tensor
    lse_TH: Tensor


class HomeRows(NamedTuple):
    """A rank's own rows in the backward, as half-local batches read them; `dq_THD` is written."""

    do_THV: Tensor
    q_THD: Tensor
    o_THV: Tensor
    lse_TH: Tensor
    dq_THD: Tensor


def fold_sinks(o: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Output and LSE of a softmax with one more logit per head that has no value: sinks [H] or [rows, H]."""
    # On a CPU the last numbers of a vector loop round otherwise than those before them, by where they lie: not in fp64.
    wide = torch.float64 if lse.device.type == "cpu" else lse.dtype
    total = torch.logaddexp(lse.to(wide), sinks.to(wide))
    return o * torch.exp(lse.to(wide) - total).unsqueeze(-1).to(o.dtype), total.to(lse.dtype)


def new_outputs(schedule: DeviceSchedule, q_THD: Tensor, v_TKV: Tensor) -> Outputs:
    """For the rows of Q; padding is zero."""
    rows, heads = q_THD.shape[:2]
    o_THV = q_THD.new_empty(rows, heads, v_TKV.shape[2])
    lse_TH = torch.empty(rows, heads, dtype=lse_dtype(q_THD.dtype), device=q_THD.device)
    if len(schedule.padding):
        o_THV[schedule.padding] = 0
        lse_TH[schedule.padding] = 0
    return Outputs(o_THV, lse_TH)


def run_local(setup: CallSetup, batches: Batches, qkv: Three, into: Outputs, sinks_H: Tensor | None = None) -> None:
    """Run local batches and write their rows and heads of O and LSE.

    K and V are those of the rank and, in a second nano-batch, of documents that began in the first. `sinks_H`: one
    logit more per head, or None."""
    q_THD, k_TKD, v_TKV = qkv
    for batch, sequences in batches:
        rows, keys, groups, heads = _ranges(batch, q_THD.shape[1] // k_TKD.shape[1])
        own, part = Outputs(*(x[rows, heads] for x in into)), None if sinks_H is None else sinks_H[heads]
        _attend(setup, sequences, (q_THD[rows, heads], k_TKD[keys, groups], v_TKV[keys, groups]), own, part)


def run_served(
    setup: CallSetup, wave: Wave, received: Three, q_THD: Tensor, into: Outputs, sinks_RG: Tensor | None,
    sinks_H: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """O [R, G, V] and LSE [R, G] of the served tasks, made here; LSE has any strides. Half-local ones, the rank's own
    rows with keys that arrived, are run where they are, into `into`.

    `received`: Q, K and V that arrived, with the rank's own rows of tasks that are not run in place. Sinks: one logit
    more per served row and head, and per head of the rank."""
    q_RGD, k_S1D, v_S1V = received
    results = []
    for batch, sequences in wave.served:
        rows, keys, _, _ = _ranges(batch, 1)
        results.append(setup.kernel.forward(q_RGD[rows], k_S1D[keys], v_S1V[keys], sequences, setup.rule))
    if not results:
        o_RGV = q_RGD.new_empty(*q_RGD.shape[:2], v_S1V.shape[2])
        lse_RG = torch.empty(q_RGD.shape[:2], dtype=lse_dtype(q_RGD.dtype), device=q_RGD.device)
    else:
        o_RGV, lse_RG = results[0] if len(results) == 1 else (torch.cat(parts) for parts in zip(*results))
        if sinks_RG is not None:
            o_RGV, lse_RG = fold_sinks(o_RGV, lse_RG, sinks_RG)
    for batch, sequences in wave.half_local:
        rows, _, _, heads = _ranges(batch, q_THD.shape[1] // wave.host.groups)
        k, v = keys_by_group(k_S1D, batch), keys_by_group(v_S1V, batch)
        own, sinks = Outputs(*(x[rows, heads] for x in into)), None if sinks_H is None else sinks_H[heads]
        _attend(setup, sequences, (q_THD[rows, heads], k, v), own, sinks)
    return o_RGV, lse_RG


def _attend(setup: CallSetup, sequences: Sequences, qkv: Three, into: Outputs, sinks: Tensor | None) -> None:
    o, lse = setup.kernel.forward(*qkv, sequences, setup.rule, into.o_THV)
    if sinks is not None:
        o, lse = fold_sinks(o, lse, sinks)
    if o is not into.o_THV:
        into.o_THV.copy_(o)
    into.lse_TH.copy_(lse)


def new_gradients(
    schedule: DeviceSchedule, q_THD: Tensor, k_TKD: Tensor, v_TKV: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ [T, H, D] to be filled, and dK [T, K, D], dV [T, K, V], zero; wider where local batches share key rows."""
    wide = lse_dtype(k_TKD.dtype) if schedule.local_keys_overlap else k_TKD.dtype
    dq = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    if len(schedule.padding):
        dq[schedule.padding] = 0
    dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (k_TKD, v_TKV))
    return dq, dk, dv


def run_local_backward(
    setup: CallSetup, batches: Batches, home: HomeRows, k_TKD: Tensor, v_TKV: Tensor, dk_TKD: Tensor,
    dv_TKV: Tensor,
) -> None:  # fmt: skip
    """Run local batches backward: dQ of `home`, dK and dV are written, or added to where batches share rows of these.

    O and LSE of `home` are those of the whole forward, also of what other ranks ran."""
    for batch, sequences in batches:
        rows, keys, groups, heads = _ranges(batch, home.q_THD.shape[1] // k_TKD.shape[1])
        do, q, o, lse, dq = (x[rows, heads] for x in home)
        k, v, dk, dv = (x[keys, groups] for x in (k_TKD, v_TKV, dk_TKD, dv_TKV))
        _differentiate(setup, sequences, do, (q, k, v), o, lse, (dq, dk, dv), add=setup.schedule.local_keys_overlap)


def run_served_backward(
    setup: CallSetup, wave: Wave, do_RGV: Tensor, received: Three, o_RGV: Tensor, lse_RG: Tensor,
    home: HomeRows,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dQ [R, G, D], dK [S, 1, D], dV [S, 1, V] of the served and half-local tasks, made here; dQ of half-local ones is
    written at home. dO and `received` as in `run_served`, or kept since the forward; O and LSE are what that gave."""
    q_RGD, k_S1D, v_S1V = received
    if not wave.served and not wave.half_local:
        return torch.empty_like(q_RGD), torch.empty_like(k_S1D), torch.empty_like(v_S1V)
    if len(wave.served) == 1 and not wave.half_local and not wave.keys_overlap:
        _, sequences = wave.served[0]
        return setup.kernel.backward(do_RGV, *received, o_RGV, lse_RG, sequences, setup.rule)
    add = wave.keys_overlap
    dq_RGD = torch.empty(q_RGD.shape, dtype=q_RGD.dtype, device=q_RGD.device)
    dk_S1D, dv_S1V = (
        torch.zeros(x.shape, dtype=lse_dtype(x.dtype), device=x.device)
        if add
        else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for x in (k_S1D, v_S1V)
    )
    served = HomeRows(do_RGV, q_RGD, o_RGV, lse_RG, dq_RGD)
    share = home.q_THD.shape[1] // wave.host.groups
    parts = [(*one, served, slice(None)) for one in wave.served]
    parts += [(*one, home, _ranges(one[0], share)[3]) for one in wave.half_local]
    for batch, sequences, own, heads in parts:
        do, q, o, lse, dq = (x[batch.q_row : batch.q_row + batch.q_rows, heads] for x in own)
        k, v, dk, dv = (keys_by_group(x, batch) for x in (k_S1D, v_S1V, dk_S1D, dv_S1V))
        _differentiate(setup, sequences, do, (q, k, v), o, lse, (dq, dk, dv), add)
    return dq_RGD, dk_S1D.to(k_S1D.dtype), dv_S1V.to(v_S1V.dtype)


def _differentiate(
    setup: CallSetup, sequences: Sequences, do: Tensor, qkv: Three, o: Tensor, lse: Tensor,
    into: Three, add: bool,
) -> None:  # fmt: skip
    """Write dQ, dK and dV; with `add`, add to dK and dV."""
    made = setup.kernel.backward(do, *qkv, o, lse, sequences, setup.rule, None if add else into)
    if add:
        into[0].copy_(made[0])
        into[1].add_(made[1])
        into[2].add_(made[2])
    elif made[0] is not into[0]:
        for target, value in zip(into, made, strict=True):
            target.copy_(value)


def as_received(arrived: list[Tensor], q_THD: Tensor) -> Three:
    """Q, K and V that a transport delivered, [rows, width] each, as the kernel takes them."""
    q_RW, k_SD, v_SV = arrived
    return q_RW.unflatten(1, (-1, q_THD.shape[2])), k_SD.unsqueeze(1), v_SV.unsqueeze(1)


def by_group(x_THD: Tensor, k_UKD: Tensor) -> Tensor:
    """[T, K, G·D]: the heads of a group side by side, a view; a copy where the heads of a row are not contiguous."""
    x = x_THD if x_THD.stride(2) == 1 and x_THD.stride(1) == x_THD.shape[2] else x_THD.contiguous()
    return x.unflatten(1, (k_UKD.shape[1], -1)).flatten(2)


def keys_by_group(x_S1D: Tensor, batch: Batch) -> Tensor:
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
    """Of LSE and of sums: fp32, fp64 for fp64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32
