"""What bytes of links weigh, and where a micro-batch is cut into two, by example."""

from __future__ import annotations

import numpy as np
import pytest
from test_planner import SHAPE

from deepspeed_cad.cost import PAIRS, CostModel
from deepspeed_cad.layout import Layout
from deepspeed_cad.planner import PlanInput
from deepspeed_cad.planner.core import link_weights
from deepspeed_cad.planner.cut import SMALLEST_SHARE, choose_cut


@pytest.mark.parametrize(
    ("nodes", "cost", "weights"),
    [
        (None, CostModel(byte_inside=1.0, byte_between=5.0), (1.0, 1.0)),
        (4, CostModel(byte_inside=1.0, byte_between=5.0), (1.0, 1.0)),
        (5, PAIRS, (1.0, 1.0)),
        (2, PAIRS, (1.0, 8.0)),
        (2, CostModel(byte_inside=2.0, byte_between=5.0), (1.0, 2.5)),
        (2, CostModel(byte_inside=5.0, byte_between=2.0), (1.0, 1.0)),
        (2, CostModel(byte_inside=2.0, byte_between=2.0), (1.0, 1.0)),
        (2, CostModel(byte_inside=2.0), (1.0, 8.0)),
        (2, CostModel(byte_between=2.0), (1.0, 1.0)),
    ],
)
def test_weights_of_links(nodes: int | None, cost: CostModel, weights: tuple[float, float]) -> None:
    tick = Layout.from_rank_lengths([[1]] * 4).tick()
    problem = PlanInput(tick, SHAPE, cost, hosts=None if nodes is None else np.arange(4) // nodes)
    assert link_weights(problem) == weights


@pytest.mark.parametrize(
    ("lengths", "unit", "cut"),
    [
        ([[64, 64], [64, 64]], 1, [64, 64]),
        # Rounded to whole sequences where a batch has several, to 128 rows where there are many.
        ([[64] * 3, [64] * 3], 64, [128, 128]),
        ([[2048, 2048], [64, 64]], 1, [2048, 64]),
        ([[2000, 2000], [500, 500]], 1, [2048, 500]),
        ([[65536], [65536]], 1, [41984, 41984]),
        ([[65536]], 1, None),
        ([[], []], 1, None),
        ([[100], [100]], 100, None),
    ],
)
def test_where_a_micro_batch_is_cut(lengths: list[list[int]], unit: int, cut: list[int] | None) -> None:
    layout = Layout.from_rank_lengths(lengths)
    found = choose_cut(layout, np.full(layout.ranks, unit))
    assert (None if found is None else found.tolist()) == cut
    if cut is not None:
        assert np.array_equal(choose_cut(layout, np.zeros(layout.ranks, np.int64) + unit), cut)


@pytest.mark.parametrize(
    ("lengths", "unit", "cut"),
    [
        ([100, 100], [80, 80], [80, 80]),
        ([100, 100], [81, 81], None),
        ([60, 40], [61, 1], [0, 30]),
        ([60, 22], [61, 1], None),
    ],
)
def test_a_part_that_is_too_small_is_not_cut_off(lengths: list[int], unit: list[int], cut: list[int] | None) -> None:
    """Each part has a fifth of all tokens or more, also where whole sequences leave no other choice."""
    found = choose_cut(Layout.from_rank_lengths([[length] for length in lengths]), np.array(unit))
    assert (None if found is None else found.tolist()) == cut
    assert cut is None or SMALLEST_SHARE <= sum(cut) / sum(lengths) <= 1 - SMALLEST_SHARE
