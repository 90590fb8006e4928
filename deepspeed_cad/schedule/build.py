"""Builds schedules: the slices of all ranks by the compiled library (csrc/schedule.cpp), and one rank's view of them.

In: a tick and its tasks. Out: `Slices`, and of these a `Schedule`.
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from deepspeed_cad.errors import CADError
from deepspeed_cad.layout import Ints, Segments, Tick
from deepspeed_cad.native import call
from deepspeed_cad.planner.constants import IN_PLACE
from deepspeed_cad.schedule.tables import HOME, SERVER, Batch, Schedule, Slices

MOST_ROWS = 2**31 - 1
"""Of all sequences of one kernel call."""


def build_slices(tick: Tick, tasks: Ints, window: int | None = None) -> Slices:
    """Cut the tasks of a plan ([n, 6], see Plan.tasks) into slices and sequences, for all ranks at once.

    Raises CADError where the compiled library is missing, or no memory is left.
    """
    tasks = np.ascontiguousarray(tasks, np.int64)
    sizes = np.array([tick.ranks, window or 0, len(tick.query), len(tick.key), len(tasks), IN_PLACE], np.int64)
    query, key = _columns(tick.query), _columns(tick.key)
    handle, counts = ctypes.c_void_p(), np.zeros(4, np.int64)
    call("cad_schedule_build", sizes, query, key, tasks, ctypes.byref(handle), counts)
    table, sequences, local, half_local = (
        np.empty((int(rows), columns), np.int64) for rows, columns in zip(counts, (8, 5, 7, 8), strict=True)
    )
    served, landed = np.empty((tick.ranks, 2), np.int64), np.empty((tick.ranks, 2), np.int64)
    call("cad_schedule_take", handle, table, sequences, local, half_local, served, landed)
    return Slices(table, sequences, local, half_local, served, landed)


def schedule_rank(tick: Tick, slices: Slices, rank: int, groups: int, window: int | None = None) -> Schedule:
    table = slices.table
    mine_home, mine_server = table[:, HOME] == rank, table[:, SERVER] == rank
    local = slices.local[slices.local[:, 0] == rank]
    sequences = slices.sequences[slices.sequences[:, 0] == rank]
    one_group = np.tile([0, 1], (len(sequences), 1))
    return Schedule(
        rank=rank,
        ranks=tick.ranks,
        groups=groups,
        window=window,
        query_tokens=int(tick.query_tokens[rank]),
        key_tokens=int(tick.key_tokens[rank]),
        sends=table[mine_home & ~mine_server],
        receives=table[mine_server & ~mine_home],
        own=table[mine_home & mine_server],
        served_rows=slices.served_rows,
        landed_rows=slices.landed_rows,
        local=_fuse(local[:, 1:3], local[:, 3:7]),
        served=_fuse(one_group, sequences[:, 1:5]),
        half_local=_half_local_batches(slices.half_local[slices.half_local[:, 0] == rank]),
    )


def _half_local_batches(runs: Ints) -> tuple[Batch, ...]:
    """One for each of these rows of `Slices.half_local`."""
    q, k = (_count_in_32_bits(np.stack([np.zeros(len(runs), np.int64), runs[:, at]], axis=1)) for at in (4, 6))
    return tuple(
        Batch(q_row, k_row, cu_q, cu_k, low, high, step)
        for cu_q, cu_k, (_, low, high, q_row, _, k_row, _, step) in zip(q, k, runs.tolist())
    )


def _fuse(groups: Ints, rows: Ints) -> tuple[Batch, ...]:
    """Batches of sequences (columns q row, q rows, k row, k rows) that follow each other in both buffers."""
    if not len(rows):
        return ()
    breaks = np.ones(len(rows), bool)
    breaks[1:] = (
        (groups[1:] != groups[:-1]).any(axis=1)
        | (rows[1:, 0] != rows[:-1, 0] + rows[:-1, 1])
        | (rows[1:, 2] != rows[:-1, 2] + rows[:-1, 3])
    )
    _break_at_limit(breaks, rows)
    batches = []
    for first, last in zip(np.flatnonzero(breaks), [*np.flatnonzero(breaks)[1:], len(rows)], strict=True):
        part = rows[first:last]
        batches.append(
            Batch(
                q_row=int(part[0, 0]),
                k_row=int(part[0, 2]),
                cu_q=_count_in_32_bits(np.concatenate([[0], np.cumsum(part[:, 1])])),
                cu_k=_count_in_32_bits(np.concatenate([[0], np.cumsum(part[:, 3])])),
                group_begin=int(groups[first, 0]),
                group_end=int(groups[first, 1]),
            )
        )
    return tuple(batches)


def _break_at_limit(breaks: npt.NDArray[np.bool_], rows: Ints) -> None:
    """Begin another batch where one would have more rows than kernels count; `rows` as in `_fuse`."""
    if rows[:, [1, 3]].sum(axis=0).max(initial=0) <= MOST_ROWS:
        return
    held = np.zeros(2, np.int64)
    for at, more in enumerate(rows[:, [1, 3]]):
        if breaks[at] or (held + more > MOST_ROWS).any():
            breaks[at], held = True, np.zeros(2, np.int64)
        held = held + more


def _count_in_32_bits(rows: Ints) -> npt.NDArray[np.int32]:
    """Cumulative rows as kernels take them; everything else about rows and bytes is counted in 64 bits."""
    if rows.max(initial=0) > MOST_ROWS:
        raise CADError(
            f"a document has {int(rows.max())} rows on one rank, and kernels count them in 32 bits, up to {MOST_ROWS}: "
            "use shorter documents"
        )
    return rows.astype(np.int32)


def _columns(segments: Segments) -> Ints:
    return np.stack([segments.document, segments.begin, segments.end, segments.rank, segments.offset])
