"""The assignment of documents piece by piece: what a swap is worth, how rows are dealt, which swap is taken."""

from __future__ import annotations

import numpy as np
import pytest
from test_steps import step_of, tokens_of

from deepspeed_cad.ahead import assign, swaps
from deepspeed_cad.ahead.assign import TOKENS_PER_ROW, assign_documents, is_worth
from deepspeed_cad.ahead.swaps import RowSums, find_swap
from deepspeed_cad.cost import PAIRS, CostModel, count_pairs


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
