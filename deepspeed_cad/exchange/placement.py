"""Rows that are taken out of tensors, and placed when they came back: written (O, LSE, dQ) or added in fp32 and rounded
once (dK, dV).

One Triton launch per field on a GPU, slices of tensors elsewhere; both add in the same order. And `KindRows`: index
tensors for transports that pack, made once per schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from deepspeed_cad.errors import CADError
from deepspeed_cad.exchange.native_calls import Table
from deepspeed_cad.exchange.transport import Outgoing
from deepspeed_cad.layout import Ints, expand
from deepspeed_cad.schedule import GROUP, HOME, HOME_ROW, KIND, ROWS, SERVER, SERVER_ROW, STAGE_ROW, Schedule


@dataclass(frozen=True, eq=False)
class Placement:
    """Where rows of one kind that came back belong at home: pieces, runs of rows of one head group that are runs also
    in all that they receive. On the device; rows are millions, pieces hundreds."""

    ROWS_PER_PROGRAM = 16
    """A choice: 16 rows of 128 elements are 16 for each thread."""
    pieces: torch.Tensor
    """[pieces, 6]: first row at home, head group, rows; first and last (exclusive) of `sources`; programs before it."""
    sources: torch.Tensor
    """Where what a piece receives begins: a row of the landing area where ≥ 0, else row −1 − source of the rank's own
    served tensor."""
    programs: torch.Tensor
    """The piece of which each program of a GPU places ROWS_PER_PROGRAM rows."""
    depth: int
    """Most contributions that one row receives."""

    @classmethod
    def of(cls, runs: Ints, device: torch.device) -> Placement:
        """`runs` ([n, 4]): first row at home, head group, rows and source of what came back; a row receives what it
        receives in this order."""
        row, group, rows, source = runs.T
        far = int((row + rows).max(initial=1))
        begin = group * far + row
        edges = np.unique(np.concatenate([begin, begin + rows]))
        first = np.searchsorted(edges, begin)
        count = np.searchsorted(edges, begin + rows) - first
        piece, run = expand(first, count), np.repeat(np.arange(len(runs)), count)
        order = np.argsort(piece, kind="stable")
        piece, run = piece[order], run[order]
        ahead = edges[piece] - begin[run]
        piece, at = np.unique(piece, return_index=True)
        at = np.append(at, len(run))
        sizes = edges[piece + 1] - edges[piece]
        programs = -(-sizes // cls.ROWS_PER_PROGRAM)
        pieces = [edges[piece] % far, edges[piece] // far, sizes, at[:-1], at[1:], np.cumsum(programs) - programs]
        return cls(
            upload(np.stack(pieces, axis=1), device),
            upload(source[run] + np.where(source[run] < 0, -ahead, ahead), device),
            upload(np.repeat(np.arange(len(sizes)), programs), device),
            int(np.diff(at).max(initial=0)),
        )


def find_placement(schedule: Schedule, kind: int, device: torch.device) -> Placement:
    """What each row receives comes in a fixed order: landed rows in table order, then own rows."""
    landed, own = (table[table[:, KIND] == kind] for table in (schedule.sends, schedule.own))
    at_home = np.concatenate([landed, own])[:, [HOME_ROW, GROUP, ROWS]]
    source = np.concatenate([landed[:, STAGE_ROW], -1 - own[:, SERVER_ROW]])
    return Placement.of(np.column_stack([at_home, source]), device)


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
    if not len(placement.pieces):
        return
    if not add and placement.depth > 1:
        raise CADError(f"{placement.depth} rows came back for one row of an output, which only one task may write")
    if home.is_cuda:
        from deepspeed_cad.exchange.placement_triton import place as kernel  # triton comes with torch for GPUs
    else:
        kernel = _place_by_slices
    kernel(placement, landed, served, home, add)


def _place_by_slices(
    placement: Placement, landed: torch.Tensor, served: torch.Tensor, home: torch.Tensor, add: bool
) -> None:
    wide = torch.float64 if home.dtype == torch.float64 else torch.float32
    sources = placement.sources.tolist()
    for row, group, rows, first, last, _ in placement.pieces.tolist():
        piece = home[row : row + rows, group]
        total = piece.to(wide) if add else torch.zeros_like(piece, dtype=wide)
        for source in sources[first:last]:
            whole, begin = (landed, source) if source >= 0 else (served, -1 - source)
            total += whole[begin : begin + rows]
        piece.copy_(total)


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
        buffer = field.home.new_empty(int(schedule.served_rows[schedule.rank, self.kind]), field.home.shape[2])
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
        return home.as_strided((home.shape[0] * groups, home.shape[2]), (home.stride(1), 1)).index_select(0, index)
    return home[index // groups, index % groups]


def check_home(home: torch.Tensor, schedule: Schedule, rows: int) -> None:
    """Raises CADError where copies cannot read `rows` of a tensor at home."""
    if home.dim() != 3 or home.shape[1] != schedule.groups or home.shape[0] < rows or home.stride(2) != 1:
        raise CADError(
            f"rank {schedule.rank}: a tensor of shape {tuple(home.shape)} and strides {home.stride()} cannot be "
            f"dispatched; expected [at least {rows} rows, {schedule.groups} groups, width], contiguous in the last"
        )
