"""Costs: pairs counted one by one, and each term of a task's cost by itself."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_cad.cost import PAIRS, TILE, CostModel, count_pairs, window_start

TERMS = CostModel("one of each", "seconds", pair=1.0, row=1e3, key=1e6, task=1e9)


@settings(deadline=None)
@given(st.integers(0, 50), st.integers(0, 50), st.one_of(st.none(), st.integers(1, 60)))
def test_terms_as_counted_one_by_one(begin: int, rows: int, window: int | None) -> None:
    reads = [
        [key for key in range(row + 1) if window is None or key > row - window] for row in range(begin, begin + rows)
    ]
    pairs, start = sum(map(len, reads)), int(window_start(begin, window))
    assert count_pairs(begin, begin + rows, window) == pairs
    expected = pairs + 1e3 * rows + 1e6 * (begin + rows - start) + 1e9 if rows else 0.0
    assert TERMS.of(begin, begin + rows, window) == expected
    assert PAIRS.of(begin, begin + rows, window) == pairs
    if rows:
        assert reads[0][0] - TILE < start <= reads[0][0]


def test_keys_begin_at_a_whole_tile() -> None:
    """A row then has the same bits as in its whole document; real windows are multiples of a tile: one key more."""
    rows = np.array([0, 64, 512, 4096, 4097])
    assert window_start(rows, 512).tolist() == [0, 0, 0, 3584, 3584]
    assert window_start(rows, 100).tolist() == [0, 0, 384, 3968, 3968]
    assert not window_start(rows, None).any()
