"""Which rows a transport that packs takes out of tensors and puts into them: index tensors, made once per schedule.

In: a `Schedule`. Out: `KindRows` of query and of key slices, on the device. Transports whose copies are strided need
none of this (copies.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepspeed_cad.exchange.copies import placements
from deepspeed_cad.exchange.native_calls import Table
from deepspeed_cad.exchange.placement import Placement, put_on_device, upload
from deepspeed_cad.exchange.transport import Outgoing
from deepspeed_cad.schedule import HOME, KEY, QUERY, SERVER, Schedule


@dataclass(frozen=True, eq=False)
class KindRows:
    """Index tensors and row counts of one kind of one schedule."""

    kind: int
    home_row: torch.Tensor
    home_group: torch.Tensor
    own_row: torch.Tensor
    own_group: torch.Tensor
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
        buffer[self.received_row] = arrived
        buffer[self.own_served] = field.home[self.own_row, self.own_group]
        return buffer


def rows_of_kinds(schedule: Schedule, device: torch.device) -> tuple[KindRows, KindRows]:
    """Of query slices and of key slices."""
    return _rows(schedule, QUERY, device), _rows(schedule, KEY, device)


def _rows(schedule: Schedule, kind: int, device: torch.device) -> KindRows:
    home = schedule.home_index(schedule.sends, kind)
    own = schedule.home_index(schedule.own, kind)
    return KindRows(
        kind=kind,
        home_row=upload(home // schedule.groups, device),
        home_group=upload(home % schedule.groups, device),
        own_row=upload(own // schedule.groups, device),
        own_group=upload(own % schedule.groups, device),
        own_served=upload(schedule.server_index(schedule.own, kind), device),
        received_row=upload(schedule.server_index(schedule.receives, kind), device),
        sent=schedule.rows_by_peer(schedule.sends, SERVER, kind),
        received=schedule.rows_by_peer(schedule.receives, HOME, kind),
        placement=put_on_device(placements(schedule, kind), device),
    )
