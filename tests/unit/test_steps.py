"""Order of micro-batches and assignment of documents: nothing lost, budgets kept, never worse, the same everywhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_cad.ahead import assign, swaps
from deepspeed_cad.ahead.assign import TOKENS_PER_ROW, Assignment, StepDocuments, assign_documents, is_worth, order_rows
from deepspeed_cad.ahead.swaps import RowSums, find_swap
from deepspeed_cad.cost import PAIRS, CostModel, count_pairs
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


@settings(max_examples=100, deadline=None)
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


# The assignment of documents piece by piece: what a swap is worth, how rows are dealt, which swap is taken.


@pytest.mark.parametrize(
    ("gain", "longest_work", "longest", "tokens", "worth"),
    [
        # The last of 100 rows has 2 × 5000 / 100 = 100 units of work, so 300 are three rows, or 192 tokens.
        (300.0, 5000.0, 100, 3 * TOKENS_PER_ROW, True),
        (300.0, 5000.0, 100, 3 * TOKENS_PER_ROW + 1, False),
        (299.0, 5000.0, 100, 3 * TOKENS_PER_ROW, False),
        (0.0, 5000.0, 100, 0, False),
        (-1.0, 5000.0, 100, 0, False),
        (1.0, 0.0, 0, 10**9, True),
    ],
)
def test_worth_its_tokens(gain: float, longest_work: float, longest: int, tokens: int, worth: bool) -> None:
    assert is_worth(gain, longest_work, longest, tokens) is worth


def test_work_is_whole_numbers_up_to_the_heaviest() -> None:
    step = step_of([[[10, 20]], [[40]]])
    expected = np.array([count_pairs(0, n) for n in (10, 20, 40)]) / count_pairs(0, 40) * 2.0**32
    assert step.work().tolist() == np.rint(expected).tolist()
    kinds = [(PAIRS, None), (CostModel(pair=0.0, row=100.0), 4)]
    both = np.array([count_pairs(0, n) + 100.0 * n for n in (10, 20, 40)])
    assert step.work(kinds).tolist() == np.rint(both / both[2] * 2.0**32).tolist()
    assert step_of([[[]], [[]]]).work().tolist() == []
    assert step.row_work(step.work()).tolist() == [[step.work()[:2].sum()], [step.work()[2]]]


def test_rows_are_dealt_heaviest_first_and_stay_at_home_where_they_can() -> None:
    """Two heavy rows on rank 0, two on rank 2: each micro-batch gets two of them and two light ones."""
    heavy, light = [4000], [40] * 100
    step = step_of([[heavy, heavy], [light, light], [heavy, heavy], [light, light]])
    got = assign_documents(step, step.work(), 0.05)
    assert got.tokens_moved == 4 * 4000
    assert got.imbalance_before == pytest.approx(2.0, rel=0.05) and got.imbalance == pytest.approx(1.0, rel=0.05)
    # In micro-batch 0 all four heavy rows are trained, one of them still on rank 0 and one on rank 2.
    assert got.source[:, 0].tolist() == [0, -1, 0, -1] and (got.source[[1, 3]] == np.array([-1, 1])).any()
    assert sorted(got.rank[step.length == 4000]) == [0, 1, 2, 3]
    assert (got.micro_batch[step.length == 4000] == 0).all()


def test_nothing_is_dealt_for_less_than_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_of([[[4000], [4000]], [[40] * 100, [40] * 100]])
    assert assign_documents(step, step.work(), 0.05).tokens_moved == 2 * 4000
    monkeypatch.setattr(assign, "TOKENS_PER_ROW", 0)
    assert assign_documents(step, step.work(), 0.05).tokens_moved == 0


def test_the_imbalance_is_that_of_all_micro_batches() -> None:
    """Nothing may move: the slowest rank has 100 in each of two micro-batches, and the mean rank 75."""
    step = step_of([[[10], [10]], [[5], [5]]], fixed=[[True, True], [True, True]])
    got = assign_documents(step, np.array([100.0, 100.0, 50.0, 50.0]), 0.05)
    assert got.imbalance == got.imbalance_before == pytest.approx(200 / 150)


def test_ranks_take_turns_among_rows_that_are_equal() -> None:
    """Rank 0 hands over its second heavy row, gets a light one when it is free, and ends with its own light one."""
    step = step_of([[[1000], [1000], [100]], [[100], [100], [100]]])
    got = assign_documents(step, step.work(), 0.05)
    assert got.rank.tolist() == [0, 1, 0, 1, 0, 1] and got.micro_batch.tolist() == [0, 0, 2, 1, 1, 2]
    assert got.source.tolist() == [[0, -1, 2], [-1, 0, 2]]


def test_rows_that_are_nearly_equal_stay_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the tolerance of each other, whatever their ids would cost; beyond it they are dealt."""
    monkeypatch.setattr(assign, "TOKENS_PER_ROW", 10**9)
    near = step_of([[[1000], [995]], [[990], [985]]])
    assert assign_documents(near, near.work(), 0.05).tokens_moved == 0
    far = step_of([[[1000], [900]], [[400], [300]]])
    got = assign_documents(far, far.work(), 0.05)
    assert got.tokens_moved == 900 + 300 and got.rank.tolist() == [0, 1, 1, 0]


