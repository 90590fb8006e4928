"""Schedule: one rank's view of a plan, as tables.

In: a tick and its plan, equal on every rank. Out: slices to send, slices to receive and fused varlen batches to run.

A server keeps what it receives group-major: one head group of a task after the other, so that every (task, head
group) is one sequence of a varlen kernel with a single KV head. What a rank runs on its own rows and keys is not moved
at all: those batches are strided views of its own Q, K and V. Where it runs its own rows with keys of others, only the
keys lie side by side where they land: Q, O and their gradients stay in place. A slice is a run of rows of one head
group on its way from its home to a server; the way back uses the same slices.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from deepspeed_cad.layout import Ints

QUERY, KEY = 0, 1
KIND, HOME, SERVER, GROUP, HOME_ROW, SERVER_ROW, ROWS, STAGE_ROW = range(8)
"""Columns of a slice table. HOME_ROW is a row of the home's query (or key) buffer, SERVER_ROW of the server's
group-major buffer, STAGE_ROW of the home's landing area for what comes back (slices in table order)."""


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
        rows = np.concatenate([head, self.served_rows.reshape(-1), self.landed_rows.reshape(-1)])
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
    """Rows of a rank's query buffer that no task covers in any of the schedules of one tick: their output is zero."""
    covered = np.zeros((parts[0].query_tokens, parts[0].groups), bool)
    flat = covered.reshape(-1)
    for part in parts:
        for batch in (*part.local, *part.half_local):
            covered[batch.q_row : batch.q_row + batch.q_rows, batch.group_begin : batch.group_end] = True
        flat[part.home_index(part.sends, QUERY)] = True
        flat[part.home_index(part.own, QUERY)] = True
    return np.flatnonzero(~covered.all(axis=1))


def expand(first: Ints, count: Ints) -> Ints:
    """first[i], first[i] + 1, … for count[i] values each, concatenated."""
    total = int(count.sum())
    ends = np.cumsum(count)
    return np.arange(total) + np.repeat(first - (ends - count), count)
