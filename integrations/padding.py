"""Rows of padding: what the model's own attention gives them, where their output may count.

No plan covers them, so CAD's attention gives them zeros. The sdpa and eager attention of transformers let such a row
attend to the real tokens before it. Where labels are not -100 behind the mask, or nobody knows, those rows are computed
here by the model's own attention function, on this rank, beside the plan. `B` batch rows, `S` tokens of each, `H` and
`K` query and key heads, `D` and `V` their sizes, `m` columns that have padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from deepspeed_cad.ahead.documents import MASK, batch_shape
from deepspeed_cad.attention.microbatch import MaskDescriptor, MicroBatch
from deepspeed_cad.layout import LocalSegments

if TYPE_CHECKING:
    from deepspeed_cad.integrations.transformers import Binding

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


def find_counted(binding: Binding, micro_batch: MicroBatch, given: Mapping[str, Any]) -> Padding | None:
    """Rows of padding of a forward whose output may count, where the model's attention gives them one."""
    real = find_padding(micro_batch.local(), *batch_shape(given))
    if real is None:
        return None
    model, rank, called_with = binding.model(), binding.session.rank, binding.called_with
    counted, mask = counts(real, called_with), given.get(MASK)
    none_hidden = mask is None or (mask.ndim == 2 and bool(mask.all()))
    if mask is None or none_hidden or mask.ndim == 4 or binding.chunked:
        # Kernels that take cumulative lengths leave such rows undefined, and chunks of them nobody defines.
        if counted:
            rows = np.flatnonzero(~real)
            where = "lie behind cu_seq_lens_q" if none_hidden else "are hidden by attention_mask"
            binding.refuse(
                f"rank {rank}: {len(rows)} tokens from row {rows[0]} on {where} and in no document, but some of their "
                "labels are not -100. Set these to -100, or make them a document"
            )
        return None
    # A router's auxiliary loss may count rows that have no label.
    key = "output_router_logits"
    routed = getattr(getattr(model, "config", None), key, False) or called_with.get(key)
    if "flash" in binding.original or (counted is False and not routed):
        return None
    eager = binding.original == "eager"
    if eager and len(micro_batch.ticks) == 2 and len(real) == 1 and not real[0, 0]:
        binding.refuse(
            f"rank {rank}: its only row begins with padding whose output may count. Eager attention gives that the "
            "mean of all values of the row, but the row is cut into nano-batches and values behind the cut are not "
            'there yet. Set "overlap": "local_first", or pad on the right'
        )
    return Padding(real, eager, binding.session.device)


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
