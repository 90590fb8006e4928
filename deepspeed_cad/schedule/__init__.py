"""Schedule: one rank's view of a plan, as tables. The slices of all ranks are made by csrc/schedule.cpp.

In: a tick and its tasks, equal on every rank. Out: slices to send, slices to receive and fused varlen batches to run.

A server keeps what it receives group-major: one head group of a task after the other, so that every (task, head
group) is one sequence of a varlen kernel with a single KV head. What a rank runs on its own rows and keys is not moved
at all: those batches are strided views of its own Q, K and V. Where it runs its own rows with keys of others, only the
keys lie side by side where they land: Q, O and their gradients stay in place. A slice is a run of rows of one head
group on its way from its home to a server; the way back uses the same slices.
"""

import ctypes
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from deepspeed_cad.errors import CADError
from deepspeed_cad.layout import Ints, Tick, expand
from deepspeed_cad.native import call
from deepspeed_cad.planner.constants import IN_PLACE

QUERY, KEY = 0, 1
KIND, HOME, SERVER, GROUP, HOME_ROW, SERVER_ROW, ROWS, STAGE_ROW = range(8)
"""Columns of a slice table. HOME_ROW is a row of the home's query (or key) buffer, SERVER_ROW of the server's
group-major buffer, STAGE_ROW of the home's landing area for what comes back (slices in table order)."""

MOST_ROWS = 2**31 - 1
"""Of all sequences of one kernel call."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences that one varlen kernel call runs: contiguous rows of a query and of a key buffer."""

    q_row: int
    k_row: int
    cu_q: npt.NDArray[np.int32]
    """[sequences + 1] cumulative query rows from `q_row`."""
    cu_k: npt.NDArray[np.int32]
    """[sequences + 1] cumulative key rows from `k_row`."""
    group_begin: int = 0
    """Head groups of the rank's own buffers; served batches have one group, 0."""
    group_end: int = 1
    k_step: int = 0
    """Of half-local batches: rows from the keys of one head group to those of the next in the group-major buffer."""

    @property
    def q_rows(self) -> int:
        return int(self.cu_q[-1])

    @property
    def k_rows(self) -> int:
        return int(self.cu_k[-1])

    @property
    def max_q(self) -> int:
        return int(np.diff(self.cu_q).max())

    @property
    def max_k(self) -> int:
        return int(np.diff(self.cu_k).max())


@dataclass(frozen=True, eq=False)
class Schedule:
    """What one rank sends, receives and runs in one tick."""

    rank: int
    ranks: int
    groups: int
    window: int | None
    query_tokens: int
    key_tokens: int
    sends: Ints
    """Slices whose home is this rank and whose server is another, in table order."""
    receives: Ints
    """Slices whose server is this rank and whose home is another, in table order."""
    own: Ints
    """Slices that this rank serves to itself: copied locally into the group-major buffers."""
    served_rows: Ints
    """[ranks, 2]: rows of every rank's group-major query and key buffers."""
    landed_rows: Ints
    """[ranks, 2]: query and key rows that come back to every rank."""
    local: tuple[Batch, ...]
    served: tuple[Batch, ...]
    half_local: tuple[Batch, ...] = ()
    """Rows of the rank's own query buffer with keys of the group-major buffer, one sequence each."""

    def rows_by_peer(self, table: Ints, peer_column: int, kind: int) -> Ints:
        """[ranks]: rows of one kind that `table` moves from or to each peer."""
        rows = table[table[:, KIND] == kind]
        return np.bincount(rows[:, peer_column], weights=rows[:, ROWS], minlength=self.ranks).astype(np.int64)

    def home_index(self, table: Ints, kind: int) -> Ints:
        """(row × groups + group) of every row that the slices of one kind take from the home's buffer, in order."""
        rows = table[table[:, KIND] == kind]
        return expand(rows[:, HOME_ROW], rows[:, ROWS]) * self.groups + np.repeat(rows[:, GROUP], rows[:, ROWS])

    def server_index(self, table: Ints, kind: int) -> Ints:
        """Row of the server's group-major buffer for every row of the slices of one kind, in order."""
        rows = table[table[:, KIND] == kind]
        return expand(rows[:, SERVER_ROW], rows[:, ROWS])

    @cached_property
    def digest(self) -> int:
        """32 bits over what all ranks know of the schedule: equal on all, different for (nearly) all others."""
        head = np.array([self.ranks, self.groups, self.window or 0], np.int64)
        rows = np.concatenate([head, self.served_rows.ravel(), self.landed_rows.ravel()])
        return zlib.crc32(rows.astype("<i8").tobytes())


