"""Documents dealt out to ranks: nothing lost, no row too long, never later, as even as it can be; order of rows."""

import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_cad.cost import PAIRS
from deepspeed_cad.layout import LocalSegments, assemble
from deepspeed_cad.planner.deal import Costs, Dealt, Step, _fill, deal, order_rows

EACH = 20.0
"""Pairs that a token costs outside attention: documents of 40 tokens have as much in it as outside."""


def step_of(lengths: list[list[list[int]]], padded: bool = False) -> Step:
    """lengths[rank][micro-batch]: documents, or samples of a padded batch."""
    flat = [(r, m, n) for r, rows in enumerate(lengths) for m, row in enumerate(rows) for n in row]
    columns = np.array(flat, np.int64).reshape(-1, 3)
    tokens = [[max(row, default=0) * len(row) if padded else sum(row) for row in rows] for rows in lengths]
    return Step(columns[:, 0], columns[:, 1], columns[:, 2], np.array(tokens, np.int64), padded)


def costs_of(step: Step, attention: float = 1.0) -> Costs:
    ranks = len(step.tokens)
    return Costs(attention * PAIRS.of(0 * step.length, step.length), np.full(ranks, EACH), np.ones(ranks))


def check(step: Step, costs: Costs, dealt: Dealt) -> None:
    """Each token lies once and in a row that is not longer than the longest, and none waits longer than before."""
    ranks, micro_batches = step.tokens.shape
    held = np.zeros((ranks, micro_batches), np.int64)
    pieces, lengths = dealt.pieces, []
    for micro_batch in range(micro_batches):
        rows, copies = [], 0
        for rank in range(ranks):
            mine = pieces.order[((pieces.rank == rank) & (pieces.micro_batch == micro_batch))[pieces.order]]
            assert len(mine), "every rank keeps a document in every micro-batch"
            begin, end = pieces.begin[mine], pieces.end[mine]
            held[rank, micro_batch] = end.max() * len(mine) if step.padded else (end - begin).sum()
            if end[-1] < step.length[pieces.document[mine[-1]]]:
                # A copy of the token that comes next, for its label.
                begin, end, copies = np.append(begin, 0), np.append(end, 1), copies + 1
                assert held[rank, micro_batch] < step.tokens.max()
            assert step.padded or (begin[1:] == 0).all()
            offset = np.cumsum(end - begin) - (end - begin)
            rows.append(LocalSegments(begin, end, offset, int((end - begin).sum())))
        found = assemble(rows).segments
        ends = np.zeros(int(found.document.max()) + 1, np.int64)
        np.maximum.at(ends, found.document, found.end)
        ends = np.sort(ends)
        assert (ends[:copies] == 1).all()
        lengths += ends[copies:].tolist()
    assert sorted(lengths) == sorted(step.length.tolist())
    assert np.array_equal(held, dealt.tokens) and held.max() <= step.tokens.max()
    assert dealt.after <= dealt.before
    least = max(
        (held * costs.each[:, None]).max(axis=0).sum(), ((held * costs.each[:, None]).sum() + costs.work.sum()) / ranks
    )
    assert dealt.after >= least * (1 - 1e-9)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    ranks, micro_batches, padded = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.booleans())
    rows = [
        draw(st.lists((st.integers(1, 8) | st.integers(1, 90)), min_size=0 if draw(st.booleans()) else 1, max_size=9))
        for _ in range(ranks * micro_batches)
    ]
    return step_of([rows[r * micro_batches : (r + 1) * micro_batches] for r in range(ranks)], padded)


@settings(max_examples=200)
@given(
    steps(), st.sampled_from([0.0, 1.0, 30.0]), st.sampled_from([None, [0, 0, 1, 1, 1], [0, 1, 0, 1, 0]]),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_what_is_dealt_holds_each_token_once(step: Step, attention: float, hosts: Any, slow: bool, cuts: bool) -> None:
    costs = costs_of(step, attention)
    if slow:
        costs = Costs(costs.work, costs.each * np.linspace(1.0, 2.0, len(costs.each)), costs.speed)
    host = None if hosts is None else np.array(hosts[: len(step.tokens)])
    dealt = deal(step, costs, 0.05, host, cuts)
    if dealt is not None:
        check(step, costs, dealt)


def test_deals_change_on_purpose() -> None:
    """Where they do, so does the number: 300 steps of every kind, unequal hosts, slow ranks, cuts."""
    found, rng = [], np.random.default_rng(3)
    for seed in range(300):
        ranks, micro_batches, most = int(rng.integers(2, 7)), int(rng.integers(1, 4)), int(rng.choice([30, 400]))
        rows = rng.integers(1, most, (ranks, micro_batches, int(rng.integers(1, 9))))
        rows //= rng.integers(1, 9, (ranks, 1, 1))
        few = [[row[: rng.integers(1, 1 + len(row))] for row in of] if seed % 2 else of for of in (rows + 1).tolist()]
        step = step_of(few, padded=seed % 5 == 0)
        costs = costs_of(step, float(rng.choice([0.0, 0.5, 32.0])))
        if seed % 3 == 0:
            costs = Costs(costs.work, costs.each * (1 + np.arange(ranks) / 4), costs.speed)
        hosts = None if seed % 4 == 0 else np.arange(ranks) // 4
        dealt = deal(step, costs, 0.05, hosts, cuts=seed % 4 < 2)
        found.append(None if dealt is None else dealt.fingerprint())
    assert 100 < sum(one is not None for one in found) and zlib.crc32(repr(found).encode()) == 3103883028


def lengths_of(ranks: int, micro_batches: int, documents: int, seed: int) -> list[list[list[int]]]:
    rng = np.random.default_rng(seed)
    return np.minimum(rng.lognormal(3.0, 1.0, (ranks, micro_batches, documents)).astype(int) + 1, 400).tolist()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(8, 1), (4, 3)])
