"""Rows of padding: what the model's own attention gives them, where their output may count.

No plan covers rows of padding, so CAD's attention gives them zeros, as FlashAttention in transformers does. The sdpa
and eager attention of transformers let such a row attend to the real tokens before it in its batch row. Nobody reads
that where labels are -100 behind the mask; where they are not, or nobody knows, those rows are computed here as the
model itself would: by its own attention function, on this rank, beside the plan.

In: this rank's rows, the labels that the model was called with. Out: O with its rows of padding filled. `B` batch
rows, `S` tokens of each, `H` and `K` query and key heads, `D` and `V` their sizes, `m` columns that have padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from deepspeed_cad.attention.microbatch import MaskDescriptor
from deepspeed_cad.layout import LocalSegments

IGNORED = -100
"""The label that transformers' losses leave out."""

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class _Block:
    """The columns of queries that hold all padding of one nano-batch, for one window."""

    begin: int
    end: int
    """Columns with padding, counted from the first query of the nano-batch."""
    keys: int
    """Columns of keys that are read, counted from the start of the batch row."""
    visible: torch.Tensor
    """[B, 1, m, keys] which keys a query sees."""
    padded: torch.Tensor
    """[B, m, 1, 1] which of these queries are padding."""


class Padding:
    """The rows of padding of one micro-batch on this rank."""

    def __init__(self, real_BS: Bools, eager: bool, device: torch.device) -> None:
        """`real_BS`: where tokens are; `eager`: rows that see no key get the mean of all values, and not zeros."""
        self.real_BS, self.eager, self.device = real_BS, eager, device
        self._blocks: dict[tuple[int | None, int | None], _Block | None] = {}
        self._first: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """K and V of the first nano-batch, by layer, where the cut lies inside the only batch row. Where nano-batches
        alternate over the decoder it stays: under checkpointing the second runs again before the first."""

    def fill(
        self,
        layer: int,
        descriptor: MaskDescriptor,
        q_BHSD: torch.Tensor,
        k_BKSD: torch.Tensor,
        v_BKSV: torch.Tensor,
        o_BSHV: torch.Tensor,
        attend: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        """O with its rows of padding. `attend(q, k, v, visible)` gives [B, m, H, V] by the model's own attention."""
        cut = self._cut(descriptor)
        if cut is None:
            return o_BSHV
        rows, first, last = cut
        batch, width = self.real_BS.shape
        k, v = k_BKSD, v_BKSV
        if batch == 1 and first == 0 and last < width:
            if not descriptor.runs_again:
                self._first[layer] = (k, v)
        elif batch == 1 and first > 0:
            earlier = self._first.pop(layer)
            if descriptor.interleaved:
                self._first[layer] = (earlier[0].detach(), earlier[1].detach())
            k, v = (torch.cat(pair, dim=2) for pair in zip(earlier, (k, v), strict=True))
        name = (descriptor.nano_batch, descriptor.window)
        if name not in self._blocks:
            self._blocks[name] = self._block(self.real_BS[rows], first, last, descriptor.window)
        block = self._blocks[name]
        if block is None:
            return o_BSHV
        filled = attend(
            q_BHSD[:, :, block.begin : block.end], k[:, :, : block.keys], v[:, :, : block.keys], block.visible
        )
        own = o_BSHV[:, block.begin : block.end]
        parts = o_BSHV[:, : block.begin], torch.where(block.padded, filled, own), o_BSHV[:, block.end :]
        return torch.cat(parts, dim=1)

    def _cut(self, descriptor: MaskDescriptor) -> tuple[slice, int, int] | None:
        """Batch rows and columns of a nano-batch; None for a stand-in that has none."""
        batch, width = self.real_BS.shape
        if descriptor.nano_batch is None:
            return slice(0, batch), 0, width
        at = descriptor.micro_batch.rows(0)
        if batch == 1:
            first, last = (0, at) if descriptor.nano_batch == 0 else (at, width)
            return (slice(0, 1), first, last) if first < last else None
        rows = slice(0, at // width) if descriptor.nano_batch == 0 else slice(at // width, batch)
        return (rows, 0, width) if rows.start < rows.stop else None

    def _block(self, real: Bools, first: int, last: int, window: int | None) -> _Block | None:
        width = real.shape[1]
        padded = ~real[:, first:last]
        before = np.concatenate([np.zeros((len(real), 1), np.int64), np.cumsum(real, axis=1)], axis=1)
        column = np.arange(first, last)
        oldest = np.maximum(column + 1 - (window or width), 0)
        blind = padded & (before[:, column + 1] == before[:, oldest])
        wanted = padded if self.eager else padded & ~blind
        if not wanted.any():
            return None
        columns = np.flatnonzero(wanted.any(axis=0))
        begin, end = int(columns[0]), int(columns[-1]) + 1
        keys = last if self.eager else first + end
        query = torch.arange(first + begin, first + end, device=self.device)[:, None]
        key = torch.arange(keys, device=self.device)[None]
        near = (key <= query) & (query - key < (window or width))
        shown = torch.from_numpy(real[:, :keys]).to(self.device)
        padding = torch.from_numpy(padded[:, begin:end]).to(self.device)
        return _Block(begin, end, keys, (near & shown[:, None, :])[:, None], padding[:, :, None, None])


def find_padding(local: LocalSegments, batch: int, width: int) -> Bools | None:
    """[batch, width] where this rank has tokens; None where it has no padding."""
    real = np.zeros(batch * width, bool)
    for begin, end, offset in local.to_array():
        real[offset : offset + end - begin] = True
    return None if real.all() else real.reshape(batch, width)


def counts(real_BS: Bools, given: Mapping[str, Any]) -> bool | None:
    """Whether labels count outputs of padding, from what the whole model was called with; None: nobody knows.

    `labels` are looked at as those of the same row and of the row before, `shift_labels` as those of the same row.
    """
    ignored = given.get("ignore_index", IGNORED)
    for name, shifted in (("shift_labels", False), ("labels", True)):
        labels = given.get(name)
        if isinstance(labels, torch.Tensor) and labels.shape == real_BS.shape:
            used = (labels.detach() != ignored).cpu().numpy()
            found = bool((used & ~real_BS).any())
            return found or (shifted and bool((used[:, 1:] & ~real_BS[:, :-1]).any()))
    return None
