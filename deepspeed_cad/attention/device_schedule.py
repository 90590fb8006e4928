"""A schedule on the device: its batches with their cumulative lengths, and which of them run when.

In: a rank's schedule. Out: a `DeviceSchedule`, made once per kind of layer and tick and read by all its layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from deepspeed_cad.kernels.interface import Sequences
from deepspeed_cad.schedule import GROUP, KIND, QUERY, ROWS, SERVER_ROW, Batch, Schedule

Batches = tuple[tuple[Batch, Sequences], ...]
"""Batches with their cumulative lengths on the device."""


@dataclass(frozen=True, eq=False)
class DeviceSchedule:
    """A schedule with what kernels need of it on the device."""

    host: Schedule
    """As it was planned; transports put on the device what they need of it."""
    early: Batches
    """Local batches to run while Q, K, V are on their way out: about half of the local work."""
    late: Batches
    """Local batches to run after the served ones, on their stream, while results are on their way back."""
    served: Batches
    local_keys_overlap: bool
    """Whether two local batches read the same key rows of the same group: their dK/dV add up."""
    served_keys_overlap: bool
    served_group: torch.Tensor
    """[R] head group of every served query row."""
    padding: torch.Tensor
    """Rows of the query buffer without a task."""


def upload_schedule(schedule: Schedule, device: torch.device, two_streams: bool = False) -> DeviceSchedule:
    """Upload the cumulative lengths of a schedule's batches.

    On two streams no batch has to be cut for overlap, but those that add to the same rows of dK and dV stay on one.
    """

    def upload(values: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

    def sequences(batch: Batch) -> tuple[Batch, Sequences]:
        cu_q, cu_k = upload(batch.cu_q), upload(batch.cu_k)
        return batch, Sequences(batch.cu_q, batch.cu_k, cu_q, cu_k, batch.max_q, batch.max_k)

    group = np.zeros(int(schedule.served_rows[schedule.rank, QUERY]), np.int64)
    for table in (schedule.receives, schedule.own):
        rows = table[table[:, KIND] == QUERY]
        for first, count, value in rows[:, [SERVER_ROW, ROWS, GROUP]]:
            group[first : first + count] = value
    padding = schedule.padding_rows
    whole = (
        len(schedule.local) == 1
        and not len(schedule.sends)
        and schedule.local[0].q_rows == schedule.query_tokens
        and schedule.local[0].k_rows == schedule.key_tokens
    )
    overlap = _keys_overlap(schedule.local)
    early: tuple[Batch, ...]
    late: tuple[Batch, ...]
    if whole or (two_streams and overlap):
        early, late = schedule.local, ()
    elif two_streams:
        early, late = schedule.local[::2], schedule.local[1::2]
    else:
        early, late = halve(schedule.local)
    return DeviceSchedule(
        schedule,
        tuple(sequences(batch) for batch in early),
        tuple(sequences(batch) for batch in late),
        tuple(sequences(batch) for batch in schedule.served),
        overlap,
        _keys_overlap(schedule.served) or _keys_missing(schedule),
        upload(group),
        upload(padding),
    )


def _keys_overlap(batches: tuple[Batch, ...]) -> bool:
    """Two batches with common groups and common key rows."""
    spans = sorted((b.group_begin, b.group_end, b.k_row, b.k_row + b.k_rows) for b in batches)
    return any(
        a[0] < b[1] and b[0] < a[1] and a[2] < b[3] and b[2] < a[3] for i, a in enumerate(spans) for b in spans[i + 1 :]
    )


def _keys_missing(schedule: Schedule) -> bool:
    held = sum(batch.k_rows for batch in schedule.served)
    return held != int(schedule.served_rows[schedule.rank, 1])


def halve(batches: tuple[Batch, ...]) -> tuple[tuple[Batch, ...], tuple[Batch, ...]]:
    """Two shares of about equal work. The batch in the middle is cut between head groups, which costs nothing."""
    work = np.array([(b.group_end - b.group_begin) * _pairs(b) for b in batches])
    early: list[Batch] = []
    late: list[Batch] = []
    done, half = 0.0, float(work.sum()) / 2
    for batch, own in zip(batches, work, strict=True):
        groups = batch.group_end - batch.group_begin
        first = round(min(max((half - done) / own, 0.0), 1.0) * groups) if own else groups
        middle = batch.group_begin + first
        if first:
            early.append(replace(batch, group_end=middle))
        if first < groups:
            late.append(replace(batch, group_begin=middle))
        done += own
    return tuple(early), tuple(late)


def _pairs(batch: Batch) -> float:
    """Query-key pairs of a batch and head group, windows aside."""
    q, k = np.diff(batch.cu_q).astype(np.float64), np.diff(batch.cu_k).astype(np.float64)
    return float((q * (k - q / 2 + 0.5)).sum())