@dataclass(frozen=True, eq=False)
class Slices:
    """The slice table of all ranks and every (task, head group) sequence: what all schedules are views of."""

    table: Ints
    """[slices, 8], ordered by (kind, home, server, server row)."""
    sequences: Ints
    """[sequences, 5]: server, q row, q rows, k row, k rows in the server's buffers, ordered for fusing."""
    local: Ints
    """[tasks, 7]: server, group begin, group end, q row, q rows, k row, k rows in the server's own buffers."""
    half_local: Ints
    """[runs, 8]: server, group begin, group end, q row, q rows in its own buffer; k row, k rows and rows from group to
    group in its group-major one."""
    served_rows: Ints
    landed_rows: Ints


def padding_rows(parts: Sequence[Schedule]) -> Ints:
    """Rows of a rank's query buffer that no task covers in any of the schedules of one tick: their output is zero.
    Of each row of a head group there is one task at most."""
    change = np.zeros(parts[0].query_tokens + 1, np.int64)
    for part in parts:
        for batch in (*part.local, *part.half_local):
            groups = batch.group_end - batch.group_begin
            change[batch.q_row] += groups
            change[batch.q_row + batch.q_rows] -= groups
        leaves = np.concatenate([part.sends, part.own])
        leaves = leaves[leaves[:, KIND] == QUERY]
        np.add.at(change, leaves[:, HOME_ROW], 1)
        np.add.at(change, leaves[:, HOME_ROW] + leaves[:, ROWS], -1)
    return np.flatnonzero(np.cumsum(change[:-1]) < parts[0].groups)


def build_slices(tick: Tick, tasks: Ints, window: int | None = None) -> Slices:
    """Cut the tasks of a plan ([n, 6], see Plan.tasks) into slices and sequences, for all ranks at once."""
    tasks = np.ascontiguousarray(tasks, np.int64)
    sizes = np.array([tick.ranks, window or 0, len(tick.query), len(tick.key), len(tasks), IN_PLACE], np.int64)
    query, key = (np.ascontiguousarray(one.to_array().T) for one in (tick.query, tick.key))
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
        served=_fuse(np.tile([0, 1], (len(sequences), 1)), sequences[:, 1:5]),
        half_local=_half_local_batches(slices.half_local[slices.half_local[:, 0] == rank]),
    )


def _half_local_batches(runs: Ints) -> tuple[Batch, ...]:
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
    for part, (low, high) in zip(np.split(rows, np.flatnonzero(breaks)[1:]), groups[breaks].tolist(), strict=True):
        cu_q, cu_k = (_count_in_32_bits(np.concatenate([[0], np.cumsum(part[:, of])])) for of in (1, 3))
        batches.append(Batch(int(part[0, 0]), int(part[0, 2]), cu_q, cu_k, low, high))
    return tuple(batches)


def _break_at_limit(breaks: npt.NDArray[np.bool_], rows: Ints) -> None:
    """Begin another batch where one would have more rows than kernels count; `rows` as in `_fuse`."""
    if rows[:, [1, 3]].sum(axis=0).max(initial=0) <= MOST_ROWS:
        return
    held = rows[0, [1, 3]]
    for at, more in enumerate(rows[1:, [1, 3]], 1):
        held = held + more
        if breaks[at] or (held > MOST_ROWS).any():
            breaks[at], held = True, more


def _count_in_32_bits(rows: Ints) -> npt.NDArray[np.int32]:
    """Cumulative rows as kernels take them; everything else about rows and bytes is counted in 64 bits."""
    if rows.max(initial=0) > MOST_ROWS:
        raise CADError(
            f"a document has {int(rows.max())} rows on one rank, and kernels count them in 32 bits, up to {MOST_ROWS}: "
            "use shorter documents"
        )
    return rows.astype(np.int32)
