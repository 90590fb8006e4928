"""Schedules by the compiled library, csrc/schedule.cpp: the same arrays as `deepspeed_cad.schedule.build_slices`.

In: a tick and its tasks. Out: the slice table of all ranks; and all ranks' schedules at once, as views of it.
"""

from __future__ import annotations

import ctypes

import numpy as np

from deepspeed_cad.errors import CADError
from deepspeed_cad.layout import Ints, Segments, Tick
from deepspeed_cad.native import load
from deepspeed_cad.schedule import HOME, SERVER, Batch, Schedule, Slices
from deepspeed_cad.schedule.reference import break_at_limit, count_in_32_bits, half_local_batches


def is_available() -> bool:
    """Whether the compiled library is there and builds schedules."""
    library = load()
    return library is not None and hasattr(library, "cad_schedule_build")


def build_slices(tick: Tick, tasks: Ints, window: int | None = None) -> Slices:
    """Cut the tasks of a plan into slices and sequences. Raises CADError where the library is missing or fails."""
    library = load()
    if library is None:
        raise CADError("native schedules were asked for, but the compiled library is not there")
    tasks = np.ascontiguousarray(tasks, np.int64)
    sizes = np.array([tick.ranks, window or 0, len(tick.query), len(tick.key), len(tasks)], np.int64)
    query, key = _columns(tick.query), _columns(tick.key)
    handle, counts = ctypes.c_void_p(), np.zeros(4, np.int64)
    code = library.cad_schedule_build(_at(sizes), _at(query), _at(key), _at(tasks), ctypes.byref(handle), _at(counts))
    if code:
        library.cad_last_error.restype = ctypes.c_char_p
        raise CADError(f"building schedules failed: {library.cad_last_error().decode()}")
    table, sequences, local, half_local = (
        np.empty((int(rows), columns), np.int64) for rows, columns in zip(counts, (8, 5, 7, 8), strict=True)
    )
    served, landed = np.empty((tick.ranks, 2), np.int64), np.empty((tick.ranks, 2), np.int64)
    library.cad_schedule_take.restype = None
    library.cad_schedule_take(handle, _at(table), _at(sequences), _at(local), _at(half_local), _at(served), _at(landed))
    return Slices(table, sequences, local, half_local, served, landed)


def schedule_all(tick: Tick, slices: Slices, groups: int, window: int | None = None) -> list[Schedule]:
    """The schedules of all ranks, equal to `schedule_rank` for each, in one pass over the table."""
    ranks = np.arange(tick.ranks + 1)
    table = slices.table
    moved = table[table[:, HOME] != table[:, SERVER]]
    sends = moved[np.argsort(moved[:, HOME], kind="stable")]
    receives = moved[np.argsort(moved[:, SERVER], kind="stable")]
    own = table[table[:, HOME] == table[:, SERVER]]
    own = own[np.argsort(own[:, HOME], kind="stable")]
    send_at, receive_at = np.searchsorted(sends[:, HOME], ranks), np.searchsorted(receives[:, SERVER], ranks)
    own_at = np.searchsorted(own[:, HOME], ranks)
    local = _fuse_all(slices.local[:, 0], slices.local[:, 1:3], slices.local[:, 3:7], tick.ranks)
    one_group = np.broadcast_to(np.array([0, 1]), (len(slices.sequences), 2))
    served = _fuse_all(slices.sequences[:, 0], one_group, slices.sequences[:, 1:5], tick.ranks)
    query_tokens, key_tokens = tick.query_tokens.tolist(), tick.key_tokens.tolist()
    send_at, receive_at, own_at = send_at.tolist(), receive_at.tolist(), own_at.tolist()
    schedules = []
    for rank in range(tick.ranks):
        schedules.append(
            Schedule(
                rank=rank,
                ranks=tick.ranks,
                groups=groups,
                window=window,
                query_tokens=query_tokens[rank],
                key_tokens=key_tokens[rank],
                sends=sends[send_at[rank] : send_at[rank + 1]],
                receives=receives[receive_at[rank] : receive_at[rank + 1]],
                own=own[own_at[rank] : own_at[rank + 1]],
                served_rows=slices.served_rows,
                landed_rows=slices.landed_rows,
                local=local[rank],
                served=served[rank],
                half_local=half_local_batches(slices.half_local[slices.half_local[:, 0] == rank]),
            )
        )
    return schedules


def _fuse_all(owner: Ints, groups: Ints, rows: Ints, ranks: int) -> list[tuple[Batch, ...]]:
    """For every rank the batches of its sequences (columns q row, q rows, k row, k rows), in one pass."""
    batches: list[list[Batch]] = [[] for _ in range(ranks)]
    if len(rows):
        breaks = np.ones(len(rows), bool)
        breaks[1:] = (
            (owner[1:] != owner[:-1])
            | (groups[1:] != groups[:-1]).any(axis=1)
            | (rows[1:, 0] != rows[:-1, 0] + rows[:-1, 1])
            | (rows[1:, 2] != rows[:-1, 2] + rows[:-1, 3])
        )
        break_at_limit(breaks, rows)
        begins = np.flatnonzero(breaks)
        ends = np.append(begins[1:], len(rows))
        sums = np.zeros((2, len(rows) + 1), np.int64)
        np.cumsum(rows[:, 1], out=sums[0, 1:])
        np.cumsum(rows[:, 3], out=sums[1, 1:])
        # Rows before each batch are taken off, so that 32 bits hold what is left.
        ahead = np.repeat(sums[:, begins], ends - begins + 1, axis=1)
        places = np.arange(len(rows) + len(begins)) - np.repeat(np.arange(len(begins)), ends - begins + 1)
        cumulative = count_in_32_bits(sums[:, places] - ahead)
        stops = np.cumsum(ends - begins + 1).tolist()
        first = 0
        owners, heads, q_rows, k_rows = (
            owner[begins].tolist(), groups[begins].tolist(), rows[begins, 0].tolist(), rows[begins, 2].tolist()
        )  # fmt: skip
        for rank, (low, high), q_row, k_row, stop in zip(owners, heads, q_rows, k_rows, stops, strict=True):
            batches[rank].append(Batch(q_row, k_row, cumulative[0, first:stop], cumulative[1, first:stop], low, high))
            first = stop
    return [tuple(own) for own in batches]


def _columns(segments: Segments) -> Ints:
    return np.stack([segments.document, segments.begin, segments.end, segments.rank, segments.offset])


def _at(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
