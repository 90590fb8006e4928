"""The portable transport: one `all_to_all_single` of torch.distributed per exchange, any backend (gloo, NCCL).

Slices are packed into one byte buffer per exchange, ordered by peer and then by field, and unpacked on arrival.
Messages between two ranks hold the slices in table order, which both ends know.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist

from deepspeed_cad.exchange.liveness import Liveness
from deepspeed_cad.exchange.transport import Outgoing, Returning
from deepspeed_cad.schedule import HOME, KEY, QUERY, SERVER, Schedule


@dataclass(frozen=True)
class _Kind:
    """Index tensors of one kind (query or key slices) of one schedule, on the device."""

    home_row: torch.Tensor
    home_group: torch.Tensor
    sent: tuple[int, ...]
    """Rows to each peer, as a home."""
    served_row: torch.Tensor
    received: tuple[int, ...]
    """Rows from each peer, as a server."""
    own_row: torch.Tensor
    own_group: torch.Tensor
    own_served: torch.Tensor


class C10dTransport:
    """Exchange through a torch.distributed process group of its own."""

    name = "c10d"

    def __init__(self, group: dist.ProcessGroup, device: torch.device, liveness: Liveness | None = None) -> None:
        self.group, self.device, self.liveness = group, device, liveness
        self.exchanges = 0
        self.bytes_sent = 0
        self._indexes: WeakKeyDictionary[Schedule, tuple[_Kind, _Kind]] = WeakKeyDictionary()
        self._additions: WeakKeyDictionary[Schedule, _Addition] = WeakKeyDictionary()

    def dispatch(self, schedule: Schedule, fields: list[Outgoing], slot: int) -> _Dispatched:
        """See Transport.dispatch; slots need no care here, every exchange has buffers of its own."""
        kinds = self._index(schedule)
        packed = [field.home[kinds[field.kind].home_row, kinds[field.kind].home_group] for field in fields]
        sent = [kinds[field.kind].sent for field in fields]
        received = [kinds[field.kind].received for field in fields]
        work, arrived = self._start(packed, sent, received)
        return _Dispatched(self, schedule, fields, kinds, work, arrived)

    def give_back(self, schedule: Schedule, fields: list[Returning], slot: int) -> _Returned:
        """See Transport.give_back."""
        kinds = self._index(schedule)
        packed = [field.served[kinds[field.kind].served_row] for field in fields]
        sent = [kinds[field.kind].received for field in fields]
        received = [kinds[field.kind].sent for field in fields]
        work, arrived = self._start(packed, sent, received)
        return _Returned(self, schedule, fields, kinds, work, arrived)

    def close(self) -> None:
        """Nothing to release: the process group belongs to the session."""

    def _start(
        self, packed: list[torch.Tensor], sent: list[tuple[int, ...]], received: list[tuple[int, ...]]
    ) -> tuple[dist.Work, _Arrival]:
        widths = [rows.shape[1] * rows.element_size() for rows in packed]
        dtypes = [rows.dtype for rows in packed]
        peers = range(len(sent[0])) if sent else range(0)
        chunks = [torch.split(rows.contiguous().view(torch.uint8).reshape(-1), [n * width for n in counts])
                  for rows, counts, width in zip(packed, sent, widths, strict=True)]  # fmt: skip
        outgoing = torch.cat([field[peer] for peer in peers for field in chunks])
        in_splits = [sum(counts[p] * w for counts, w in zip(sent, widths, strict=True)) for p in peers]
        out_splits = [sum(counts[p] * w for counts, w in zip(received, widths, strict=True)) for p in peers]
        incoming = torch.empty(sum(out_splits), dtype=torch.uint8, device=self.device)
        self.exchanges += 1
        self.bytes_sent += outgoing.numel()
        with self._named():
            work = dist.all_to_all_single(incoming, outgoing, out_splits, in_splits, group=self.group, async_op=True)
        return work, _Arrival(incoming, outgoing, received, widths, dtypes)

    def finish(self, work: dist.Work) -> None:
        """Wait for a transfer; a dead peer becomes a CADPeerError that names it."""
        with self._named():
            if self.liveness is not None and self.device.type == "cpu":
                self.liveness.patiently(work, f"core-attention exchange {self.exchanges}")
            work.wait()

    def _named(self) -> Liveness.Watch:
        return Liveness.watch(self.liveness, f"core-attention exchange {self.exchanges}")

    def _index(self, schedule: Schedule) -> tuple[_Kind, _Kind]:
        found = self._indexes.get(schedule)
        if found is None:
            found = (self._build(schedule, QUERY), self._build(schedule, KEY))
            self._indexes[schedule] = found
        return found

    def addition(self, schedule: Schedule) -> _Addition:
        """How dK and dV that come back are added at home."""
        found = self._additions.get(schedule)
        if found is None:
            scatter = schedule.key_scatter
            row, group = scatter.target // schedule.groups, scatter.target % schedule.groups
            levels = tuple((self._upload(position), self._upload(landed)) for position, landed in scatter.levels)
            found = _Addition(self._upload(row), self._upload(group), levels)
            self._additions[schedule] = found
        return found

    def _upload(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device, non_blocking=True)

    def _build(self, schedule: Schedule, kind: int) -> _Kind:
        upload = self._upload
        home = schedule.home_index(schedule.sends, kind)
        own = schedule.home_index(schedule.own, kind)
        return _Kind(
            upload(home // schedule.groups),
            upload(home % schedule.groups),
            tuple(schedule.rows_by_peer(schedule.sends, SERVER, kind).tolist()),
            upload(schedule.server_index(schedule.receives, kind)),
            tuple(schedule.rows_by_peer(schedule.receives, HOME, kind).tolist()),
            upload(own // schedule.groups),
            upload(own % schedule.groups),
            upload(schedule.server_index(schedule.own, kind)),
        )


@dataclass
class _Arrival:
    incoming: torch.Tensor
    outgoing: torch.Tensor
    """Held until the transfer is over."""
    rows: list[tuple[int, ...]]
    widths: list[int]
    dtypes: list[torch.dtype]

    def split(self) -> list[torch.Tensor]:
        """One [rows, width] tensor per field, rows in table order."""
        peers = range(len(self.rows[0])) if self.rows else range(0)
        sizes = [counts[p] * width for p in peers for counts, width in zip(self.rows, self.widths, strict=True)]
        parts = torch.split(self.incoming, sizes)
        fields = len(self.rows)
        return [
            torch.cat(list(parts[i::fields])).view(dtype).reshape(sum(counts), -1)
            if sum(counts)
            else self.incoming.new_empty(0, dtype=dtype).reshape(0, width // dtype.itemsize)
            for i, (counts, width, dtype) in enumerate(zip(self.rows, self.widths, self.dtypes, strict=True))
        ]


@dataclass
class _Dispatched:
    transport: C10dTransport
    schedule: Schedule
    fields: list[Outgoing]
    kinds: tuple[_Kind, _Kind]
    work: dist.Work
    arrival: _Arrival

    def wait(self) -> list[torch.Tensor]:
        """See exchange.transport.Dispatched."""
        self.transport.finish(self.work)
        buffers = []
        for field, arrived in zip(self.fields, self.arrival.split(), strict=True):
            kind = self.kinds[field.kind]
            rows = int(self.schedule.served_rows[self.schedule.rank, field.kind])
            buffer = field.home.new_empty(rows, field.home.shape[2])
            buffer[kind.served_row] = arrived
            buffer[kind.own_served] = field.home[kind.own_row, kind.own_group]
            buffers.append(buffer)
        return buffers


@dataclass
class _Returned:
    transport: C10dTransport
    schedule: Schedule
    fields: list[Returning]
    kinds: tuple[_Kind, _Kind]
    work: dist.Work
    arrival: _Arrival

    def wait(self) -> None:
        """See exchange.transport.Returned."""
        self.transport.finish(self.work)
        for field, arrived in zip(self.fields, self.arrival.split(), strict=True):
            kind = self.kinds[field.kind]
            own = field.served[kind.own_served]
            if field.add:
                self.transport.addition(self.schedule).add(field.home, torch.cat([arrived, own]))
            else:
                field.home[kind.home_row, kind.home_group] = arrived
                field.home[kind.own_row, kind.own_group] = own


@dataclass(frozen=True)
class _Addition:
    """Index tensors of a schedule's `key_scatter`, on the device."""

    row: torch.Tensor
    group: torch.Tensor
    levels: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    def add(self, home: torch.Tensor, landed: torch.Tensor) -> None:
        """Add landed dK or dV rows ([rows, width]) to `home` ([rows, groups, width]) in fp32, rounded once per row."""
        if not len(self.row):
            return
        wide = torch.float64 if home.dtype == torch.float64 else torch.float32
        total = home[self.row, self.group].to(wide)
        for position, landed_row in self.levels:
            total.index_add_(0, position, landed[landed_row].to(wide))
        home[self.row, self.group] = total.to(home.dtype)
