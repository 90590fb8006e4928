"""A schedule on the device: its batches with their cumulative lengths, and which of them run when.

In: a rank's schedule, or those of its waves. Out: a `DeviceSchedule`, made once per kind of layer and tick and read
by all its layers.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from deepspeed_cad.exchange.placement import upload
from deepspeed_cad.kernels.interface import Sequences
from deepspeed_cad.layout import Ints
from deepspeed_cad.schedule import GROUP, HOME_ROW, KEY, KIND, QUERY, ROWS, Batch, Schedule, padding_rows
from deepspeed_cad.schedule.waves import BACK

FAR = 1 << 40
"""Rows from one head group to the next, where rows of all of them are numbered."""
Batches = tuple[tuple[Batch, Sequences], ...]
"""Batches with their cumulative lengths on the device."""


@dataclass(frozen=True, eq=False)
class Wave:
    """What one exchange out brings a server, and one back takes home: all of a tick's, or a part of it."""

    host: Schedule
    """As it was planned; transports put on the device what they need of it."""
    served: Batches
    half_local: Batches
    """Own rows, in place, with keys that landed."""
    keys_overlap: bool
    """Whether these batches do not cover the key rows once each: their dK and dV add up, or some have none."""
    device: torch.device

    @cached_property
    def group(self) -> Tensor:
        """[R] head group of every served query row. Only sinks need it, rows are millions, and it belongs to the stream
        that serves, which alone may ask."""
        host = self.host
        group = np.zeros(int(host.served_rows[host.rank, QUERY]), np.int64)
        for table in (host.receives, host.own):
            rows = table[table[:, KIND] == QUERY]
            group[host.server_index(table, QUERY)] = np.repeat(rows[:, GROUP], rows[:, ROWS])
        return upload(group, self.device)


@dataclass(frozen=True, eq=False)
class DeviceSchedule:
    """A schedule with what kernels need of it on the device."""

    waves: tuple[Wave, ...]
    """One after the other on their way; at least one."""
    local: tuple[Batches, ...]
    """[waves + 1] local batches: those to run while the first wave is on its way out, and those to run behind each
    wave's served ones, while results are on their way back."""
    local_keys_overlap: bool
    """Whether two local batches read the same key rows of the same group: their dK/dV add up."""
    padding: Tensor
    """Rows of the query buffer without a task."""
    keys_return_often: bool
    """Whether dK and dV of the same rows and group come back in several waves: waves were cut by rows."""
    beside: bool
    """Whether served batches run on a stream of their own."""

    @property
    def lands_apart(self) -> bool:
        """Whether dK and dV that come back are summed apart from those of local batches."""
        return len(self.waves) > BACK or self.keys_return_often

    @property
    def serves(self) -> bool:
        """Whether any task here waits for what other ranks send."""
        return any(wave.served or wave.half_local for wave in self.waves)

    @property
    def moves(self) -> bool:
        """Whether anything lands on any rank; the same on all."""
        return any(wave.host.served_rows.any() for wave in self.waves)

    @property
    def query_tokens(self) -> int:
        return self.waves[0].host.query_tokens

    @property
    def all_local(self) -> Batches:
        return sum(self.local, ())


