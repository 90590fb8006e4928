"""Layout: where every token of a micro-batch lives.

In: position ids, cumulative lengths or plain lengths. Out: `Layout` (every segment of every rank) and `Tick` (the
rows whose attention one call computes, and the rows whose keys they may read). Plain numpy, no torch.distributed.

Positions are counted in tokens from the start of a document; offsets are rows of a rank's token buffer, that is the
micro-batch flattened row by row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from deepspeed_cad.errors import CADDataError

Ints = npt.NDArray[np.int64]
PADDING = -1
"""In place of a position, of a row that is in no document."""


def _ints(values: Any) -> Ints:
    return np.ascontiguousarray(values, dtype=np.int64)


def expand(first: Ints, count: Ints) -> Ints:
    """first[i], first[i] + 1, … for count[i] values each, concatenated."""
    return np.arange(count.sum()) + np.repeat(first - (np.cumsum(count) - count), count)


@dataclass(frozen=True, eq=False)
class Segments:
    """Parts of documents, one row each, ordered by (rank, offset); all columns are int64 of the same length."""

    document: Ints
    begin: Ints
    end: Ints
    rank: Ints
    offset: Ints
    """Row of `begin` in the home's buffer."""

    def __post_init__(self) -> None:
        for name in ("document", "begin", "end", "rank", "offset"):
            object.__setattr__(self, name, _ints(getattr(self, name)))

    def __len__(self) -> int:
        return len(self.document)

    def select(self, rows: Any) -> Segments:
        """The segments that a boolean mask or an index array names, in that order."""
        return Segments(*(column[rows] for column in (self.document, self.begin, self.end, self.rank, self.offset)))

    def find(self, document: Ints, row: Ints, rank: Ints) -> tuple[Ints, Ints]:
        """Begin and end of the segments in which ranks hold rows of documents ([n] each); −1 where they do not."""
        own = self.select(np.flatnonzero(self.begin < self.end))
        order = np.lexsort((own.begin, own.document))
        # Numbers that sort like (document, position): positions are below 2^31.
        first, wanted = own.document[order] << 32 | own.begin[order], document << 32 | row
        at = np.searchsorted(first, wanted, side="right") - 1
        found = order[np.maximum(at, 0)]
        held = (at >= 0) & (own.document[found] == document) & (row < own.end[found]) & (own.rank[found] == rank)
        return np.where(held, own.begin[found], -1), np.where(held, own.end[found], -1)

    def count_ranks(self) -> tuple[Ints, Ints]:
        """The documents, and on how many ranks each has rows."""
        return np.unique(np.unique(np.stack([self.document, self.rank]), axis=1)[0], return_counts=True)

    def to_array(self) -> Ints:
        return np.stack([self.document, self.begin, self.end, self.rank, self.offset], axis=1)


@dataclass(frozen=True, eq=False)
class LocalSegments:
    """What one rank says of its micro-batch: begin, end and offset of each segment, and its number of rows."""

    begin: Ints
    end: Ints
    offset: Ints
    tokens: int

    def to_array(self) -> Ints:
        """[n, 3]: begin, end, offset."""
        return np.stack([self.begin, self.end, self.offset], axis=1)

    @staticmethod
    def none(tokens: int) -> LocalSegments:
        """A rank without documents: `tokens` rows of padding."""
        return LocalSegments(_ints([]), _ints([]), _ints([]), tokens)

    def positions(self) -> Ints:
        """[tokens] the position of each row in its document; PADDING where it is in none."""
        found = np.full(self.tokens, PADDING, np.int64)
        size = self.end - self.begin
        found[expand(self.offset, size)] = expand(self.begin, size)
        return found

    def same_as(self, other: LocalSegments) -> bool:
        return self.tokens == other.tokens and np.array_equal(self.to_array(), other.to_array())


