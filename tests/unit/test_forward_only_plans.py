"""Plans of forwards without backward: even in what a forward costs, not in what training does."""

from __future__ import annotations

import numpy as np
import pytest

from deepspeed_cad.cost import CostModel
from deepspeed_cad.layout import Layout
from deepspeed_cad.planner import make_plan
from deepspeed_cad.planner.constants import FORWARD_SHARE
from deepspeed_cad.planner.plan import HeadShape, PlanInput

SHAPE = HeadShape(32, 8, 128, 128, 2)
COST = CostModel("H200", "seconds", 2.5e-11, 4e-9, 6e-9, 1e-7, byte_inside=2 / 360e9)
"""Reading a key costs as much as 240 pairs, in backward only."""


def _rollouts(ranks: int, seed: int) -> Layout:
    """Of each rank: 24 answers of about 1000 tokens; the longest of all is 20 times the median."""
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.normal(np.log(1000), 0.9, (ranks, 24))).astype(int) + 16
    lengths = np.minimum(lengths, 20 * int(np.median(lengths)))
    lengths[rng.integers(ranks), 0] = 20 * int(np.median(lengths))
    return Layout.from_rank_lengths(lengths.tolist())


@pytest.mark.parametrize(("ranks", "seed"), [(2, 0), (4, 1), (8, 2)])
def test_rollouts_of_very_different_lengths_are_even(ranks: int, seed: int) -> None:
    tick = _rollouts(ranks, seed).tick()
    forward = COST.of_forward(FORWARD_SHARE)
    plan = make_plan(PlanInput(tick, SHAPE, forward, backward=False))
    assert plan.imbalance <= 1.05 < plan.imbalance_before
    # Counted again, task by task.
    begin, end, first, last, server = plan.tasks[:, 1:].T
    work = np.bincount(server, forward.of(begin, end) * (last - first), ranks)
    assert work.max() / work.mean() <= 1.05


def test_a_forward_costs_its_share_and_reads_keys_for_nothing() -> None:
    alone, both = COST.of_forward(0.25), COST
    assert alone.key == 0 and alone.pair == both.pair / 4 and alone.byte_inside == both.byte_inside
    assert alone.of(0, 1000) == pytest.approx(0.25 * (both.of(0, 1000) - both.key * 1000))


def test_transfers_of_a_backward_are_not_waited_for() -> None:
    """On slow links a rank waits for the forward's transfers, which are less than half of all."""
    tick = Layout.from_rank_lengths([[40000], [500] * 8]).tick()
    slow = CostModel("slow", "seconds", 2.5e-11, 4e-9, 6e-9, 1e-7, byte_inside=2 / 1e9)
    both = make_plan(PlanInput(tick, SHAPE, slow))
    alone = make_plan(PlanInput(tick, SHAPE, slow.of_forward(FORWARD_SHARE), backward=False))
    assert 0 < alone.finish.max() < 0.5 * both.finish.max()
