"""Attention by plain torch operations, one sequence and head group at a time: CPU, fp64, and the reference.

Memory is bounded by working through the query rows in blocks; probabilities are recomputed from the LSE in backward.
All of it is done in fp32, in fp64 for fp64 inputs, also under autocast. Shapes as in interface.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from deepspeed_cad.kernels.interface import KernelNeed, MaskRule, Sequences

BLOCK_ELEMENTS = 1 << 22
"""Most scores that are held at once, per head group."""


class TorchMath:
    """Exact attention on any device and dtype; slow, but it can do everything."""

    name = "torch_math"

    def refuse(self, need: KernelNeed) -> str | None:
        return None

    def forward(
        self,
        q_QHD: torch.Tensor,
        k_KGD: torch.Tensor,
        v_KGV: torch.Tensor,
        sequences: Sequences,
        rule: MaskRule,
        out_QHV: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        heads, share = q_QHD.shape[1], q_QHD.shape[1] // k_KGD.shape[1]
        work = _work_dtype(q_QHD)
        o_QHV = q_QHD.new_empty(q_QHD.shape[0], heads, v_KGV.shape[2])
        lse_QH = torch.empty(q_QHD.shape[0], heads, dtype=work, device=q_QHD.device)
        with _autocast_off(q_QHD):
            for rows, keys, shift in _blocks(sequences):
                q_GRD = q_QHD[rows].to(work).unflatten(1, (-1, share)).permute(1, 2, 0, 3)
                k_GKD, v_GKV = (x[keys].to(work).transpose(0, 1).unsqueeze(1) for x in (k_KGD, v_KGV))
                score, _ = _scores(q_GRD, k_GKD, rule, shift)
                lse = torch.logsumexp(score, dim=-1)
                o = torch.exp(score - lse.unsqueeze(-1)) @ v_GKV
                o_QHV[rows] = o.permute(2, 0, 1, 3).flatten(1, 2).to(o_QHV.dtype)
                lse_QH[rows] = lse.permute(2, 0, 1).flatten(1, 2)
        return o_QHV, lse_QH

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
        into: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        share = q_QHD.shape[1] // k_KGD.shape[1]
        work = _work_dtype(q_QHD)
        dq_QHD = torch.empty_like(q_QHD, memory_format=torch.contiguous_format)
        dk_KGD = torch.zeros(k_KGD.shape, dtype=work, device=k_KGD.device)
        dv_KGV = torch.zeros(v_KGV.shape, dtype=work, device=v_KGV.device)
        with _autocast_off(q_QHD):
            for rows, keys, shift in _blocks(sequences):
                q, do, o = (
                    x[rows].to(work).unflatten(1, (-1, share)).permute(1, 2, 0, 3) for x in (q_QHD, do_QHV, o_QHV)
                )
                k, v = (x[keys].to(work).transpose(0, 1).unsqueeze(1) for x in (k_KGD, v_KGV))
                lse = lse_QH[rows].to(work).unflatten(1, (-1, share)).permute(1, 2, 0)
                score, slope = _scores(q, k, rule, shift)
                p = torch.exp(score - lse.unsqueeze(-1))
                dv_KGV[keys] += (p.transpose(-1, -2) @ do).sum(1).transpose(0, 1)
                ds = p * (do @ v.transpose(-1, -2) - (do * o).sum(-1, keepdim=True))
                if slope is not None:
                    ds = ds * slope
                dq_QHD[rows] = (ds @ k * rule.scale).permute(2, 0, 1, 3).flatten(1, 2).to(dq_QHD.dtype)
                dk_KGD[keys] += (ds.transpose(-1, -2) @ q * rule.scale).sum(1).transpose(0, 1)
        return dq_QHD, dk_KGD.to(k_KGD.dtype), dv_KGV.to(v_KGV.dtype)


def _work_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _autocast_off(tensor: torch.Tensor) -> torch.autocast:
    """Autocast rounds scores to bf16 in a forward, where it is on, and not in a backward, where it is off: that would
    make probabilities there which are not those of the LSE."""
    return torch.autocast(tensor.device.type, enabled=False)


def _blocks(sequences: Sequences) -> Iterator[tuple[slice, slice, int]]:
    """(query rows, key rows, position of the first query row among the keys) of blocks of bounded size."""
    for i in range(len(sequences.host_q) - 1):
        q0, q1 = int(sequences.host_q[i]), int(sequences.host_q[i + 1])
        k0, k1 = int(sequences.host_k[i]), int(sequences.host_k[i + 1])
        step = max(1, BLOCK_ELEMENTS // max(k1 - k0, 1))
        for row in range(q0, q1, step):
            stop = min(row + step, q1)
            shift = (k1 - k0) - (q1 - row)
            yield slice(row, stop), slice(k0, k1 - (q1 - stop)), shift


def _scores(
    q_GRD: torch.Tensor, k_GKD: torch.Tensor, rule: MaskRule, shift: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Masked scores [G, heads per group, rows, keys], and the slope of the soft-cap where there is one."""
    score = q_GRD @ k_GKD.transpose(-1, -2) * rule.scale
    slope = None
    if rule.softcap is not None:
        bent = torch.tanh(score / rule.softcap)
        score, slope = bent * rule.softcap, 1 - bent * bent
    row = torch.arange(score.shape[-2], device=score.device).unsqueeze(1) + shift
    key = torch.arange(score.shape[-1], device=score.device).unsqueeze(0)
    hidden = key > row
    if rule.window is not None:
        hidden = hidden | (key <= row - rule.window)
    return score.masked_fill(hidden, float("-inf")), slope
