"""Layout: documents out of positions, masks and lengths, and the cut into two ticks, as properties."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_cad.errors import CADDataError
from deepspeed_cad.layout import Layout, segments_from_cumulative, segments_from_positions
from deepspeed_cad.planner.cut import choose_cut

lengths = st.lists(st.integers(1, 40), max_size=12)


@given(lengths)
def test_positions_and_cumulative_lengths_agree(own: list[int]) -> None:
    positions = np.concatenate([np.arange(n) for n in own]) if own else np.zeros(0, np.int64)
    ends = np.concatenate([[0], np.cumsum(own)])
    total = int(ends[-1])
    assert segments_from_positions(positions).same_as(segments_from_cumulative(ends, total))


@given(st.lists(lengths, min_size=1, max_size=5))
def test_rank_lengths_cover_every_row_once(ranks: list[list[int]]) -> None:
    layout = Layout.from_rank_lengths(ranks)
    assert layout.documents == sum(map(len, ranks))
    for rank, own in enumerate(ranks):
        rows = np.zeros(sum(own), int)
        seg = layout.segments.select(layout.segments.rank == rank)
        for begin, end, offset in zip(seg.begin, seg.end, seg.offset, strict=True):
            rows[offset : offset + end - begin] += 1
        assert (rows == 1).all()


@given(lengths, st.integers(1, 5), st.integers(1, 60))
def test_a_stream_joins_again_at_rank_borders(own: list[int], ranks: int, per_rank: int) -> None:
    if sum(own) > ranks * per_rank:
        with pytest.raises(CADDataError, match="do not fit"):
            Layout.from_stream(own, ranks, per_rank)
        return
    layout = Layout.from_stream(own, ranks, per_rank)
    assert layout.documents == len(own)
    found = np.zeros(len(own), np.int64)
    np.add.at(found, layout.segments.document, layout.segments.end - layout.segments.begin)
    assert found.tolist() == own


@given(lengths, st.integers(2, 5), st.integers(8, 60), st.randoms())
def test_a_cut_reads_no_key_behind_it(own: list[int], ranks: int, per_rank: int, rng: object) -> None:
    own = own[: ranks * per_rank // 40]
    layout = Layout.from_stream(own, ranks, per_rank)
    at = np.array([rng.randint(0, per_rank) for _ in range(ranks)])  # type: ignore[attr-defined]
    if not layout.can_cut(at):
        with pytest.raises(CADDataError, match="reads"):
            layout.cut(at)
        return
    first, second = layout.cut(at)
    rows = {(d, p) for t in (first, second) for d, b, e, *_ in t.query.to_array() for p in range(b, e)}
    assert len(rows) == sum(own)
    for tick in (first, second):
        keys = {(d, p): (r, o + p - b) for d, b, e, r, o in tick.key.to_array() for p in range(b, e)}
        for d, b, e, r, o in tick.query.to_array():
            assert 0 <= o and o + e - b <= tick.query_tokens[r]
            assert all((d, p) in keys for p in range(e))
        for rank, row in keys.values():
            assert 0 <= row < tick.key_tokens[rank]


@settings(max_examples=50, deadline=None)
@given(st.lists(lengths, min_size=2, max_size=5))
def test_the_chosen_cut_is_allowed(ranks: list[list[int]]) -> None:
    layout = Layout.from_rank_lengths(ranks)
    at = choose_cut(layout, np.ones(len(ranks), np.int64))
    if at is not None:
        assert layout.can_cut(at)
        assert ((at >= 0) & (at <= layout.tokens)).all()


def test_documents_that_span_ranks_are_not_cut() -> None:
    assert choose_cut(Layout.from_stream([400], 4, 100), np.ones(4, np.int64)) is None
    assert choose_cut(Layout.from_rank_lengths([[90], [4]]), np.ones(2, np.int64)).tolist() == [45, 2]
