"""Schedules by the compiled library, csrc/schedule.cpp: the same arrays as `deepspeed_cad.schedule.build_slices`.

In: a tick and its tasks. Out: the slice table of all ranks; and all ranks' schedules at once, as views of it.
"""

from __future__ import annotations

import ctypes

import numpy as np

from deepspeed_cad.errors import CADError
from deepspeed_cad.layout import Ints, Segments, Tick
from deepspeed_cad.native import load
from deepspeed_cad.schedule import HOME, SERVER, Schedule, Slices, _fuse


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
    handle, counts = ctypes.c_void_p(), np.zeros(3, np.int64)
    code = library.cad_schedule_build(_at(sizes), _at(query), _at(key), _at(tasks), ctypes.byref(handle), _at(counts))
    if code:
        library.cad_last_error.restype = ctypes.c_char_p
        raise CADError(f"building schedules failed: {library.cad_last_error().decode()}")
    table, sequences, local = (
        np.empty((int(rows), columns), np.int64) for rows, columns in zip(counts, (8, 5, 7), strict=True)
    )
    served, landed = np.empty((tick.ranks, 2), np.int64), np.empty((tick.ranks, 2), np.int64)
    library.cad_schedule_take.restype = None
    library.cad_schedule_take(handle, _at(table), _at(sequences), _at(local), _at(served), _at(landed))
    return Slices(table, sequences, local, served, landed)


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
    local_at, served_at = np.searchsorted(slices.local[:, 0], ranks), np.searchsorted(slices.sequences[:, 0], ranks)
    one_group = np.tile([0, 1], (int(np.diff(served_at).max(initial=0)), 1))
    schedules = []
    for rank in range(tick.ranks):
        local = slices.local[local_at[rank] : local_at[rank + 1]]
        sequences = slices.sequences[served_at[rank] : served_at[rank + 1]]
        schedules.append(
            Schedule(
                rank=rank,
                ranks=tick.ranks,
                groups=groups,
                window=window,
                query_tokens=int(tick.query_tokens[rank]),
                key_tokens=int(tick.key_tokens[rank]),
                sends=sends[send_at[rank] : send_at[rank + 1]],
                receives=receives[receive_at[rank] : receive_at[rank + 1]],
                own=own[own_at[rank] : own_at[rank + 1]],
                served_rows=slices.served_rows,
                landed_rows=slices.landed_rows,
                local=_fuse(local[:, 1:3], local[:, 3:7]),
                served=_fuse(one_group[: len(sequences)], sequences[:, 1:5]),
            )
        )
    return schedules


def _columns(segments: Segments) -> Ints:
    return np.stack([segments.document, segments.begin, segments.end, segments.rank, segments.offset])


def _at(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