@dataclass(frozen=True, eq=False)
class Tick:
    """One core-attention call of all ranks together: the unit that a plan is made for. `query` are the rows whose
    output is computed, `key` those that they may read, with offsets in each rank's query and key buffer. Row 0 of these
    is row `query_base` and `key_base` of the rank's token buffer."""

    ranks: int
    query: Segments
    key: Segments
    query_tokens: Ints
    """[ranks] rows of its query buffer, padding included."""
    key_tokens: Ints
    query_base: Ints
    key_base: Ints

    def in_chunks(self, size: int) -> Tick:
        """The same rows where a row may only read keys of its own chunk of `size` positions: a document each."""
        (query, of_query), (key, of_key) = _cut_at(self.query, size), _cut_at(self.key, size)
        # Documents are numbered from 0, those that nobody reads left out.
        wanted, read = np.unique(of_query), np.isin(of_key, of_query)
        query = replace(query, document=np.searchsorted(wanted, of_query))
        key = replace(key.select(read), document=np.searchsorted(wanted, of_key[read]))
        return replace(self, query=query, key=key)

    def rows(self) -> Layout:
        """The rows whose output is computed, as a layout of their own; segments may begin inside documents."""
        return Layout(self.ranks, self.query, self.query_tokens)


@dataclass(frozen=True, eq=False)
class Layout:
    """Every segment of every rank for one micro-batch."""

    ranks: int
    segments: Segments
    tokens: Ints
    """Rows of each rank's token buffer; rows that no segment covers are padding."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", _ints(self.tokens))

    @property
    def documents(self) -> int:
        return int(self.segments.document.max()) + 1 if len(self.segments) else 0

    def local(self, rank: int) -> LocalSegments:
        own = self.segments.select(self.segments.rank == rank)
        return LocalSegments(own.begin, own.end, own.offset, int(self.tokens[rank]))

    def tick(self) -> Tick:
        """The whole micro-batch as one tick."""
        zero = np.zeros(self.ranks, dtype=np.int64)
        return Tick(self.ranks, self.segments, self.segments, self.tokens, self.tokens, zero, zero)

    def cut(self, at: Any) -> tuple[Tick, Tick]:
        """Two ticks: rows [0, at[r]) of every rank r, then rows [at[r], tokens[r]) reading the keys of both. Raises
        CADDataError where a row of the first part would read a key of the second (a document that goes on on the next
        rank), because those keys do not exist yet when the first part is computed."""
        at, seg = _ints(at), self.segments
        if not self.can_cut(at):
            raise CADDataError(
                f"the cut {at.tolist()} puts keys of a document into the second part that the first part reads; "
                "cut documents that span ranks at a rank boundary"
            )
        middle = seg.begin + self._before(at)
        first = replace(seg, end=middle).select(middle > seg.begin)
        second = replace(seg, begin=middle, offset=seg.offset + middle - seg.begin - at[seg.rank])
        second = second.select(middle < seg.end)
        continued = np.isin(seg.document, second.document)
        base = at.copy()
        np.minimum.at(base, seg.rank[continued], seg.offset[continued])
        key = replace(seg, offset=seg.offset - base[seg.rank]).select(continued)
        zero = np.zeros(self.ranks, dtype=np.int64)
        before = Tick(self.ranks, first, first, at, at, zero, zero)
        return before, Tick(self.ranks, second, key, self.tokens - at, self.tokens - base, at, base)

    def can_cut(self, at: Any) -> bool:
        seg, before = self.segments, self._before(_ints(at))
        last_first = np.zeros(self.documents, dtype=np.int64)
        np.maximum.at(last_first, seg.document, np.where(before > 0, seg.begin + before, 0))
        first_second = np.full(self.documents, np.iinfo(np.int64).max)
        behind = before < seg.end - seg.begin
        np.minimum.at(first_second, seg.document[behind], (seg.begin + before)[behind])
        return bool((last_first <= first_second).all())

    def _before(self, at: Ints) -> Ints:
        seg = self.segments
        return np.clip(at[seg.rank] - seg.offset, 0, seg.end - seg.begin)

    @staticmethod
    def from_rank_lengths(lengths: list[list[int]]) -> Layout:
        """Documents that stay on their rank: `lengths[r]` are those of rank r, in order."""
        return assemble([segments_from_cumulative(np.cumsum([0, *own]), sum(own)) for own in lengths])

    @staticmethod
    def from_stream(lengths: list[int], ranks: int, tokens_per_rank: int, zigzag: bool = False) -> Layout:
        """One stream of documents cut into equal rank parts; documents may span ranks (`cut_stream`). Raises
        CADDataError where the documents do not fit into `ranks` × `tokens_per_rank`."""
        total = int(sum(lengths))
        if total > ranks * tokens_per_rank:
            raise CADDataError(
                f"{total} tokens do not fit into {ranks} ranks of {tokens_per_rank}: "
                f"raise tokens_per_rank to at least {-(-total // max(ranks, 1))}"
            )
        pieces = cut_stream(_ints(lengths), tokens_per_rank, zigzag)
        local = []
        for own in np.split(pieces, np.searchsorted(pieces[:, 1], np.arange(1, ranks))):
            size = own[:, 3] - own[:, 2]
            local.append(LocalSegments(own[:, 2], own[:, 3], np.cumsum(size) - size, tokens_per_rank))
        return assemble(local)


def _cut_at(segments: Segments, size: int) -> tuple[Segments, Ints]:
    """Segments inside chunks of `size` positions, counted from the begin of these; and a number of each one's chunk."""
    first, last = segments.begin // size, (segments.end - 1) // size
    count = last - first + 1
    of = np.repeat(np.arange(len(segments)), count)
    chunk = expand(first, count)
    begin = np.maximum(segments.begin[of], chunk * size)
    end = np.minimum(segments.end[of], (chunk + 1) * size)
    whole = segments.select(of)
    parts = replace(
        whole, begin=begin - chunk * size, end=end - chunk * size, offset=whole.offset + begin - whole.begin
    )
    return parts, whole.document * (int(last.max(initial=0)) + 1) + chunk


