"""Schedule: one rank's view of a plan.

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

from deepspeed_cad.cost import window_start
from deepspeed_cad.errors import CADError
from deepspeed_cad.layout import Ints, Segments, Tick
from deepspeed_cad.planner.constants import IN_PLACE

QUERY, KEY = 0, 1
MOST_ROWS = 2**31 - 1
"""Of all sequences of one kernel call."""
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
        """Query rows of all sequences."""
        return int(self.cu_q[-1])

    @property
    def k_rows(self) -> int:
        """Key rows of all sequences."""
        return int(self.cu_k[-1])

    @property
    def max_q(self) -> int:
        """Longest query sequence."""
        return int(np.diff(self.cu_q).max())

    @property
    def max_k(self) -> int:
        """Longest key sequence."""
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
        return _expand(rows[:, HOME_ROW], rows[:, ROWS]) * self.groups + np.repeat(rows[:, GROUP], rows[:, ROWS])

    def server_index(self, table: Ints, kind: int) -> Ints:
        """Row of the server's group-major buffer for every row of the slices of one kind, in order."""
        rows = table[table[:, KIND] == kind]
        return _expand(rows[:, SERVER_ROW], rows[:, ROWS])

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


def build_slices(tick: Tick, tasks: Ints, window: int | None = None) -> Slices:
    """Cut the tasks of a plan ([n, 6], see Plan.tasks) into slices and sequences, for all ranks at once."""
    document, begin, end, group_begin, group_end, server = tasks.T
    start = window_start(begin, window)
    query_row = home_rows(tick.query, document, begin, end, server)
    key_row = home_rows(tick.key, document, start, end, server)
    is_local = (query_row >= 0) & (key_row >= 0)
    local = np.stack([server, group_begin, group_end, query_row, end - begin, key_row, end - start], axis=1)[is_local]
    local = local[np.lexsort((local[:, 3], local[:, 2], local[:, 1], local[:, 0]))]

    remote = ~is_local
    count = (group_end - group_begin)[remote]
    own = np.bincount(tick.query.rank, weights=tick.query.end - tick.query.begin, minlength=tick.ranks)
    stays = (query_row >= 0) & ((end - begin) * IN_PLACE >= own[server])
    task = np.repeat(np.flatnonzero(remote), count)
    document, begin, end, start, server, stays, query_row = (
        column[task] for column in (document, begin, end, start, server, stays, query_row)
    )
    group = _expand(group_begin[remote], count)

    # Keys: one copy per (server, document, group) of the union of what its sequences read.
    order = np.lexsort((-end, start, group, document, server))
    document, begin, end, start, server, group, task, stays, query_row = (
        column[order] for column in (document, begin, end, start, server, group, task, stays, query_row)
    )
    fresh = np.ones(len(order), bool)
    running = np.maximum.accumulate(_owner_key(server, document, group, end)) if len(order) else end
    if len(order):
        same = (server[1:] == server[:-1]) & (document[1:] == document[:-1]) & (group[1:] == group[:-1])
        fresh[1:] = ~same | (running[:-1] < _owner_key(server, document, group, start)[1:])
    held = np.cumsum(fresh) - 1
    held_start = start[fresh]
    held_end = np.maximum.reduceat(end, np.flatnonzero(fresh)) if len(order) else end
    held_rows = held_end - held_start
    # Those that only rows in place read lie behind the others, which fuse into one batch with the rows that land.
    behind = np.logical_and.reduceat(stays, np.flatnonzero(fresh)) if len(order) else stays
    order = np.lexsort((np.arange(len(behind)), behind, server[fresh]))
    held_row = np.empty(len(order), np.int64)
    held_row[order] = _rows_from(server[fresh][order], held_rows[order], tick.ranks)
    key_at = held_row[held] + start - held_start[held]

    # Queries: sequences that read a whole held range first, in its order, so that they fuse into one batch.
    whole = fresh & (start == held_start[held]) & (end == held_end[held])
    order = np.lexsort((np.arange(len(whole)), ~whole, server))
    order = order[~stays[order]]
    query_at = np.empty(len(whole), np.int64)
    query_at[order] = _rows_from(server[order], (end - begin)[order], tick.ranks)
    sequences = np.stack([server, query_at, end - begin, key_at, end - start], axis=1)[order]
    half_local = np.stack(
        [server, group, group + 1, query_row, end - begin, key_at, end - start, held_rows[held]], axis=1
    )  # fmt: skip
    half_local = _join_groups(half_local[stays], task[stays])

    lands = ~stays
    table = np.concatenate(
        [
            _slices(
                QUERY, tick.query, document[lands], begin[lands], end[lands], group[lands], server[lands],
                query_at[lands],
            ),
            _slices(KEY, tick.key, document[fresh], held_start, held_end, group[fresh], server[fresh], held_row),
        ]
    )  # fmt: skip
    table = table[np.lexsort((table[:, SERVER_ROW], table[:, SERVER], table[:, HOME], table[:, KIND]))]
    moved = table[:, HOME] != table[:, SERVER]
    landed = np.zeros((tick.ranks, 2), np.int64)
    np.add.at(landed, (table[moved, HOME], table[moved, KIND]), table[moved, ROWS])
    for kind in (QUERY, KEY):
        of_kind = moved & (table[:, KIND] == kind)
        table[of_kind, STAGE_ROW] = _rows_from(table[of_kind, HOME], table[of_kind, ROWS], tick.ranks)
    served = np.stack(
        [
            np.bincount(server[lands], weights=(end - begin)[lands], minlength=tick.ranks),
            np.bincount(server[fresh], weights=held_rows, minlength=tick.ranks),
        ],
        axis=1,
    ).astype(np.int64)
    return Slices(table, sequences, local, half_local, served, landed)