def test_tokens_of_a_row_stay_within_the_longest() -> None:
    """The light row has room for 8 tokens more: 100 for 92 fits where 91 would not."""
    fits = step_of([[[100, 100, 8]], [[92, 100] + [1] * 8]])
    got = assign_documents(fits, np.array([1e9, 1e9, 1.0, 1e3, 1e3] + [1.0] * 8), 0.05)
    assert tokens_of(fits, got).max() <= 208


def test_the_fingerprint_is_of_every_place() -> None:
    step = step_of([[[3, 4]], [[5, 6]]])
    got = assign_documents(step, step.work(), 0.05)
    for name in ("rank", "micro_batch", "place"):
        changed = assign_documents(step, step.work(), 0.05)
        getattr(changed, name)[0] += 1
        assert changed.fingerprint() != got.fingerprint()
    assert 0 <= got.fingerprint() < 1 << 62


# Swaps

LENGTH = np.array([100, 60, 7, 5, 50, 30, 20, 10])
WORK = LENGTH.astype(float) ** 2


def swap(wanted: float, most: float, room: tuple[int, int], heavy: list[int] | None = None) -> swaps.Swap | None:
    """Heavy: 100, 60, 7, 5 tokens; light: 50, 30, 20, 10."""
    return find_swap(
        RowSums(heavy or [0, 1, 2, 3], LENGTH), RowSums([4, 5, 6, 7], LENGTH), LENGTH, WORK, wanted, most, room
    )


@pytest.mark.parametrize(
    ("wanted", "most", "room", "given", "taken"),
    [
        # 100 = 50 + 30 + 20; 60 = 30 + 20 + 10 with the short ones first, or 50 + 10.
        (6000.0, 1e9, (0, 0), [0], [4, 5, 6]),
        (2000.0, 1e9, (0, 0), [1], [5, 6, 7]),
        (6000.0, 6200.0, (0, 0), [1], [5, 6, 7]),
        (6000.0, 6200.1, (0, 0), [0], [4, 5, 6]),
        (6000.0, 2200.0, (0, 0), None, None),
        (6000.0, 2200.0, (1, 1), None, None),
    ],
)
def test_the_swap_nearest_to_what_is_wanted(
    wanted: float, most: float, room: tuple[int, int], given: list[int] | None, taken: list[int] | None
) -> None:
    found = swap(wanted, most, room)
    if given is None or taken is None:
        assert found is None
        return
    assert found is not None and found.given == given and sorted(found.taken) == taken
    assert found.work == WORK[given].sum() - WORK[taken].sum()
    assert found.tokens == LENGTH[given].sum() + LENGTH[taken].sum()


def test_companions_make_lengths_equal() -> None:
    """63 tokens are not to be had from 50, 30 and 20; 63 + 7 are."""
    length = np.array([63, 7, 50, 20, 31])
    found = find_swap(
        RowSums([0, 1], length), RowSums([2, 3, 4], length), length, length.astype(float) ** 2, 1e3, 1e9, (0, 0)
    )
    assert found is not None and found.given == [0, 1] and sorted(found.taken) == [2, 3]


@pytest.mark.parametrize(
    ("room", "tokens"),
    [((0, 0), None), ((1, 0), None), ((1, 2), None), ((2, 0), 102), ((1, 3), 97), ((0, 3), 97), ((2, 3), 102),
     ((39, 40), 102), ((-1, 3), 97), ((9, -1), None)],
)  # fmt: skip
def test_the_nearest_length_that_fits(room: tuple[int, int], tokens: int | None) -> None:
    """For 100 tokens there are sums of 79, 97, 102 and 139; the heavy row may grow by room[0], the light by room[1]."""
    length = np.array([100, 60, 37, 42])
    work = np.array([9.0, 1.0, 1.0, 1.0])
    found = find_swap(RowSums([0], length), RowSums([1, 2, 3], length), length, work, 8.0, 9.0, room)
    assert (None if found is None else length[found.taken].sum()) == tokens


def test_row_sums() -> None:
    sums = RowSums([4, 0, 7, 5], np.array([9, 0, 0, 0, 3, 3, 0, 0]))
    assert sums.documents == [4, 5, 0] and sums.length == [3, 3, 9]
    assert [sums.shorter(tokens, 9) for tokens in (3, 4, 9, 10)] == [0, 2, 2, 3] and sums.shorter(10, 1) == 1
    assert [bin(sums.bits(first)) for first in (0, 1, 2, 3)] == ["0b1", "0b1001", "0b1001001", "0b1001001001001001"]
    assert sums.subset(3, 15) == [0, 5, 4] and sums.subset(3, 9) == [0]
    assert sums.subset(2, 3) == [4] and sums.subset(3, 0) == []
