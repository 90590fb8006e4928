"""Rows that are taken out of tensors, and placed when they came back: written (O, LSE, dQ) or added in fp32 and rounded
once (dK, dV).

One Triton launch per field on a GPU, torch index operations elsewhere; both add in the same order. And `KindRows`:
index tensors for transports that pack, made once per schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from deepspeed_cad.errors import CADError
from deepspeed_cad.exchange.native_calls import Table
from deepspeed_cad.exchange.transport import Outgoing
from deepspeed_cad.schedule import HOME, SERVER, Schedule


@dataclass(frozen=True, eq=False)
class Placement:
    """Where rows of one kind that came back belong at home, on the device."""

    target: torch.Tensor
    """[targets]: row × groups + group, each once."""
    begin: torch.Tensor
    """[targets + 1]: the part of `source` that each target receives."""
    source: torch.Tensor
    """A row of the landing area where ≥ 0, else row −1 − source of the rank's own served tensor."""
    depth: int
    """Most contributions that one target receives."""


def find_placement(schedule: Schedule, kind: int, device: torch.device) -> Placement:
    """Every target once, with what it receives in a fixed order: landed rows in table order, then own rows."""
    landed = schedule.home_index(schedule.sends, kind)
    own = schedule.home_index(schedule.own, kind)
    source = np.concatenate([np.arange(len(landed)), -1 - schedule.server_index(schedule.own, kind)])
    index = np.concatenate([landed, own])
    order = np.argsort(index, kind="stable")
    target, first = np.unique(index[order], return_index=True)
    begin = np.append(first, len(index)).astype(np.int64)
    depth = int(np.diff(begin).max(initial=0))
    return Placement(upload(target, device), upload(begin, device), upload(source[order], device), depth)


def upload(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """A numpy array on the device, without stopping the host."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def place(placement: Placement, landed: torch.Tensor, served: torch.Tensor, home: torch.Tensor, add: bool) -> None:
    """Bring rows home.

    Args:
        landed: [landed rows, width], what came from other ranks, contiguous.
        served: [served rows, width], this rank's own served tensor, of which its own rows are taken, contiguous.
        home: [rows, groups, width] with a contiguous last dimension; where rows are added it may be fp32.
        add: add to what is there instead of writing."""
    if home.stride(2) != 1 or not landed.is_contiguous() or not served.is_contiguous():
        raise CADError(
            f"rows cannot be placed: home has strides {home.stride()} (the last must be 1), landed {landed.stride()} "
            f"and served {served.stride()} (both must be contiguous)"
        )
    if not len(placement.target):
        return
    if not add and placement.depth > 1:
        raise CADError(f"{placement.depth} rows came back for one row of an output, which only one task may write")
    if home.is_cuda:
        from deepspeed_cad.exchange.placement_triton import place as kernel  # triton comes with torch for GPUs
    else:
        kernel = _place_by_index
    kernel(placement, landed, served, home, add)


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


@dataclass(frozen=True, eq=False)
class KindRows:
    """Index tensors and row counts of one kind of one schedule."""

    kind: int
    home: torch.Tensor
    """row × groups + group of every row that leaves this rank as a home."""
    own: torch.Tensor
    """The same for rows that it serves to itself."""
    own_served: torch.Tensor
    received_row: torch.Tensor
    """Row of the group-major buffer for every row that arrives."""
    sent: Table
    """[ranks]: rows to each peer, as a home."""
    received: Table
    placement: Placement

    @classmethod
    def of(cls, schedule: Schedule, kind: int, device: torch.device) -> KindRows:
        return cls(
            kind=kind,
            home=upload(schedule.home_index(schedule.sends, kind), device),
            own=upload(schedule.home_index(schedule.own, kind), device),
            own_served=upload(schedule.server_index(schedule.own, kind), device),
            received_row=upload(schedule.server_index(schedule.receives, kind), device),
            sent=schedule.rows_by_peer(schedule.sends, SERVER, kind),
            received=schedule.rows_by_peer(schedule.receives, HOME, kind),
            placement=find_placement(schedule, kind, device),
        )

    def group_major(self, schedule: Schedule, field: Outgoing, arrived: torch.Tensor) -> torch.Tensor:
        """[served rows, width]: the rows that arrived, and this rank's own, where tasks expect them."""
        rows = int(schedule.served_rows[schedule.rank, self.kind])
        buffer = field.home.new_empty(rows, field.home.shape[2])
        buffer.index_copy_(0, self.received_row, arrived)
        if len(self.own):
            buffer.index_copy_(0, self.own_served, take(field.home, self.own))
        return buffer


def take(home: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """[rows, width] of a tensor [rows, groups, width], chosen by row × groups + group; contiguous. Where groups lie as
    far from each other as the last one of a row from the next row, one index finds a row as one run of memory, which is
    what copies fast; views of Q, K and V in one tensor need two."""
    groups = home.shape[1]
    if home.stride(2) == 1 and home.stride(0) == groups * home.stride(1):
        flat = home.as_strided((home.shape[0] * groups, home.shape[2]), (home.stride(1), 1))
        return flat.index_select(0, index)
    return home[index // groups, index % groups]


def check_home(home: torch.Tensor, schedule: Schedule, rows: int) -> None:
    """Raises CADError where copies cannot read `rows` of a tensor at home."""
    if home.dim() != 3 or home.shape[1] != schedule.groups or home.shape[0] < rows or home.stride(2) != 1:
        raise CADError(
            f"rank {schedule.rank}: a tensor of shape {tuple(home.shape)} and strides {home.stride()} cannot be "
            f"dispatched; expected [at least {rows} rows, {schedule.groups} groups, width], contiguous in the last"
        )