def _join_groups(runs: Ints, task: Ints) -> Ints:
    """Head groups of one task whose keys follow each other side by side run together."""
    order = np.lexsort((runs[:, 1], task, runs[:, 0]))
    runs, task = runs[order], task[order]
    if not len(runs):
        return runs
    before, after = runs[:-1], runs[1:]
    joins = (task[1:] == task[:-1]) & (after[:, 5] == before[:, 5] + before[:, 7]) & (after[:, 7] == before[:, 7])
    first = np.flatnonzero(np.concatenate([[True], ~joins]))
    joined = runs[first]
    joined[:, 2] = runs[np.append(first[1:], len(runs)) - 1, 2]
    return joined


def schedule_rank(tick: Tick, slices: Slices, rank: int, groups: int, window: int | None = None) -> Schedule:
    """The schedule of one rank."""
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
        half_local=half_local_batches(slices.half_local[slices.half_local[:, 0] == rank]),
    )


def half_local_batches(runs: Ints) -> tuple[Batch, ...]:
    """One for each of these rows of `Slices.half_local`."""
    return tuple(
        Batch(
            q_row, k_row, count_in_32_bits(np.array([0, rows])), count_in_32_bits(np.array([0, keys])), low, high, step
        )
        for _, low, high, q_row, rows, k_row, keys, step in runs.tolist()
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
    break_at_limit(breaks, rows)
    batches = []
    for first, last in zip(np.flatnonzero(breaks), [*np.flatnonzero(breaks)[1:], len(rows)], strict=True):
        part = rows[first:last]
        batches.append(
            Batch(
                q_row=int(part[0, 0]),
                k_row=int(part[0, 2]),
                cu_q=count_in_32_bits(np.concatenate([[0], np.cumsum(part[:, 1])])),
                cu_k=count_in_32_bits(np.concatenate([[0], np.cumsum(part[:, 3])])),
                group_begin=int(groups[first, 0]),
                group_end=int(groups[first, 1]),
            )
        )
    return tuple(batches)


def break_at_limit(breaks: npt.NDArray[np.bool_], rows: Ints) -> None:
    """Begin another batch where one would have more rows than kernels count; `rows` as in `_fuse`."""
    if rows[:, [1, 3]].sum(axis=0).max(initial=0) <= MOST_ROWS:
        return
    held = np.zeros(2, np.int64)
    for at, more in enumerate(rows[:, [1, 3]]):
        if breaks[at] or (held + more > MOST_ROWS).any():
            breaks[at], held = True, np.zeros(2, np.int64)
        held = held + more


def count_in_32_bits(rows: Ints) -> npt.NDArray[np.int32]:
    """Cumulative rows as kernels take them; everything else about rows and bytes is counted in 64 bits."""
    if rows.max(initial=0) > MOST_ROWS:
        raise CADError(
            f"a document has {int(rows.max())} rows on one rank, and kernels count them in 32 bits, up to {MOST_ROWS}: "
            "use shorter documents"
        )
    return rows.astype(np.int32)


def _expand(first: Ints, count: Ints) -> Ints:
    """first[i], first[i] + 1, … for count[i] values each, concatenated."""
    total = int(count.sum())
    ends = np.cumsum(count)
    return np.arange(total) + np.repeat(first - (ends - count), count)


def _rows_from(owner: Ints, rows: Ints, ranks: int) -> Ints:
    """Where each run of `rows` begins when every owner lays its runs one after the other, in the order given."""
    order = np.argsort(owner, kind="stable")
    ends = np.cumsum(rows[order])
    begins = ends - rows[order]
    base = np.zeros(ranks + 1, np.int64)
    np.add.at(base, owner + 1, rows)
    result = np.empty(len(rows), np.int64)
    result[order] = begins - np.cumsum(base)[owner[order]]
    return result


def _owner_key(server: Ints, document: Ints, group: Ints, position: Ints) -> Ints:
    """A number that sorts like (server, document, group, position), made dense so that it cannot overflow."""
    change = np.ones(len(server), np.int64)
    change[1:] = (server[1:] != server[:-1]) | (document[1:] != document[:-1]) | (group[1:] != group[:-1])
    return np.cumsum(change) * (np.int64(1) << 40) + position


def home_rows(where: Segments, document: Ints, begin: Ints, end: Ints, rank: Ints) -> Ints:
    """Buffer row of `begin` on `rank` if that rank holds all of [begin, end) in one segment, else −1."""
    if not len(where):
        return np.full(len(document), -1)
    order, key = _by_document(where)
    at = np.searchsorted(key, document * (np.int64(1) << 40) + begin, side="right") - 1
    segment = order[np.maximum(at, 0)]
    inside = (
        (at >= 0)
        & (where.document[segment] == document)
        & (where.rank[segment] == rank)
        & (where.begin[segment] <= begin)
        & (end <= where.end[segment])
    )
    return np.where(inside, where.offset[segment] + begin - where.begin[segment], -1)


def _by_document(where: Segments) -> tuple[Ints, Ints]:
    key = where.document * (np.int64(1) << 40) + where.begin
    order = np.argsort(key, kind="stable")
    return order, key[order]


def _slices(
    kind: int, where: Segments, document: Ints, begin: Ints, end: Ints, group: Ints, server: Ints, server_row: Ints
) -> Ints:
    """Slices of the intervals [begin, end): one per home segment that an interval meets."""
    if not len(document) or not len(where):
        return np.zeros((0, 8), np.int64)
    order, key = _by_document(where)
    first = np.searchsorted(key, document * (np.int64(1) << 40) + begin, side="right") - 1
    last = np.searchsorted(key, document * (np.int64(1) << 40) + end, side="left")
    count = last - first
    interval = np.repeat(np.arange(len(document)), count)
    segment = order[_expand(first, count)]
    low = np.maximum(begin[interval], where.begin[segment])
    high = np.minimum(end[interval], where.end[segment])
    table = np.zeros((len(interval), 8), np.int64)
    table[:, KIND] = kind
    table[:, HOME] = where.rank[segment]
    table[:, SERVER] = server[interval]
    table[:, GROUP] = group[interval]
    table[:, HOME_ROW] = where.offset[segment] + low - where.begin[segment]
    table[:, SERVER_ROW] = server_row[interval] + low - begin[interval]
    table[:, ROWS] = high - low
    return table
