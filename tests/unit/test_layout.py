"""Layout: documents out of positions, masks and lengths, and the cut into two ticks, as properties."""

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_cad.cost import count_pairs
from deepspeed_cad.errors import CADDataError
from deepspeed_cad.layout import Layout, LocalSegments, assemble, segments_from_cumulative, segments_from_positions

lengths = st.lists(st.integers(1, 40), max_size=12)


@given(lengths, st.integers(1, 5), st.integers(1, 60))
def test_a_stream_joins_again_at_rank_borders(own: list[int], ranks: int, per_rank: int) -> None:
    if sum(own) > ranks * per_rank:
        with pytest.raises(CADDataError, match="do not fit"):
            Layout.from_stream(own, ranks, per_rank)
        return
    layout = Layout.from_stream(own, ranks, per_rank)
    assert layout.documents == len(own)
    assert type(layout.segments)(*np.zeros((5, 2), np.int32)).to_array().dtype == np.int64, "what compiled code reads"
    found = np.zeros(len(own), np.int64)
    np.add.at(found, layout.segments.document, layout.segments.end - layout.segments.begin)
    assert found.tolist() == own


def _read(query: Any, key: Any, size: int | None) -> dict[tuple[int, int], set[tuple[int, int]]]:
    """By (rank, row) of each query the (rank, row) of the keys that it reads; `size`: inside chunks."""
    rows = [
        [(d, p, (rank, offset + p - b)) for d, b, e, rank, offset in part.to_array().tolist() for p in range(b, e)]
        for part in (query, key)
    ]
    chunk = size or 10**6
    return {
        at: {there for e, q, there in rows[1] if e == d and q <= p and q // chunk == p // chunk}
        for d, p, at in rows[0]
    }  # fmt: skip


@settings(max_examples=50)
@given(lengths, st.integers(2, 4), st.integers(8, 40), st.integers(1, 50), st.booleans(), st.randoms())
def test_chunks_are_documents(own: list[int], ranks: int, per_rank: int, size: int, zigzag: bool, rng: Any) -> None:
    """Rows read the same keys at the same places as inside chunks of whole documents; also in a tick that was cut."""
    own = own[: ranks * per_rank // 40]
    layout = Layout.from_stream(own, ranks, per_rank, zigzag)
    at = np.array([rng.randint(0, per_rank) for _ in range(ranks)])
    for tick in (layout.tick(), *(layout.cut(at) if layout.can_cut(at) else ())):
        chunks = tick.in_chunks(size)
        assert _read(chunks.query, chunks.key, None) == _read(tick.query, tick.key, size)
        documents = set(chunks.query.document.tolist())
        assert documents == set(chunks.key.document.tolist()) == set(range(len(documents)))
        assert (chunks.query.end <= size).all() and tick.query_base.dtype == tick.key_base.dtype == np.int64


@given(lengths, st.integers(2, 5), st.integers(8, 60), st.booleans(), st.randoms())
def test_a_cut_reads_no_key_behind_it(own: list[int], ranks: int, per_rank: int, zigzag: bool, rng: Any) -> None:
    """What can be cut is all where no row of the second part stands before one of the first in its document."""
    own = own[: ranks * per_rank // 40]
    layout = Layout.from_stream(own, ranks, per_rank, zigzag)
    at = np.array([rng.choice([0, per_rank // 2, rng.randint(0, per_rank)]) for _ in range(ranks)])
    table = layout.segments.to_array().tolist()
    rows = sorted((d, p, o + p - b >= at[rank]) for d, b, e, rank, o in table for p in range(b, e))
    before = any(d == e and second and not third for (d, _, second), (e, _, third) in zip(rows, rows[1:]))
    assert layout.can_cut(at) != before and layout.can_cut(layout.tokens)
    if before:
        with pytest.raises(CADDataError, match="reads"):
            layout.cut(at)
        return
    first, second = layout.cut(at)
    assert (first.query_tokens == at).all() and (second.query_tokens == layout.tokens - at).all()
    assert len({(d, p) for t in (first, second) for d, b, e, *_ in t.query.to_array() for p in range(b, e)}) == sum(own)
    for tick in (first, second):
        keys = {(d, p): (r, o + p - b) for d, b, e, r, o in tick.key.to_array() for p in range(b, e)}
        for d, b, e, r, o in tick.query.to_array():
            assert 0 <= o and o + e - b <= tick.query_tokens[r]
            assert all((d, p) in keys for p in range(e))
        for rank, row in keys.values():
            assert 0 <= row < tick.key_tokens[rank]


def test_ranks_are_joined_into_documents() -> None:
    local = [
        LocalSegments([0, 0], [4, 3], [0, 4], 7), LocalSegments.none(5), LocalSegments([3, 0], [9, 2], [1, 7], 9),
        LocalSegments([2], [4], [0], 2),
    ]  # fmt: skip
    layout = assemble(local)
    assert layout.segments.document.tolist() == [0, 1, 1, 2, 2] and layout.segments.rank.tolist() == [0, 0, 2, 2, 3]
    assert layout.segments.offset.tolist() == [0, 4, 1, 7, 0]
    assert layout.tokens.tolist() == [7, 5, 9, 2] and layout.ranks == 4 and layout.documents == 3
    assert assemble([]).documents == 0


@pytest.mark.parametrize("ranks, words", [
    ([[0, 1, 4, 5]], r"rank 0: at row 2 position_ids jump to 4 inside a document, but no rank holds .*from 2 to 4"),
    # Only on another rank than its own may a document of one token be the copy of a later one.
    ([[0, 1, 2, 0, 3, 4]], r"rank 0: at row 4 position_ids jump to 3 .*, but no rank holds .*from 1 to 3"),
    ([[0, 1, 4, 5], [2, 3, 4, 5]], r"rank 0: at row 2 .*jump to 4 .* two ranks hold its rows from 4 to 6"),
    ([[2, 3]], "rank 0: its first document starts at position 2"),
    ([[0, 1], [0, 1], [3]], r"rank 2: its first document starts at position 3, but .* rank 1, ended at 2"),
])  # fmt: skip
def test_pieces_that_do_not_make_a_document_are_named(ranks: list[list[int]], words: str) -> None:
    with pytest.raises(CADDataError, match=words):
        assemble([segments_from_positions(own) for own in ranks])


def test_halves_that_touch_are_one_piece() -> None:
    pieces = Layout.from_stream([8], 2, 4, zigzag=True).segments.to_array()
    assert sorted(pieces.tolist()) == [[0, 0, 2, 0, 0], [0, 2, 6, 1, 0], [0, 6, 8, 0, 2]]


@settings(max_examples=100)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.integers(1, 6))
def test_zigzag_keeps_rows_and_evens_attention(lengths: list[int], ranks: int) -> None:
    width = max(1, -(-sum(lengths) // ranks))
    plain, zigzag = (Layout.from_stream(lengths, ranks, width, one) for one in (False, True))
    assert plain.documents == zigzag.documents
    for document in range(plain.documents):
        held = []
        for layout in (plain, zigzag):
            own = layout.segments.select(layout.segments.document == document)
            held.append(np.bincount(own.rank, own.end - own.begin, minlength=ranks))
        assert held[0].tolist() == held[1].tolist()
        parts = int((held[0] > 0).sum())
        pairs = np.bincount(own.rank, count_pairs(own.begin, own.end).astype(float), minlength=ranks)
        even = held[0] * (held[0].sum() + 1) / 2
        if parts > 1:
            assert (np.abs(pairs - even) <= held[0].sum()).all(), "but for odd numbers of rows"


@pytest.mark.parametrize("positions, mask, table", [
    ([[0, 1, 2, 0, 1]], None, [[0, 3, 0], [0, 2, 3]]),
    ([4, 5, 0], None, [[4, 6, 0], [0, 1, 2]]),
    ([[0.0, 1.0]], None, [[0, 2, 0]]),
    # A run behind padding is a document of its own, whatever it starts at; so is the first of a later batch row.
    ([[0, 0, 5, 6]], [[0, 0, 1, 1]], [[0, 2, 2]]),
    ([[0, 1], [0, 1]], None, [[0, 2, 0], [0, 2, 2]]),
    ([[0, 1], [2, 3]], None, [[0, 2, 0], [0, 2, 2]]),
    ([[0, 1, 2, 3]], [[1, 1, 0, 1]], [[0, 2, 0], [0, 1, 3]]),
    ([[-1, 0, 1]], [[0, 1, 1]], [[0, 2, 1]]),
    # A jump ahead is a piece of the same document, also of one that goes on from the rank before.
    ([[0, 1, 4, 5, 0]], None, [[0, 2, 0], [4, 6, 2], [0, 1, 4]]),
    ([[2, 7, 0, 1]], None, [[2, 3, 0], [7, 8, 1], [0, 2, 2]]),
    ([[3, 4]], [[0, 0]], []),
    (np.zeros((2, 0)), None, []),
])  # fmt: skip
def test_positions_become_segments(positions: Any, mask: Any, table: list) -> None:
    found = segments_from_positions(positions, mask)
    assert found.to_array().tolist() == table and found.tokens == np.asarray(positions).size


@pytest.mark.parametrize("positions, words", [
    (np.zeros((1, 2, 3), int), r"shape \(1, 2, 3\); expected \[batch, tokens\]"),
    ([[0.0, 1.0], [0.0, 1.5]], r"position_ids\[1, 1\] is 1.5 .*; positions must be whole"),
    ([[0.0, np.inf]], r"position_ids\[0, 1\] is inf .*; positions must be whole"),
    ([[0, 1], [-2, 0]], r"position_ids\[1, 0\] is -2; positions start at 0"),
    ([[3, 4, 2, 1]], r"position_ids\[0, 2\] is 2 after 4; inside a row"),
    ([[0, 1, 1]], r"position_ids\[0, 2\] is 1 after 1"),
])  # fmt: skip
def test_positions_that_mean_nothing_are_named(positions: Any, words: str) -> None:
    with pytest.raises(CADDataError, match=words):
        segments_from_positions(positions)


@pytest.mark.parametrize("lengths, shown", [
    ([], "[] must"), ([1, 4], "[1, 4] must"), ([0, 5, 4], "0, 5, 4"), ([0, 13], "12 tokens"),
    ([0, 1, 2, 3, 4, 5, 6, 7, 20], "6, 7]… must"),
])  # fmt: skip
def test_cumulative_lengths_that_mean_nothing_are_shown(lengths: list[int], shown: str) -> None:
    with pytest.raises(CADDataError, match=re.escape(shown)):
        segments_from_cumulative(lengths, 12)