def upload_schedule(
    schedules: Schedule | tuple[Schedule, ...], device: torch.device, two_streams: bool = False
) -> DeviceSchedule:
    """Upload the cumulative lengths of a schedule's batches; of several waves, their schedules in order.

    On two streams no batch has to be cut for overlap, but those that add to the same rows of dK and dV stay on one."""
    parts = (schedules,) if isinstance(schedules, Schedule) else schedules
    batches = sum((part.local for part in parts), ())
    # Whether two batches have common groups and common key rows.
    spans = [(group * FAR + b.k_row, b.k_rows) for b in batches for group in range(b.group_begin, b.group_end)]
    overlap = sum(rows for _, rows in spans) > _covered(np.array(spans, np.int64))
    first = parts[0]
    whole = (
        len(batches) == 1
        and not any(len(part.sends) for part in parts)
        and batches[0].q_rows == first.query_tokens
        and batches[0].k_rows == first.key_tokens
    )
    nothing: list[tuple[Batch, ...]] = [()] * len(parts)
    if whole or (two_streams and (overlap or len(parts) > 1)):
        # Waves are for slow links: the second stream would hold local batches up behind one that is still travelling.
        local = [batches, *nothing]
    elif two_streams:
        local = [batches[::2], batches[1::2]]
    else:
        local = share_out(batches, len(parts) + 1)
    return DeviceSchedule(
        tuple(_wave(part, device) for part in parts), tuple(_sequences(share, device) for share in local), overlap,
        upload(padding_rows(parts), device), _keys_return_often(parts), two_streams,
    )  # fmt: skip


def _wave(part: Schedule, device: torch.device) -> Wave:
    served, half_local = _sequences(part.served, device), _sequences(part.half_local, device)
    return Wave(part, served, half_local, _keys_not_once(part), device)


def _sequences(batches: tuple[Batch, ...], device: torch.device) -> Batches:
    def of(b: Batch) -> Sequences:
        return Sequences(b.cu_q, b.cu_k, upload(b.cu_q, device), upload(b.cu_k, device), b.max_q, b.max_k)

    return tuple((batch, of(batch)) for batch in batches)


def _keys_return_often(parts: tuple[Schedule, ...]) -> bool:
    """Whether the slices of two waves have common key rows of one group."""
    spans = []
    for part in parts:
        table = np.concatenate([part.sends, part.own])
        keys = table[table[:, KIND] == KEY]
        spans.append(np.stack([keys[:, GROUP] * FAR + keys[:, HOME_ROW], keys[:, ROWS]], axis=1))
    return sum(map(_covered, spans)) > _covered(np.concatenate(spans))


def _keys_not_once(schedule: Schedule) -> bool:
    """Whether some key row that landed is read by no batch, or by several."""
    spans = [(b.k_row, b.k_rows) for b in schedule.served]
    for b in schedule.half_local:
        spans += [(b.k_row + number * b.k_step, b.k_rows) for number in range(b.group_end - b.group_begin)]
    read, landed = sum(rows for _, rows in spans), int(schedule.served_rows[schedule.rank, KEY])
    return read != landed or _covered(np.array(spans, np.int64)) != landed


def _covered(spans: Ints) -> int:
    """Rows of spans ([n, 2] first row and rows), each counted once."""
    spans = spans.reshape(-1, 2)
    begin, rows = spans[np.argsort(spans[:, 0])].T
    end = np.maximum.accumulate(begin + rows)
    return int(np.maximum(end - np.maximum(begin, np.append(begin[:1], end[:-1])), 0).sum())


def share_out(batches: tuple[Batch, ...], shares: int) -> list[tuple[Batch, ...]]:
    """Shares of about equal work, in order. A batch in two of them is cut between head groups, which costs nothing."""
    lengths = [(np.diff(b.cu_q).astype(np.float64), np.diff(b.cu_k).astype(np.float64)) for b in batches]
    # Query-key pairs, windows aside.
    pairs = [(q * (k - q / 2 + 0.5)).sum() for q, k in lengths]
    work = np.array([(b.group_end - b.group_begin) * count for b, count in zip(batches, pairs)])
    found: list[list[Batch]] = [[] for _ in range(shares)]
    done, share = 0.0, float(work.sum()) / shares
    for batch, own in zip(batches, work, strict=True):
        groups = batch.group_end - batch.group_begin
        edges = [
            batch.group_begin + (round(min(max((number * share - done) / own, 0.0), 1.0) * groups) if own else groups)
            for number in range(1, shares)
        ]
        for number, (first, last) in enumerate(pairwise([batch.group_begin, *edges, batch.group_end])):
            if first < last:
                found[number].append(replace(batch, group_begin=first, group_end=last))
        done += own
    return [tuple(part) for part in found]
