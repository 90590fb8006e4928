"""Documents of a micro-batch as models receive it: a dict of input_ids, position_ids, cu_seq_lens_q, attention_mask.

Out: an `Announcement`, this rank's segments. No copies of the batch are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deepspeed_cad.errors import CADDataError, CADUnsupportedError
from deepspeed_cad.layout import Ints, LocalSegments, segments_from_cumulative, segments_from_positions


@dataclass(frozen=True, eq=False)
class Announcement:
    """One rank's micro-batch: its segments and the rows between which ping-pong may cut."""

    local: LocalSegments
    unit: int = 1
    """Cuts are multiples of it: the row length of a batch of several rows, else 1."""

    def to_array(self) -> Ints:
        """[2 + 3 × segments]: tokens, unit, then the segments."""
        return np.r_[self.local.tokens, self.unit, self.local.to_array().reshape(-1)].astype(np.int64)

    @classmethod
    def from_array(cls, values: Ints) -> Announcement:
        """The inverse of `to_array`."""
        return cls(LocalSegments.from_array(values[2:].reshape(-1, 3), int(values[0])), int(values[1]))


def read_documents(given: Mapping[str, Any]) -> Announcement:
    """This rank's segments, from whatever the forward is given: cumulative lengths, positions, mask, or shape.

    Raises CADDataError where they contradict themselves or each other, and CADUnsupportedError for ready-made masks.
    """
    batch, width = batch_shape(given)
    cumulative = given.get("cu_seq_lens_q")
    if cumulative is None:
        cumulative = given.get("cu_seqlens")
    mask = given.get("attention_mask")
    if isinstance(mask, dict) or (isinstance(mask, torch.Tensor) and mask.ndim > 2):
        raise CADUnsupportedError(
            "a ready-made attention mask was passed; CAD needs position_ids or a 2-D padding mask"
        )
    unit = width if batch > 1 else 1
    if batch * width == 0:
        # Models cannot run on no tokens: they get one row of padding, see integrations.
        return Announcement(LocalSegments.none(1))
    if cumulative is not None and mask is None:
        return Announcement(segments_from_cumulative(_numpy(cumulative), batch * width), unit)
    positions = given.get("position_ids")
    array = np.arange(width)[None] if positions is None else _numpy(positions)
    if array.ndim == 3 and array.shape[0] == 4:
        # Text, time, height and width: the first says where documents begin.
        array = array[0]
    if array.ndim == 1:
        array = array[None]
    if array.ndim == 2 and array.shape[0] == 1:
        array = np.repeat(array, batch, axis=0)
    if array.ndim == 2 and array.shape != (batch, width):
        raise CADDataError(f"position_ids has shape {array.shape}, but the micro-batch is [{batch}, {width}]")
    return Announcement(segments_from_positions(array, None if mask is None else _numpy(mask)), unit)


def batch_shape(given: Mapping[str, Any]) -> tuple[int, int]:
    """Batch rows and tokens of each."""
    for name in ("input_ids", "inputs_embeds"):
        value = given.get(name)
        if value is not None:
            return int(value.shape[0]), int(value.shape[1])
    raise CADDataError("the model was called without input_ids and inputs_embeds")


def _numpy(value: Any) -> np.ndarray:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