def cut_stream(lengths: Ints, tokens_per_rank: int, zigzag: bool = False) -> Ints:
    """[n, 4]: document, rank, begin, end of every piece, in the order of ranks and of their rows.

    With `zigzag` a document that lies on several ranks is dealt out among them: each has as many of its rows as before,
    half of them from the front of the document and half, mirrored, from its end. A row has more to do the later it
    comes, so all ranks then have equally much to do for each of their rows, and send about as many keys as the others.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    begins = ends - lengths
    first, last = begins // tokens_per_rank, (ends - 1) // tokens_per_rank
    count = np.where(lengths > 0, last - first + 1, 0)
    document = np.repeat(np.arange(len(lengths)), count)
    rank = expand(first, count)
    low = np.maximum(rank * tokens_per_rank, begins[document]) - begins[document]
    high = np.minimum((rank + 1) * tokens_per_rank, ends[document]) - begins[document]
    if not zigzag:
        return np.stack([document, rank, low, high], axis=1)
    # Rows before a rank's in the stream, halved, are those before its first piece and behind its second.
    size = lengths[document]
    early = np.stack([document, rank, (low + 1) // 2, (high + 1) // 2], axis=1)
    both = np.concatenate([early, np.stack([document, rank, size - high // 2, size - low // 2], axis=1)])
    both = both[np.lexsort((both[:, 2], both[:, 0], both[:, 1]))]
    both = both[both[:, 2] < both[:, 3]]
    joins = (both[1:, :2] == both[:-1, :2]).all(1) & (both[1:, 2] == both[:-1, 3])
    starts = np.append(True, ~joins)[: len(both)]
    return np.concatenate([both[starts, :3], both[np.append(~joins, True)[: len(both)], 3:]], axis=1)


def assemble(local: list[LocalSegments]) -> Layout:
    """Join what the ranks say into one layout.

    A segment that begins at position p > 0 goes on with the document before it, on its rank or the nearest before that
    has any. Where that has one token and the document before it ended at p, this one goes on: the token is the first of
    the other rank once more, there for its label (ahead/move_documents.py). Pieces of a document may lie in any order
    on its ranks if it begins where its first row is, and together they must hold each of its rows once. Raises
    CADDataError, naming ranks and positions, where they do not."""
    columns = np.concatenate([np.zeros((0, 3), np.int64), *(own.to_array() for own in local)])
    begin, end, offset = columns.T
    rank = np.repeat(np.arange(len(local)), [len(own.begin) for own in local])
    document = np.cumsum(begin == 0) - 1
    for before in np.flatnonzero(begin[1:] > 0).tolist():
        at = before + 1
        own = rank[before - 1] == rank[before] < rank[at]
        copied = before > 0 and own and end[before] == 1 < begin[at] == end[before - 1]
        document[at] = document[before - 1 if copied else before]
    segments = Segments(document, begin, end, rank, offset)
    if len(begin) and begin[0] > 0:
        raise CADDataError(_starts_inside(int(rank[0]), int(begin[0]), "no rank before it has a document"))
    order = np.lexsort((begin, segments.document))
    goes_on = np.diff(segments.document[order]) == 0
    if len(wrong := np.flatnonzero(goes_on & (begin[order][1:] != end[order][:-1]))):
        before, at = order[wrong[0]], order[wrong[0] + 1]
        if rank[before] != rank[at] and offset[at] == offset[rank == rank[at]].min():
            found = f"the document before it, on rank {rank[before]}, ended at {end[before]}"
            raise CADDataError(_starts_inside(int(rank[at]), int(begin[at]), found))
        fault = "two ranks hold" if begin[at] < end[before] else "no rank holds"
        low, high = sorted((int(begin[at]), int(end[before])))
        raise CADDataError(
            f"rank {rank[at]}: at row {offset[at]} position_ids jump to {begin[at]} inside a document, but {fault} its "
            f"rows from {low} to {high}. Positions go on by one or start again at 0; only a document that lies on "
            "several ranks may be in pieces, which together hold each of its rows once (deepspeed_cad.shard_stream "
            "cuts that way)"
        )
    return Layout(len(local), segments, _ints([own.tokens for own in local]))


def _starts_inside(rank: int, position: int, found: str) -> str:
    return (
        f"rank {rank}: its first document starts at position {position}, but {found}. "
        "A rank may start inside a document only where the rank before stopped "
        "(deepspeed_cad.shard_stream cuts that way); otherwise positions must start at 0"
    )


def segments_from_positions(position_ids: Any, mask: Any = None) -> LocalSegments:
    """Segments of a [batch, tokens] array of position ids, flattened row by row.

    A segment is a run of consecutive positions inside one batch row, and a document begins where the position is 0. A
    jump to a later position is a piece of the same document; whether other ranks hold the rows between is found by
    `assemble`. `mask` ([batch, tokens], 0 where padded) takes padding out; a run behind padding is a document of its
    own whatever position it starts at. Raises CADDataError for positions that are not whole numbers, are negative, or
    jump back inside a row to something other than 0."""
    positions = np.atleast_2d(position_ids)
    if positions.ndim != 2:
        raise CADDataError(
            f"position_ids has shape {positions.shape}; expected [batch, tokens]. "
            "Positions of several axes (vision models) are not supported"
        )

    def refuse(wrong: npt.NDArray[np.bool_], why: str) -> None:
        if wrong.any():
            row, column = np.argwhere(wrong)[0]
            before = f" after {positions[row, column - 1]}" if column else ""
            raise CADDataError(f"position_ids[{row}, {column}] is {positions[row, column]}{before}; {why}")

    if not np.issubdtype(positions.dtype, np.integer):
        refuse(~np.isfinite(positions) | (positions != np.floor(positions)), "positions must be whole numbers")
    positions = positions.astype(np.int64)
    valid = np.ones(positions.shape, bool) if mask is None else np.asarray(mask).astype(bool)
    refuse(valid & (positions < 0), "positions start at 0")
    behind = valid.copy()
    behind[:, :1] = False
    behind[:, 1:] &= valid[:, :-1]
    step = np.diff(positions, axis=1, prepend=positions[:, :1])
    starts = valid & ~(behind & (step == 1))
    pieces = behind & (step != 1) & (positions != 0)
    refuse(
        pieces & (step <= 0),
        "inside a row positions either go on by one or start again at 0, and jump ahead only in a document on several "
        "ranks",
    )
    offset = np.flatnonzero(starts)
    length = np.bincount(starts.ravel().cumsum()[valid.ravel()] - 1, minlength=len(offset))
    # Only the first row of a rank can go on with a document of the rank before.
    begin = np.where((offset == 0) | pieces.ravel()[offset], positions.ravel()[offset], 0)
    return LocalSegments(begin, begin + length, offset, positions.size)


def segments_from_cumulative(cu_seqlens: Any, tokens: int, name: str = "cu_seq_lens_q") -> LocalSegments:
    """Segments from cumulative lengths ([documents + 1], as FlashAttention takes them); rows behind are padding.
    `name`: of the argument, for errors. Raises CADDataError where these do not start at 0, fall, or exceed `tokens`."""
    ends = _ints(cu_seqlens).ravel()
    if len(ends) == 0 or ends[0] != 0 or (np.diff(ends) < 0).any() or ends[-1] > tokens:
        raise CADDataError(
            f"{name} {ends[:8].tolist()}{'…' if len(ends) > 8 else ''} must start at 0, never fall, and end "
            f"at most at the {tokens} tokens of the micro-batch"
        )
    length, offset = np.diff(ends), ends[:-1]
    kept = length > 0
    return LocalSegments(0 * length[kept], length[kept], offset[kept], tokens)
