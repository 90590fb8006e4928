"""Order of micro-batches and assignment of documents: nothing lost, budgets kept, never worse, the same everywhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_cad.ahead.assign import Assignment, StepDocuments, assign_documents, order_rows
from deepspeed_cad.cost import PAIRS
from deepspeed_cad.layout import Layout
from deepspeed_cad.planner.cut import LINEAR_PAIRS, choose_cut


def step_of(lengths: list[list[list[int]]], fixed: list[list[bool]] | None = None) -> StepDocuments:
    """lengths[rank][micro-batch]: documents."""
    flat = [(r, m, n) for r, rows in enumerate(lengths) for m, row in enumerate(rows) for n in row]
    columns = np.array(flat, np.int64).reshape(-1, 3)
    tokens = np.array([[sum(row) for row in rows] for rows in lengths], np.int64)
    frozen = np.zeros(tokens.shape, bool) if fixed is None else np.array(fixed)
    return StepDocuments(columns[:, 0], columns[:, 1], columns[:, 0] * 0, columns[:, 2], tokens, frozen)


def total_of_slowest(step: StepDocuments, work: np.ndarray, rank: np.ndarray, micro_batch: np.ndarray) -> float:
    load = np.zeros(step.tokens.shape)
    np.add.at(load, (rank, micro_batch), work)
    return float(load.max(axis=0).sum())


def tokens_of(step: StepDocuments, assignment: Assignment) -> np.ndarray:
    tokens = np.zeros(step.tokens.shape, np.int64)
    np.add.at(tokens, (assignment.rank, assignment.micro_batch), step.length)
    return tokens


@st.composite
def steps(draw: st.DrawFn) -> StepDocuments:
    ranks, micro_batches = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    full = draw(st.booleans())
    rows = []
    for _ in range(ranks * micro_batches):
        row = draw(st.lists(st.integers(1, 90) | st.integers(1, 8), max_size=12))
        if full:
            while sum(row) > 100:
                row.pop()
            row += [100 - sum(row)] if sum(row) < 100 else []
        rows.append(row)
    frozen = draw(st.lists(st.booleans(), min_size=ranks, max_size=ranks)) if draw(st.booleans()) else [False] * ranks
    return step_of(
        [rows[r * micro_batches : (r + 1) * micro_batches] for r in range(ranks)],
        [[one] * micro_batches for one in frozen],
    )


@settings(max_examples=300, deadline=None)
@given(steps())
def test_assignment(step: StepDocuments) -> None:
    work = step.work()
    got = assign_documents(step, work, 0.05)
    again = assign_documents(step, work, 0.05)
    assert got.fingerprint() == again.fingerprint()
    # Every document has one place, and the places of a row are 0, 1, 2 …
    for rank in range(step.ranks):
        for micro_batch in range(step.micro_batches):
            here = (got.rank == rank) & (got.micro_batch == micro_batch)
            assert sorted(got.place[here]) == list(range(here.sum()))
            source = got.source[rank, micro_batch]
            if source >= 0:
                assert set(np.flatnonzero(here)) == set(
                    np.flatnonzero((step.rank == rank) & (step.micro_batch == source))
                )
    tokens = tokens_of(step, got)
    assert tokens.sum() == step.tokens.sum() and tokens.max(initial=0) <= step.tokens.max(initial=0)
    if (step.tokens == step.tokens.max(initial=0)).all():
        assert (tokens == step.tokens).all()
    stays = step.fixed[step.rank, step.micro_batch] if len(work) else np.zeros(0, bool)
    assert (got.rank[stays] == step.rank[stays]).all()
    frozen = step.fixed.any(axis=1)
    assert not frozen[got.rank[got.rank != step.rank]].any()
    # Never worse than ordering, which is never worse than the order of the loader.
    order = order_rows(step, work)
    place = np.argsort(order, axis=1)
    ordered = total_of_slowest(step, work, step.rank, place[step.rank, step.micro_batch])
    plain = total_of_slowest(step, work, step.rank, step.micro_batch)
    exchanged = total_of_slowest(step, work, got.rank, got.micro_batch)
    assert exchanged <= ordered <= plain
    assert got.tokens_moved == step.length[got.rank != step.rank].sum()


def test_rank_0_keeps_its_order_and_the_others_follow_it() -> None:
    """The heaviest micro-batches of all ranks at the same time, equal ones in the order of their loader."""
    step = step_of([[[10], [5, 5], [20], [5, 5]], [[30], [4], [7], [4]]])
    assert order_rows(step, step.work()).tolist() == [[0, 1, 2, 3], [2, 1, 0, 3]]


def test_documents_that_span_ranks_stay_where_they_are() -> None:
    step = step_of([[[10], [100]], [[90, 10], [20]]])
    begin = step.begin.copy()
    begin[3] = 20
    spanning = StepDocuments(step.rank, step.micro_batch, begin, step.end + begin, step.tokens, step.fixed)
    work = spanning.work()
    assert order_rows(spanning, work).tolist() == [[0, 1], [0, 1]]
    got = assign_documents(spanning, work, 0.05)
    assert got.tokens_moved == 0 and got.source.tolist() == [[0, 1], [0, 1]]


def test_rows_change_ranks_where_one_rank_drew_all_the_long_ones() -> None:
    long, short = [[4000]] * 4, [[40] * 100] * 4
    step = step_of([long, short, short, short])
    got = assign_documents(step, step.work(), 0.05)
    assert got.imbalance_before > 3.5 and got.imbalance < 1.1
    assert got.tokens_moved == 2 * 3 * 4000
    assert (tokens_of(step, got) == 4000).all()


def test_windows_and_costs_decide() -> None:
    """Where every layer has a short window, a long document costs as much as its tokens: nothing is worth moving."""
    step = step_of([[[3000, 3000, 2000, 192]], [[64] * 128]])
    assert assign_documents(step, step.work([(PAIRS, 8)]), 0.1).tokens_moved == 0


@pytest.mark.parametrize("row", [[65536], [61440] + [512] * 8, [512] * 8 + [61440], [512] * 128, [32768, 4096] * 2])
def test_nano_batches_have_equal_work(row: list[int]) -> None:
    """Attention and linear layers together; the middle where documents are short."""
    layout = Layout.from_rank_lengths([row, row[::-1]])
    at = choose_cut(layout, np.ones(2, np.int64))
    assert at is not None and at[0] == at[1]
    seg = layout.segments
    rows = np.clip(at[seg.rank] - seg.offset, 0, seg.end)
    first = PAIRS.of(seg.begin, rows).sum() + LINEAR_PAIRS * at.sum()
    total = PAIRS.of(seg.begin, seg.end).sum() + LINEAR_PAIRS * layout.tokens.sum()
    assert abs(first / total - 0.5) < 0.015
    if max(row) == 512:
        assert at[0] == sum(row) // 2
