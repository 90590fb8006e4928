"""Plans of documents that lie on many ranks, as the planner makes them, give what each document alone gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_ranks import DIM, GROUPS, HEADS, VALUE, Ranks

from deepspeed_cad.cost import PAIRS
from deepspeed_cad.kernels.interface import MaskRule
from deepspeed_cad.layout import Layout, Tick
from deepspeed_cad.planner import HeadShape, PlanInput
from deepspeed_cad.planner.core import Aim, solve, split_own_rows

LAYOUTS = {
    "two": Layout.from_stream([200], 2, 100),
    "three": Layout.from_stream([300], 3, 100),
    "four": Layout.from_stream([400], 4, 100),
    "three of four": Layout.from_stream([270, 33, 97], 4, 100),
    "two documents": Layout.from_stream([170, 230], 4, 100),
    "zigzag": Layout.from_stream([350], 4, 96, zigzag=True),
}
"""By where a document lies."""
SINKS = torch.linspace(-1, 2, HEADS, dtype=torch.float64)


def _tasks(tick: Tick, window: int | None, kept: int) -> np.ndarray:
    """From one of the planner's starts; −1: home."""
    problem = PlanInput(tick, HeadShape(HEADS, GROUPS, DIM, VALUE, 8), PAIRS, window, granularity=16)
    return split_own_rows(tick, solve(problem, Aim(0.05, kept=kept)).tasks, window, 16)


@pytest.mark.parametrize(
    "name, window, sinks, waves, kept",
    [
        ("two", 19, True, 1, -1),
        ("three", None, True, 1, 0),
        ("four", None, False, 2, 1),
        ("four", 250, True, 1, 0),
        ("four", 19, False, 2, -1),
        ("three of four", None, True, 2, 0),
        ("two documents", None, True, 1, 1),
        ("zigzag", None, True, 1, 0),
    ],
)
def test_exact(name: str, window: int | None, sinks: bool, waves: int, kept: int) -> None:
    """Dealt out by head groups, or begun at home with own rows split off where a window allows it."""
    tasks = _tasks(LAYOUTS[name].tick(), window, kept)
    if kept == 0 and name in ("three", "four", "zigzag"):
        assert (tasks[tasks[:, 5] == 0, 4] <= GROUPS - 1).all(), "not dealt out"
    rule = MaskRule(DIM**-0.5, window, 3.0)
    ranks = Ranks(LAYOUTS[name], rule, sinks=SINKS if sinks else None, tasks=[tasks], waves=waves)
    assert max(ranks.run().values()) < 1e-12
