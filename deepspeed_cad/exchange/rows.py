"""Which rows a transport that packs takes out of tensors and puts into them: index tensors, made once per schedule.

In: a `Schedule`. Out: `KindRows` of query and of key slices, on the device. Transports whose copies are strided need
none of this (copies.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepspeed_cad.errors import CADError
from deepspeed_cad.exchange.copies import placements
from deepspeed_cad.exchange.native_calls import Table
from deepspeed_cad.exchange.placement import Placement, put_on_device, upload
from deepspeed_cad.exchange.transport import Outgoing
from deepspeed_cad.schedule import HOME, KEY, QUERY, SERVER, Schedule


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

    def group_major(self, schedule: Schedule, field: Outgoing, arrived: torch.Tensor) -> torch.Tensor:
        """[served rows, width]: the rows that arrived, and this rank's own, where tasks expect them."""
        rows = int(schedule.served_rows[schedule.rank, self.kind])
        buffer = field.home.new_empty(rows, field.home.shape[2])
        buffer.index_copy_(0, self.received_row, arrived)
        if len(self.own):
            buffer.index_copy_(0, self.own_served, take(field.home, self.own))
        return buffer


def take(home: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """[rows, width] of a tensor [rows, groups, width], chosen by row × groups + group; contiguous.

    Where groups lie as far from each other as the last one of a row from the next row, one index finds a row as one
    run of memory, which is what copies fast; views of Q, K and V in one tensor need two.
    """
    groups = home.shape[1]
    if home.stride(2) == 1 and home.stride(0) == groups * home.stride(1):
        flat = home.as_strided((home.shape[0] * groups, home.shape[2]), (home.stride(1), 1))
        return flat.index_select(0, index)
    return home[index // groups, index % groups]


def rows_of_kinds(schedule: Schedule, device: torch.device) -> tuple[KindRows, KindRows]:
    return _rows(schedule, QUERY, device), _rows(schedule, KEY, device)


def _rows(schedule: Schedule, kind: int, device: torch.device) -> KindRows:
    home = schedule.home_index(schedule.sends, kind)
    own = schedule.home_index(schedule.own, kind)
    return KindRows(
        kind=kind,
        home=upload(home, device),
        own=upload(own, device),
        own_served=upload(schedule.server_index(schedule.own, kind), device),
        received_row=upload(schedule.server_index(schedule.receives, kind), device),
        sent=schedule.rows_by_peer(schedule.sends, SERVER, kind),
        received=schedule.rows_by_peer(schedule.receives, HOME, kind),
        placement=put_on_device(placements(schedule, kind), device),
    )


def check_home(home: torch.Tensor, schedule: Schedule, rows: int) -> None:
    """Raises CADError where copies cannot read `rows` of a tensor at home."""
    if home.dim() != 3 or home.shape[1] != schedule.groups or home.shape[0] < rows or home.stride(2) != 1:
        raise CADError(
            f"rank {schedule.rank}: a tensor of shape {tuple(home.shape)} and strides {home.stride()} cannot be "
            f"dispatched; expected [at least {rows} rows, {schedule.groups} groups, width], contiguous in the last"
        )


def check_served(served: torch.Tensor, rows: int) -> None:
    """Raises CADError where a tensor is not what serves as [rows, width]."""
    if served.dim() != 2 or served.shape[0] != rows or not served.is_contiguous():
        raise CADError(
            f"a served tensor of shape {tuple(served.shape)} and strides {served.stride()} cannot be returned; "
            f"expected [{rows} rows, width], contiguous"
        )
