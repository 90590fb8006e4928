"""Layout: documents out of positions, masks and lengths, and the cut into two ticks, as properties."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import deepspeed_cad
from deepspeed_cad.cost import count_pairs
from deepspeed_cad.errors import CADDataError
from deepspeed_cad.layout import (
    Layout,
    LocalSegments,
    assemble,
    segments_from_cumulative,
    segments_from_positions,
)
from deepspeed_cad.planner.cut import choose_cut
from deepspeed_cad.stream import order_by_host, shard_stream

lengths = st.lists(st.integers(1, 40), max_size=12)


@given(lengths)
def test_positions_and_cumulative_lengths_agree(own: list[int]) -> None:
    positions = np.concatenate([np.arange(n) for n in own]) if own else np.zeros(0, np.int64)
    ends = np.concatenate([[0], np.cumsum(own)])
    total = int(ends[-1])
    assert segments_from_positions(positions).same_as(segments_from_cumulative(ends, total))


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
        assert (chunks.query.end <= size).all()


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


# Layout, by example: the tables themselves, and what is refused, with the place that the error names.


@pytest.mark.parametrize(
    ("at", "allowed"),
    [([10, 0], True), ([10, 5], True), ([9, 0], True), ([9, 1], False), ([5, 10], False), ([0, 0], True)],
)
def test_where_a_document_over_two_ranks_may_be_cut(at: list[int], allowed: bool) -> None:
    layout = Layout.from_stream([20], 2, 10)
    assert layout.can_cut(at) is allowed
    if not allowed:
        with pytest.raises(CADDataError, match="the second part that the first part reads"):
            layout.cut(at)


def test_ranks_are_joined_into_documents() -> None:
    local = [
        LocalSegments([0, 0], [4, 3], [0, 4], 7), LocalSegments.none(5), LocalSegments([3, 0], [9, 2], [1, 7], 9),
        LocalSegments([2], [4], [0], 2),
    ]  # fmt: skip
    layout = assemble(local)
    assert layout.segments.document.tolist() == [0, 1, 1, 2, 2]
    assert layout.segments.rank.tolist() == [0, 0, 2, 2, 3]
    assert layout.segments.offset.tolist() == [0, 4, 1, 7, 0]
    assert layout.tokens.tolist() == [7, 5, 9, 2] and layout.ranks == 4 and layout.documents == 3
    assert assemble([]).documents == 0
    with pytest.raises(
        CADDataError, match=r"rank 2: its first document starts at position 4, but .* rank 1, ended at 3"
    ):
        assemble([LocalSegments.none(1), LocalSegments([0], [3], [0], 3), LocalSegments([4], [6], [0], 2)])


def test_pieces_are_joined_into_documents() -> None:
    """A document in zigzag over three ranks, and one of its own at each end."""
    pieces = [[0, 1, 0, 1, 8, 9], [2, 3, 6, 7], [4, 5, 0]]
    layout = assemble([segments_from_positions(own) for own in pieces])
    assert layout.segments.to_array().tolist() == [
        [0, 0, 2, 0, 0], [1, 0, 2, 0, 2], [1, 8, 10, 0, 4], [1, 2, 4, 1, 0], [1, 6, 8, 1, 2], [1, 4, 6, 2, 0],
        [2, 0, 1, 2, 2],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (
            [[0, 1, 4, 5]],
            r"rank 0: at row 2 position_ids jump to 4 inside a document, but no rank holds .* from 2 to 4",
        ),
        ([[0, 1, 4, 5], [2, 3, 4, 5]], r"rank 0: at row 2 .*jump to 4 .* two ranks hold its rows from 4 to 6"),
        ([[0, 1, 6, 7], [2, 3], [0, 1]], r"no rank holds its rows from 4 to 6"),
        ([[0, 1, 6, 7], [3, 4, 5]], r"rank 1: its first document starts at position 3, but .* rank 0, ended at 2"),
        ([[0, 1], [0, 1], [3]], r"rank 2: its first document starts at position 3, but .* rank 1, ended at 2"),
    ],
)
def test_pieces_that_do_not_make_a_document_are_named(ranks: list[list[int]], words: str) -> None:
    with pytest.raises(CADDataError, match=words):
        assemble([segments_from_positions(own) for own in ranks])


@settings(max_examples=100, deadline=None)
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


@pytest.mark.parametrize(
    ("positions", "mask", "table"),
    [
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
    ],
)
def test_positions_become_segments(positions: Any, mask: Any, table: list) -> None:
    found = segments_from_positions(positions, mask)
    assert found.to_array().tolist() == table
    assert found.tokens == np.asarray(positions).size


@pytest.mark.parametrize(
    ("positions", "mask", "words"),
    [
        (np.zeros((1, 2, 3), int), None, r"shape \(1, 2, 3\); expected \[batch, tokens\]"),
        ([[0.0, 1.0], [0.0, 1.5]], None, r"position_ids\[1, 1\] is 1.5; positions must be whole"),
        ([[0.0, np.inf]], None, r"position_ids\[0, 1\] is inf; positions must be whole"),
        ([[0, 1], [-2, 0]], None, r"position_ids\[1, 0\] is -2; positions start at 0"),
        ([[3, 4, 2]], None, r"position_ids\[0, 2\] is 2 after 4; inside a row"),
        ([[0, 1, 1]], None, r"position_ids\[0, 2\] is 1 after 1"),
        ([[0, 1]], [[1, 1, 1]], r"mask has shape \(1, 3\) and position_ids \(1, 2\)"),
    ],
)
def test_positions_that_mean_nothing_are_named(positions: Any, mask: Any, words: str) -> None:
    with pytest.raises(CADDataError, match=words):
        segments_from_positions(positions, mask)


@pytest.mark.parametrize(
    ("lengths", "shown"),
    [([], r"\[\] must"), ([1, 4], r"\[1, 4\] must"), ([0, 5, 4], "0, 5, 4"), ([0, 13], "12 tokens"),
     ([0, 1, 2, 3, 4, 5, 6, 7, 20], "6, 7]… must"), ([0, 1, 2, 3, 4, 5, 6, 20], "6, 20] must")],
)  # fmt: skip
def test_cumulative_lengths_that_mean_nothing_are_shown(lengths: list[int], shown: str) -> None:
    with pytest.raises(CADDataError, match=shown.replace("]", r"\]") if "6" in shown else shown):
        segments_from_cumulative(lengths, 12)


def stream(tokens: int = 7) -> dict[str, Any]:
    """Documents of three tokens; the last may be shorter."""
    return {
        "input_ids": torch.arange(tokens)[None], "labels": torch.arange(100, 100 + tokens)[None],
        "position_ids": (torch.arange(tokens) % 3)[None], "features": torch.arange(2 * tokens).view(1, tokens, 2),
        "step": 5, "scale": torch.ones(3),
    }  # fmt: skip


@pytest.mark.parametrize("as_numpy", [False, True])
def test_a_stream_is_sharded_with_the_targets_of_the_whole(as_numpy: bool) -> None:
    whole = stream()
    if as_numpy:
        whole = {name: value.numpy() if hasattr(value, "numpy") else value for name, value in whole.items()}
    shards = [shard_stream(whole, rank, 3) for rank in range(3)]
    targets = [101, 102, -100, 104, 105, -100, -100]
    for rank, (low, high) in enumerate([(0, 3), (3, 6), (6, 7)]):
        shard = shards[rank]
        assert shard["input_ids"].tolist() == [list(range(low, high))]
        assert shard["labels"].tolist() == shard["shift_labels"].tolist() == [targets[low:high]]
        assert shard["features"].shape == (1, high - low, 2)
        assert shard["step"] == 5 and shard["scale"].tolist() == [1, 1, 1]
    assert whole["labels"].tolist() == [list(range(100, 107))], "the caller's labels stay as they are"
    assert deepspeed_cad.shard_stream is shard_stream
    last = shard_stream(whole, 3, 4)
    assert last["input_ids"].tolist() == [[6]] and shard_stream(stream(2), 3, 4)["input_ids"].shape == (1, 0)


@pytest.mark.parametrize(
    ("change", "rank", "words"),
    [
        ({}, 3, r"rank 3 of 3: ranks are 0 to 2"),
        ({}, -1, r"rank -1 of 3"),
        ({"position_ids": None}, 0, "needs position_ids"),
        ({"position_ids": torch.zeros(2, 7)}, 0, r"position_ids has shape \(2, 7\)"),
        ({"position_ids": torch.zeros(7)}, 0, r"position_ids has shape \(7,\)"),
        ({"labels": torch.zeros(1, 6)}, 0, r"labels has shape \(1, 6\), position_ids \(1, 7\)"),
        ({"features": torch.zeros(1, 6, 2)}, 0, r"features has shape \(1, 6, 2\); .* start with \(1, 7\)"),
    ],
)
def test_what_cannot_be_sharded_is_named(change: dict[str, Any], rank: int, words: str) -> None:
    batch = {name: value for name, value in (stream() | change).items() if value is not None}
    with pytest.raises(CADDataError, match=words):
        shard_stream(batch, rank, 3)


@pytest.mark.parametrize("as_numpy", [False, True])
def test_a_stream_is_dealt_out_in_zigzag(as_numpy: bool) -> None:
    """Targets are those of the stream, whatever rows stand beside each other."""
    positions = torch.cat([torch.arange(2), torch.arange(9), torch.arange(1)])[None]
    whole: dict[str, Any] = {
        "position_ids": positions, "input_ids": torch.arange(12)[None], "labels": torch.arange(12)[None],
    }  # fmt: skip
    if as_numpy:
        whole = {name: value.numpy() for name, value in whole.items()}
    shards = [shard_stream(whole, rank, 3, zigzag=True) for rank in range(3)]
    assert [one["position_ids"][0].tolist() for one in shards] == [[0, 1, 0, 8], [1, 2, 6, 7], [3, 4, 5, 0]]
    assert [one["input_ids"][0].tolist() for one in shards] == [[0, 1, 2, 10], [3, 4, 8, 9], [5, 6, 7, 11]]
    assert [one["labels"][0].tolist() for one in shards] == [[1, -100, 3, -100], [4, 5, 9, 10], [6, 7, 8, -100]]
    assert assemble([segments_from_positions(one["position_ids"]) for one in shards]).documents == 3


def test_documents_are_ordered_by_host() -> None:
    """Two hosts of two ranks, 8 tokens each: one document is longer than a host, the others fit."""
    order = order_by_host([3, 20, 8, 1], 4, 8, 2)
    assert order == [1, 2, 0, 3]
    # The longest go to different hosts, and no document lies on two.
    order = order_by_host([1, 15, 14, 2], 4, 8, 2)
    assert order == [1, 0, 2, 3]
    layout = Layout.from_stream([[1, 15, 14, 2][one] for one in order], 4, 8)
    assert all(len(set(layout.segments.rank[layout.segments.document == one] // 2)) == 1 for one in range(4))


@pytest.mark.parametrize(
    ("lengths", "per_host", "words"),
    [
        ([3], 0, "ranks_per_host is 0; expected 1 to 4"),
        ([3], 5, "is 5"),
        ([40], 2, "40 tokens do not fit into 4 ranks"),
    ],
)
def test_what_cannot_be_ordered_is_named(lengths: list[int], per_host: int, words: str) -> None:
    with pytest.raises(CADDataError, match=words):
        order_by_host(lengths, 4, 8, per_host)


def test_a_stream_that_begins_inside_a_document_is_not_dealt_out() -> None:
    batch = {"position_ids": torch.arange(3, 9)[None]}
    assert shard_stream(batch, 1, 2)["position_ids"].tolist() == [[6, 7, 8]]
    with pytest.raises(CADDataError, match="begins at position 3"):
        shard_stream(batch, 1, 2, zigzag=True)
