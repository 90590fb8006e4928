"""Plain softmax attention of one document, some rows at a time: what `verify` compares with.

In: Q, K and V of a document, and what a layer says of its mask. Out: O in fp32 or wider. Knows nothing of other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from deepspeed_cad.kernels.interface import MaskRule

_SCORES = 2**27
"""How many scores of all heads a reference holds at a time."""


def visible_blocks(
    document: slice, window: int | None, heads: int, device: torch.device
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Rows, the keys that they may read, and which of these each row sees ([rows, keys])."""
    length = document.stop - document.start
    step = max(1, _SCORES // (heads * max(length, 1)))
    for begin in range(0, length, step):
        end = min(begin + step, length)
        first = 0 if window is None else max(0, begin - window + 1)
        row, key = torch.arange(begin, end, device=device)[:, None], torch.arange(first, end, device=device)[None]
        visible = key <= row
        if window is not None:
            visible &= row - key < window
        at = document.start
        yield slice(at + begin, at + end), slice(at + first, at + end), visible


def plain_attention(
    q_RHD: torch.Tensor,
    k_UKD: torch.Tensor,
    v_UKV: torch.Tensor,
    visible_RU: torch.Tensor,
    rule: MaskRule,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """O [R, H, V] in fp32 or wider: softmax of scores, nothing else."""
    q, k, v = (x.to(wide(x.dtype)) for x in (q_RHD, k_UKD, v_UKV))
    with torch.autocast(q.device.type, enabled=False):
        score = torch.einsum("rkgd,ukd->kgru", q.unflatten(1, (k.shape[1], -1)), k) * rule.scale
        if rule.softcap is not None:
            score = rule.softcap * torch.tanh(score / rule.softcap)
        score = score.masked_fill(~visible_RU, float("-inf"))
        if sinks_H is not None:
            column = sinks_H.to(score.dtype).view(k.shape[1], -1, 1, 1).expand(*score.shape[:3], 1)
            score = torch.cat([score, column], dim=3)
        weight = torch.softmax(score, dim=3)[..., : v.shape[0]]
        return torch.einsum("kgru,ukv->rkgv", weight, v).flatten(1, 2)


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
