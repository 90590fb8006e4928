"""Attention by plain torch operations, one sequence and head group at a time: CPU, fp64, and the reference.

Memory is bounded by working through the query rows in blocks; probabilities are recomputed from the LSE in backward.
All of it is done in fp32, in fp64 for fp64 inputs, also under autocast, which is on in a forward and off in a backward:
probabilities there would not be those of the LSE. Shapes as in interface.py.

The forward gives a row the same bits however its document is cut. Matrix products and vector loops of a CPU sum in
another order where sizes differ, so all are done in tiles that begin at multiples of TILE from the first key: tensors
in which a row takes part have the same sizes, and the row the same place in them, whichever other rows are there.
"""

from collections.abc import Iterator

import torch

from deepspeed_cad.kernels.interface import Kernel, KernelNeed, MaskRule, Sequences, Three

BLOCK_ELEMENTS = 1 << 22
"""Most scores that are held at once in backward, per head group."""
TILE = 64
"""Rows of a tile, and keys whose number is rounded up to it: a multiple of what any CPU computes as one vector."""


class TorchMath(Kernel):
    """Exact attention on any device and dtype; slow, but it can do everything."""

    name = "torch_math"

    def refuse(self, need: KernelNeed) -> str | None:
        return None

    def forward(
        self, q_QHD: torch.Tensor, k_KGD: torch.Tensor, v_KGV: torch.Tensor, sequences: Sequences, rule: MaskRule,
        out_QHV: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        heads, share = q_QHD.shape[1], q_QHD.shape[1] // k_KGD.shape[1]
        work = torch.promote_types(q_QHD.dtype, torch.float32)
        o_QHV = q_QHD.new_empty(q_QHD.shape[0], heads, v_KGV.shape[2])
        lse_QH = torch.empty(q_QHD.shape[0], heads, dtype=work, device=q_QHD.device)
        with torch.autocast(q_QHD.device.type, enabled=False):
            for i in range(len(sequences.host_q) - 1):
                q0, q1 = int(sequences.host_q[i]), int(sequences.host_q[i + 1])
                k0, k1 = int(sequences.host_k[i]), int(sequences.host_k[i + 1])
                if q1 == q0:
                    continue
                first = (k1 - k0) - (q1 - q0)
                k_GKD, v_GKV = (_in_tiles(x[k0:k1], 0, work).transpose(0, 1).contiguous() for x in (k_KGD, v_KGV))
                q_GRD = _in_tiles(q_QHD[q0:q1], first % TILE, work).unflatten(1, (-1, share))
                for row in range(0, len(q_GRD), TILE):
                    at = first - first % TILE + row  # of the tile among the keys
                    low = 0 if rule.window is None else max(0, (at - rule.window + 1) // TILE * TILE)
                    here = slice(max(at - first, 0), min(at - first + TILE, q1 - q0))
                    inside = slice(here.start + first - at, here.stop + first - at)
                    for group in range(heads // share):
                        q_SRD = q_GRD[row : row + TILE, group].transpose(0, 1).contiguous()
                        k_KD, v_KV = (x[group, low : at + TILE] for x in (k_GKD, v_GKV))
                        score, _ = _scores((q_SRD.flatten(0, 1) @ k_KD.T).unflatten(0, (share, -1)), rule, at - low)
                        lse = torch.logsumexp(score, dim=-1)
                        o = (torch.exp(score - lse.unsqueeze(-1)).flatten(0, 1) @ v_KV).unflatten(0, (share, -1))
                        to = slice(q0 + here.start, q0 + here.stop), slice(group * share, (group + 1) * share)
                        o_QHV[to] = o[:, inside].transpose(0, 1).to(o_QHV.dtype)
                        lse_QH[to] = lse[:, inside].T
        return o_QHV, lse_QH

    def backward(
        self, do_QHV: torch.Tensor, q_QHD: torch.Tensor, k_KGD: torch.Tensor, v_KGV: torch.Tensor, o_QHV: torch.Tensor,
        lse_QH: torch.Tensor, sequences: Sequences, rule: MaskRule, into: Three | None = None,
    ) -> Three:  # fmt: skip
        share = q_QHD.shape[1] // k_KGD.shape[1]
        work = torch.promote_types(q_QHD.dtype, torch.float32)
        dq_QHD = torch.empty_like(q_QHD, memory_format=torch.contiguous_format)
        dk_KGD = torch.zeros(k_KGD.shape, dtype=work, device=k_KGD.device)
        dv_KGV = torch.zeros(v_KGV.shape, dtype=work, device=v_KGV.device)
        with torch.autocast(q_QHD.device.type, enabled=False):
            for rows, keys, shift in _blocks(sequences):
                q, do, o = (
                    x[rows].to(work).unflatten(1, (-1, share)).permute(1, 2, 0, 3) for x in (q_QHD, do_QHV, o_QHV)
                )
                k, v = (x[keys].to(work).transpose(0, 1).unsqueeze(1) for x in (k_KGD, v_KGV))
                lse = lse_QH[rows].to(work).unflatten(1, (-1, share)).permute(1, 2, 0)
                score, slope = _scores(q @ k.transpose(-1, -2), rule, shift)
                p = torch.exp(score - lse.unsqueeze(-1))
                dv_KGV[keys] += (p.transpose(-1, -2) @ do).sum(1).transpose(0, 1)
                ds = p * (do @ v.transpose(-1, -2) - (do * o).sum(-1, keepdim=True))
                if slope is not None:
                    ds = ds * slope
                dq_QHD[rows] = (ds @ k * rule.scale).permute(2, 0, 1, 3).flatten(1, 2).to(dq_QHD.dtype)
                dk_KGD[keys] += (ds.transpose(-1, -2) @ q * rule.scale).sum(1).transpose(0, 1)
        return dq_QHD, dk_KGD.to(k_KGD.dtype), dv_KGV.to(v_KGV.dtype)


def _blocks(sequences: Sequences) -> Iterator[tuple[slice, slice, int]]:
    """(query rows, key rows, position of the first query row among the keys) of blocks of bounded size."""
    for i in range(len(sequences.host_q) - 1):
        q0, q1 = int(sequences.host_q[i]), int(sequences.host_q[i + 1])
        k0, k1 = int(sequences.host_k[i]), int(sequences.host_k[i + 1])
        step = max(1, BLOCK_ELEMENTS // max(k1 - k0, 1))
        for row in range(q0, q1, step):
            stop = min(row + step, q1)
            yield slice(row, stop), slice(k0, k1 - (q1 - stop)), (k1 - k0) - (q1 - row)


def _in_tiles(x_RGD: torch.Tensor, before: int, work: torch.dtype) -> torch.Tensor:
    """Rows with `before` rows of zeros in front of them, and as many behind as fill the last tile."""
    rows = before + len(x_RGD)
    tiles = x_RGD.new_zeros((rows + TILE - 1) // TILE * TILE, *x_RGD.shape[1:], dtype=work)
    tiles[before:rows] = x_RGD
    return tiles


def _scores(product: torch.Tensor, rule: MaskRule, shift: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Masked scores [..., rows, keys] of Q K^T, and the slope of the soft-cap where there is one. `shift`: of the first
    row among the keys."""
    score = product * rule.scale
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
