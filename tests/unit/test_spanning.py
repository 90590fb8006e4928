"""Documents that span ranks, in layers that carry state: where rows go, counted for all ranks."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed_cad.integrations.spanning import _Grouped
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_cad.attention.memory import NO_LIMIT, ExchangeMemory
from deepspeed_cad.attention.spanning import Spanning, _readable
from deepspeed_cad.errors import CADError
from deepspeed_cad.exchange.copies import dispatch_pushes, return_pushes
from deepspeed_cad.layout import Layout
from deepspeed_cad.schedule import GROUP, HOME, HOME_ROW, ROWS, SERVER, SERVER_ROW, Schedule
from deepspeed_cad.shares import choose_groups, divide

ROW_BYTES = 16


def _all_ranks(layout: Layout, memory: ExchangeMemory = NO_LIMIT) -> list[Spanning]:
    nobody: Any = None
    return [Spanning(layout, rank, nobody, 0, torch.device("cpu"), memory) for rank in range(layout.ranks)]


def _carry(schedules: list[Schedule], rows: list[np.ndarray]) -> list[np.ndarray]:
    """What lands at every rank, of [rows, groups] at home, by the tables that each rank has of its own; else -1."""
    landed = [np.full(int(one.served_rows[one.rank, 0]), -1) for one in schedules]
    for own in schedules:
        dispatch_pushes(own)
        return_pushes(own)
        coming = np.concatenate([one.sends[one.sends[:, SERVER] == own.rank] for one in schedules])
        assert (coming == own.receives).all()
        for one in np.concatenate([own.receives, own.own]):
            into = slice(one[SERVER_ROW], one[SERVER_ROW] + one[ROWS])
            assert (landed[own.rank][into] == -1).all(), "two rows land at one place"
            landed[own.rank][into] = rows[one[HOME]][one[HOME_ROW] : one[HOME_ROW] + one[ROWS], one[GROUP]]
    return landed


def _stream(lengths: list[int], ranks: int, zigzag: bool) -> Layout:
    return Layout.from_stream(lengths, ranks, -(-sum(lengths) // ranks), zigzag)


STREAMS = st.builds(_stream, st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(2, 5), st.booleans())
LIMITS = st.sampled_from([math.inf, 4000.0, 500.0])


@settings(max_examples=60)
@given(STREAMS, st.integers(1, 9), LIMITS)
def test_every_row_lands_once(layout: Layout, groups: int, limit: float) -> None:
    """Documents are whole and in order where their heads run; no more rows move than by an all-to-all by heads, and no
    more land at once than fit, where head groups can be parted so."""
    lengths = np.bincount(layout.segments.document, layout.segments.end - layout.segments.begin).astype(int)
    all_ranks = _all_ranks(layout, ExchangeMemory(limit, most=math.inf))
    heads = [one.heads(groups, ROW_BYTES) for one in all_ranks]
    names = np.concatenate([[0], np.cumsum(lengths)])  # of the first row of each document
    rows = []
    for rank, one in enumerate(all_ranks):
        local = layout.local(rank)
        document = np.repeat(layout.segments.document[layout.segments.rank == rank], local.end - local.begin)
        assert np.array_equal(one.rows, np.flatnonzero(np.bincount(layout.segments.document)[document] > 1))
        name = (names[document] + local.positions()[: len(document)])[one.rows]
        rows.append(name[:, None] + 1000 * np.arange(groups))
    moved, written = 0, [np.zeros_like(one) for one in rows]
    most = max((end - begin for waves in heads for wave in waves for _, begin, end in wave.shares), default=0)
    for waves in zip(*heads, strict=True):
        schedules = [one.schedule for one in waves]
        landed, home = _carry(schedules, rows), [0] * layout.ranks
        for found, wave in zip(landed, waves):
            at = 0
            for tokens, begin, end in wave.shares:
                part = found[at : at + (end - begin) * tokens].reshape(end - begin, tokens)
                expected = np.arange(tokens) + 1000 * np.arange(end - begin)[:, None]
                assert (part == part[0, 0] + expected).all() and part[0, 0] // 1000 == begin
                at += part.size
            assert at == len(found)
        for rank, own in enumerate(schedules):
            for one in np.concatenate([own.sends, own.own]):
                written[rank][one[HOME_ROW] : one[HOME_ROW] + one[ROWS], one[GROUP]] += 1
                home[rank] += int(one[ROWS])
            moved += int(own.sends[:, ROWS].sum())
        assert ROW_BYTES * max(map(sum, zip(map(len, landed), home))) <= limit or most <= 1
    assert all((one == 1).all() for one in written), "every row of every head group comes home once"
    documents, spread = layout.segments.count_ranks()
    by_heads = sum(lengths[d] * groups * (1 - 1 / k) for d, k in zip(documents, spread) if k > 1)
    assert moved <= by_heads + 1e-9


def test_what_does_not_fit_is_said_on_every_rank() -> None:
    heard: list[float] = []
    for one in _all_ranks(_stream([40], 2, False), ExchangeMemory(1000.0, source='the key "memory"')):
        # Two head groups of 40 rows land, and all four of the 20 rows at home; in halves one of 40, and two of 20.
        with pytest.raises(
            CADError, match=r'Mixer of layer 3: .* rank 0 needs 0.00122 .* the key "memory" allows 0.0009'
        ):
            one.heads(4, ROW_BYTES, "Mixer of layer 3")
        for limit, most, waves in ((2560, 0, 1), (2559, 0, 2), (1280, 0, 2), (1000, 1280, 2)):
            one._memory, one._heads = ExchangeMemory(limit, most=most, needed=heard.append), {}
            assert len(one.heads(4, ROW_BYTES)) == waves
        assert heard[-4:] == [2560, 1280, 1280, 1280]


@settings(max_examples=30)
@given(STREAMS, st.integers(1, 9))
def test_rows_before_pieces(layout: Layout, count: int) -> None:
    """Each row has the rows before it in its document in front of it, blank ones at its begin."""
    all_ranks = _all_ranks(layout)
    before = [one.before(count) for one in all_ranks]
    rows, sent = [], []
    for rank, one in enumerate(all_ranks):
        positions = layout.local(rank).positions()[one.rows]
        rows.append(positions)
        sent.append(positions[before[rank].sent.numpy()][:, None])
    came = _carry([one.exchange[0] for one in before], sent)
    back = _carry([one.exchange[1] for one in before], [one[:, None] for one in came])
    assert all((one[:, 0] == other).all() for one, other in zip(sent, back))
    for one, spanning, own, ahead in zip(before, all_ranks, rows, came):
        assert len(own) or (one.gots, spanning.pieces) == ([0], [(1, 0, True)])
        gots, sizes = (one.gots, [piece.size for piece in spanning.pieces]) if len(own) else ([], [])
        assert len(gots) == len(sizes) and (sum(gots), sum(sizes)) == (len(ahead), len(own))
        for got, piece, rows_before in zip(gots, np.split(own, np.cumsum(sizes)), np.split(ahead, np.cumsum(gots))):
            assert len(piece) and (np.diff(piece) == 1).all()
            assert got == min(count, piece[0])
            assert (rows_before == piece[0] - got + np.arange(got)).all()


@settings(max_examples=60)
@given(STREAMS)
def test_hops(layout: Layout) -> None:
    """Each piece but a document's first gets what the piece before it sends, once, and gradients go back."""
    all_ranks, came = _all_ranks(layout), [[] for _ in range(layout.ranks)]
    local = [layout.local(rank) for rank in range(layout.ranks)]
    assert len({one.longest for one in all_ranks}) == 1
    for place in range(all_ranks[0].longest):
        names = []
        for rank, one in enumerate(all_ranks):
            begin = np.cumsum([0, *(piece.size for piece in one.pieces)])
            mine = [(at, piece) for at, piece in zip(begin, one.pieces) if len(one.rows) and piece.place == place]
            first = [int(local[rank].positions()[one.rows[at]]) for at, _ in mine]
            assert np.array_equal(came[rank], first if place else []), "the end of the piece before"
            ends = [at + piece.size for at, (_, piece) in zip(first, mine) if not piece.is_last]
            names.append(np.array(ends, np.int64)[:, None])
        if place + 1 < all_ranks[0].longest:
            out, back = zip(*(one.hops[place] for one in all_ranks))
            came = _carry(out, names)
            back = _carry(back, [one[:, None] for one in came])
            assert all((one[:, 0] == other).all() for one, other in zip(names, back))


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("axes, shape", [
    ("BTHx", (1, 5, 4, 3)), ("BTH", (1, 5, 4)), ("BHT", (1, 4, 5)), ("BxT", (1, 3, 5)),
])  # fmt: skip
def test_heads_in_groups_and_back(axes: str, shape: tuple[int, ...], groups: int) -> None:
    """A group has the rows of its heads; a head that several groups need comes with each."""
    x, at = torch.arange(math.prod(shape)).view(shape), axes.find("H")
    parts = (one := _Grouped.of(x, axes)).by_group(groups)
    for group in range(groups):
        own = x if at < 0 else x.narrow(at, group * 4 // groups, max(4 // groups, 1))
        assert torch.equal(parts[:, group], (own[0] if axes[1] == "T" else own[0].T).flatten(1))
        assert torch.equal(one.ungroup(parts[:, group : group + 1], groups), own)


def test_rows_as_copies_read_them() -> None:
    """Narrow ones head group by head group, one behind the other; others as they are, where elements lie so."""
    wide = torch.arange(5 * 3 * 32, dtype=torch.float32).view(5, 3, 32)
    for x, strides in ((wide[..., :16], (96, 32, 1)), (wide[..., :15], (15, 75, 1)), (wide[..., ::2], (48, 16, 1))):
        assert torch.equal(_readable(x), x) and _readable(x).stride() == strides


def test_shares() -> None:
    """As many heads as rows, by the largest remainders; tensors with fewer heads are repeated where ranks are more."""
    assert divide(4, np.array([100, 0, 300])).tolist() == [1, 0, 3]
    assert divide(2, np.array([50, 50, 50])).tolist() == [1, 1, 0]
    assert choose_groups([16, 16, 32], 8) == 16
    assert choose_groups([48, 48, 1, 1], 5) == choose_groups([48, 48, 1, 1], 6) == 6
    assert choose_groups([4, 4], 8) == 4
    assert choose_groups([5, 3], 2) == 1, "heads that do not part run on one rank"