def test_ranks_with_many_documents_are_even(ranks: int, micro_batches: int, padded: bool) -> None:
    """16 documents a rank: where none is longer than a rank's share, all rows take as long."""
    for seed in range(5):
        step = step_of(lengths_of(ranks, micro_batches, 16, seed), padded)
        costs = costs_of(step, 0.02)
        dealt = deal(step, costs, 0.05)
        check(step, costs, dealt)
        if not padded:
            # Each with its own attention.
            alone = dealt.tokens * EACH
            np.add.at(alone, (dealt.pieces.rank, dealt.pieces.micro_batch), costs.work)
            assert alone.max(axis=0).sum() < 1.02 * alone.mean(axis=0).sum()
        else:
            assert dealt.tokens.sum() < 0.6 * step.tokens.sum(), "similar lengths meet, and padding falls"
        assert dealt.after < (0.6 if padded else 0.99) * dealt.before


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("hosts", [None, np.arange(8) // 4])
def test_documents_are_cut_where_they_are_longer_than_a_share(hosts: np.ndarray | None, micro_batches: int) -> None:
    """One document a rank: no dealing makes such ranks even, a cut does. On hosts as far as none has more to do."""
    for seed, in_hosts in ((3, False), (6, True)):  # the first has a document that is more than a host's share
        step = step_of(lengths_of(8, micro_batches, 1, seed))
        costs = costs_of(step, 0.1)
        whole, dealt = deal(step, costs, 0.05, hosts), deal(step, costs, 0.05, hosts, cuts=True)
        assert dealt is not None and dealt.after < 0.8 * (dealt.before if whole is None else whole.after)
        check(step, costs, dealt)
        if hosts is None:
            assert (dealt.tokens.max(axis=0) <= dealt.tokens.mean(axis=0) + 2).all()
        else:
            pieces = np.unique(np.stack([dealt.pieces.document, hosts[dealt.pieces.rank]]), axis=1)
            assert (len(pieces[0]) == len(step.length)) == in_hosts


@pytest.mark.parametrize("lengths, shares, most, pieces", [
    ([10], [1.0, 1.0], 5, [(0, 0, 5, 0), (0, 5, 10, 1)]),
    ([10], [1.0], 5, None),  # no row for the rest of it
    ([3, 9], [1.0, 1.0], 9, [(0, 0, 3, 0), (1, 0, 3, 0), (1, 3, 9, 1)]),
    ([3, 9], [1.0, 2.0], 9, [(0, 0, 3, 0), (1, 0, 9, 1)]),  # not cut behind its first token
    ([1], [1.0, 1.0], 5, None),  # nothing for the second row
])  # fmt: skip
def test_rows_are_filled_by_their_shares(lengths: list, shares: list, most: int, pieces: list | None) -> None:
    assert _fill(lengths, shares, most) == pieces


def test_hosts_are_even_first() -> None:
    """A long document makes its rank late: its host gets less else, so that attention moves inside the host."""
    step, host = step_of([[[200]], [[20] * 10], [[20] * 10], [[20] * 60]]), np.array([0, 0, 1, 1])
    costs = costs_of(step)
    dealt = [deal(step, costs, 0.05, hosts) for hosts in (None, host)]
    loads = [np.bincount(host[one.pieces.rank], costs.work + step.length * EACH, 2) for one in dealt]
    apart, together = (load.max() / load.mean() for load in loads)
    assert together < apart - 0.02


def test_rank_0_keeps_its_order_and_the_others_follow_it() -> None:
    """The heaviest micro-batches of all ranks at the same time, equal ones in the order of their loader."""
    step = step_of([[[10], [5, 5], [20], [5, 5]], [[30], [4], [7], [4]]])
    assert order_rows(step.sums(costs_of(step).work)).tolist() == [[0, 1, 2, 3], [2, 1, 0, 3]]
