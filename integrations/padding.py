"""Rows of padding: no plan covers them, and attention gives them zeros, as FlashAttention in transformers does.

The sdpa and eager attention of transformers let such rows attend. Labels that count them are refused, because the loss
would be another; where nobody knows what counts them, one line says so. `B` batch rows, `S` tokens of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
import torch

from deepspeed_cad.ahead.documents import CUMULATIVE, MASK, batch_shape
from deepspeed_cad.attention.microbatch import MicroBatch
from deepspeed_cad.layout import PADDING
from deepspeed_cad.notice import notice

if TYPE_CHECKING:
    from deepspeed_cad.integrations.transformers import Binding

IGNORED = -100
"""The label that transformers' losses leave out."""

Bools = npt.NDArray[np.bool_]

_told: WeakSet[Any] = WeakSet()
_shown: WeakSet[Any] = WeakSet()
"""Bindings of which masks of packed rows were looked at."""


def check_padding(binding: Binding, micro_batch: MicroBatch, given: Mapping[str, Any]) -> None:
    """Refuse a forward whose labels count rows of padding that the model's attention would not give zeros; say once
    that nobody knows. `given`: what the decoder was called with."""
    padded = (micro_batch.local().positions() == PADDING).reshape(batch_shape(given))
    if not padded.any():
        return
    mask: Any = given.get(MASK)
    hidden = mask is not None and not (mask.ndim == 2 and bool(mask.all()))
    masked = hidden and mask.ndim == 2 and not binding.chunked
    own, rank = binding.original, binding.session.rank
    if masked and "flash" in own:
        return
    if masked and own != "eager":
        # What sees no token gets zeros from sdpa, too.
        padded &= (~padded).cumsum(axis=1) > 0
    rows = np.flatnonzero(padded)
    counted = counts(padded, binding.called_with) if len(rows) else False
    if counted:
        where = "are hidden by attention_mask" if hidden else "lie behind cu_seq_lens_q"
        binding.refuse(
            f"rank {rank}: {len(rows)} tokens from row {rows[0]} on {where} and in no document, so CAD's attention "
            "gives them zeros, but the loss counts what comes out there: some of their labels, or of the tokens right "
            "behind them, are not -100. Set these labels to -100, or make the tokens a document"
        )
    elif counted is None and masked and not rank and binding not in _told:
        _told.add(binding)
        notice(
            f"rows of padding get zeros from attention, as from FlashAttention; {own} would let them attend. CAD sees "
            "no labels here, so it cannot tell whether the loss leaves padding out, as it must. A model that is loaded "
            'with attn_implementation="flash_attention_2" gets zeros without CAD, too'
        )


def tell_of_ones(binding: Binding, micro_batch: MicroBatch, given: Mapping[str, Any]) -> None:
    """Say once where the model's own attention would let documents of a row see each other."""
    mask: Any = given.get(MASK)
    if binding.session.rank or binding in _shown or getattr(mask, "ndim", 0) != 2:
        return
    inside = (micro_batch.local().begin == 0).sum() > len(mask)
    if not inside or any(given.get(name) is not None for name in CUMULATIVE):
        return
    _shown.add(binding)
    if bool((mask == 1).all()):
        notice(
            "attention_mask has nothing but ones, and position_ids start again inside rows: transformers then lets "
            "documents of a row see each other, and CAD does not, so losses differ from those without CAD"
        )


def counts(padded_BS: Bools, given: Mapping[str, Any]) -> bool | None:
    """Whether labels count outputs of padding, from what the whole model was called with; None: nobody knows.

    `labels` are looked at as those of the same row and of the row before, `shift_labels` as those of the same row."""
    for name, shifted in (("shift_labels", False), ("labels", True)):
        labels = given.get(name)
        if isinstance(labels, torch.Tensor) and labels.shape == padded_BS.shape:
            used = (labels.detach() != given.get("ignore_index", IGNORED)).cpu().numpy()
            return bool((used & padded_BS).any()) or (shifted and bool((used[:, 1:] & padded_BS[:, :-1]).any()))
    return None
