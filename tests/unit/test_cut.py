"""Where a micro-batch is cut, in place and beside reserved servers: the time of both stretches of a layer."""

import zlib

import numpy as np
import pytest

from deepspeed_cad.cost import CostModel
from deepspeed_cad.layout import Layout
from deepspeed_cad.planner.cut import PlanLayers, choose_cut, choose_interleaved_cut

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


def test_cuts_change_on_purpose() -> None:
    """Where they do, so does the number: cuts in place and beside servers, of rows of every kind."""
    found, rng = [], np.random.default_rng(5)
    kinds = PlanLayers(PAIR, None, 8, 2), PlanLayers(CostModel(unit="seconds", pair=1e-12, row=1e-9), 64, 2)
    for seed in range(200):
        most = 1 << rng.integers(5, 17, 1 + seed % 5)
        layout = Layout.from_rank_lengths([rng.integers(1, one, rng.integers(0, 7)).tolist() for one in most])
        unit = rng.choice([0, 1, 16, 100], layout.ranks)
        linear = (None, 0.0, 1e-9, 1e-7)[seed % 4]
        cut = choose_interleaved_cut(
            layout, unit, kinds[seed % 3 :], float(rng.integers(1, 4)), linear, float(seed % 2)
        )
        found += [None if one is None else one.tolist() for one in (choose_cut(layout, unit), cut)]
    assert sum(one is not None for one in found) > 100 and zlib.crc32(repr(found).encode()) == 3389333805
