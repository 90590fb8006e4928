"""Where a micro-batch is cut, in place and beside reserved servers: the time of both stretches of a layer."""

import numpy as np
import pytest

from deepspeed_cad.cost import PAIRS, CostModel
from deepspeed_cad.layout import Layout
from deepspeed_cad.planner.cut import LINEAR_PAIRS, PlanLayers, _at, choose_cut, choose_interleaved_cut

LONG = 65536
PAIR = CostModel(unit="seconds", pair=1e-12)
FULL = PlanLayers(PAIR, None, 8)


@pytest.mark.parametrize("ratio, servers, helpers, share", [
    (1.0, 1, 0, 0.618),  # max(1 - x, x²) + max(x, 1 - x²) is least at the golden ratio
    (2.0, 2, 0, 0.618),
    (0.5, 1, 0, 0.581),  # servers have time to spare, as much in both stretches: x² + 2x = 1.5
    (4.0, 1, 0, 0.675),  # servers never idle, and the trainer waits as long in both: 8x² + 2x = 5
    (2.0, 1, 1, 0.651),  # likewise, and the trainer serves a part of it: 4x² + 2x = 3
])  # fmt: skip
def test_one_long_document(ratio: float, servers: int, helpers: int, share: float) -> None:
    """`ratio`: attention over linear work."""
    layout = Layout.from_rank_lengths([[LONG], *[[]] * servers])
    linear = 8e-12 * (LONG + 1) / 2 / ratio  # for each token
    with np.errstate(all="raise"):  # servers have no tokens, and nothing is divided by these
        cut = choose_interleaved_cut(layout, np.ones(layout.ranks, np.int64), (FULL,), servers, linear, helpers)
    assert cut is not None and not cut[1:].any()
    found = cut[0] / LONG

    def time(x: float) -> float:
        own, served = np.array([1 - x, x]), ratio * np.array([x * x, 1 - x * x])
        return float(np.maximum(own, (helpers * own + served) / (servers + helpers)).sum())

    assert time(found) <= min(time(x) for x in np.linspace(0.25, 0.75, 2001)) * 1.004
    assert found == pytest.approx(share, abs=0.005)


@pytest.mark.parametrize("layout", [
    Layout.from_stream([400], 4, 100),  # spans ranks
    Layout.from_rank_lengths([[], []]),
])  # fmt: skip
def test_not_cut(layout: Layout) -> None:
    assert choose_interleaved_cut(layout, np.ones(layout.ranks, np.int64), (FULL,), 1, 1e-9, 0) is None


@pytest.mark.parametrize("row", [[65536], [61440] + [512] * 8, [512] * 8 + [61440], [512] * 128, [32768, 4096] * 2])
def test_nano_batches_have_equal_work(row: list[int]) -> None:
    """Attention and linear layers together; the middle where documents are short."""
    layout = Layout.from_rank_lengths([row, row[::-1]])
    at = choose_cut(layout, np.ones(2, np.int64))
    assert at is not None and at[0] == at[1]
    seg = layout.segments
    first = PAIRS.of(seg.begin, np.clip(at[seg.rank] - seg.offset, 0, seg.end)).sum() + LINEAR_PAIRS * at.sum()
    total = PAIRS.of(seg.begin, seg.end).sum() + LINEAR_PAIRS * layout.tokens.sum()
    assert abs(first / total - 0.5) < 0.015
    if max(row) == 512:
        assert at[0] == sum(row) // 2


@pytest.mark.parametrize("lengths, unit, cut", [
    ([[64, 64], [64, 64]], 1, [64, 64]),
    # Rounded to whole sequences where a batch has several, to 128 rows where there are many.
    ([[64] * 3, [64] * 3], 64, [128, 128]),
    ([[2048, 2048], [64, 64]], 1, [2048, 64]),
    ([[2000, 2000], [500, 500]], 1, [2048, 500]),
    ([[65536], [65536]], 1, [41984, 41984]),
    ([[65536]], 1, None),
    ([[], []], 1, None),
    ([[100], [100]], 100, None),
    ([[100], [100]], 80, [80, 80]),
    # Each part has a fifth of all tokens or more.
    ([[100], [100]], 81, None),
])  # fmt: skip
def test_where_a_micro_batch_is_cut(lengths: list[list[int]], unit: int, cut: list[int] | None) -> None:
    layout = Layout.from_rank_lengths(lengths)
    found = choose_cut(layout, np.full(layout.ranks, unit))
    assert (None if found is None else found.tolist()) == cut


def test_cuts_of_many_rows_alone_are_at_round_numbers() -> None:
    assert _at(0.5, np.array([7, 102, 2048, 3000]), np.ones(4, np.int64)).tolist() == [3, 51, 1024, 1536]
