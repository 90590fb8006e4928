"""Placing rows that came back: written (O, LSE, dQ) or added in fp32 and rounded once (dK, dV).

In: a `PlacementTable`, the landing area, the rank's own served tensor. Out: the home tensor, changed in place. One
Triton launch per field on a GPU, torch index operations elsewhere; both add in the same order.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from deepspeed_cad.errors import CADError
from deepspeed_cad.exchange.copies import PlacementTable

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Placement:
    """A PlacementTable on the device."""

    target: torch.Tensor
    begin: torch.Tensor
    source: torch.Tensor
    depth: int


def upload(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """A numpy array on the device, without stopping the host."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def put_on_device(table: PlacementTable, device: torch.device) -> Placement:
    target, begin, source = (upload(values, device) for values in (table.target, table.begin, table.source))
    return Placement(target, begin, source, table.depth)


def place(placement: Placement, landed: torch.Tensor, served: torch.Tensor, home: torch.Tensor, add: bool) -> None:
    """Bring rows home.

    Args:
        landed: [landed rows, width], what came from other ranks, contiguous.
        served: [served rows, width], this rank's own served tensor, of which its own rows are taken, contiguous.
        home: [rows, groups, width] with a contiguous last dimension; where rows are added it may be fp32.
        add: add to what is there instead of writing.
    """
    if home.stride(2) != 1 or not landed.is_contiguous() or not served.is_contiguous():
        raise CADError(
            f"rows cannot be placed: home has strides {home.stride()} (the last must be 1), landed {landed.stride()} "
            f"and served {served.stride()} (both must be contiguous)"
        )
    fits = home.dtype == landed.dtype or (add and home.dtype == torch.float32)
    if not fits or served.dtype != landed.dtype:
        raise CADError(f"rows of {landed.dtype} (own rows {served.dtype}) cannot be placed in a tensor of {home.dtype}")
    if not len(placement.target):
        return
    if not add and placement.depth > 1:
        raise CADError(f"{placement.depth} rows came back for one row of an output, which only one task may write")
    kernel = _triton_place() if home.is_cuda else None
    if kernel is None:
        _place_by_index(placement, landed, served, home, add)
    else:
        kernel(home, landed, served, placement.target, placement.begin, placement.source, placement.depth, add)


@functools.cache
def _triton_place() -> Callable[..., None] | None:
    try:
        from deepspeed_cad.exchange.placement_triton import place as kernel
    except ImportError as error:
        logger.warning("returned rows are placed by torch index operations, which is slower: %s", error)
        return None
    return kernel


def _place_by_index(
    placement: Placement, landed: torch.Tensor, served: torch.Tensor, home: torch.Tensor, add: bool
) -> None:
    groups = home.shape[1]
    target, begin, source = placement.target, placement.begin, placement.source
    count = begin[1:] - begin[:-1]
    wide = torch.float64 if home.dtype == torch.float64 else torch.float32
    row, group = target // groups, target % groups
    total = (
        home[row, group].to(wide) if add else torch.zeros(len(target), home.shape[2], dtype=wide, device=home.device)
    )
    for step in range(placement.depth):
        position = torch.nonzero(count > step).squeeze(1)
        taken = source[begin[:-1][position] + step]
        is_own = taken < 0
        for part, rows in ((~is_own, landed), (is_own, served)):
            chosen = taken[part]
            total[position[part]] += rows[torch.where(chosen < 0, -1 - chosen, chosen)].to(wide)
    home[row, group] = total.to(home.dtype)
