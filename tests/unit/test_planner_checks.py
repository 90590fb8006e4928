"""Checks of the planner's input and output: what is just allowed, what is just not, and what the error says."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from plan_checks import check_coverage, check_cuts

from deepspeed_cad.cost import PAIRS, CostModel
from deepspeed_cad.errors import CADConfigError
from deepspeed_cad.layout import Layout, Segments, Tick
from deepspeed_cad.planner import HeadShape, PlanInput
from deepspeed_cad.planner.checks import check_input

SHAPE = HeadShape(8, 4, 16, 16, 2)
LAYOUT = Layout.from_rank_lengths([[10, 20], [30]])
GOOD = PlanInput(LAYOUT.tick(), SHAPE, PAIRS)


def tick_of(*segments: tuple[int, int, int, int], ranks: int = 2, key: bool = False) -> Tick:
    """(document, begin, end, rank) of each segment; those of queries, or of keys."""
    columns = np.array(segments, np.int64).reshape(-1, 4).T
    changed = Segments(*columns, columns[0] * 0)
    return dataclasses.replace(LAYOUT.tick(), ranks=ranks, **({"key": changed} if key else {"query": changed}))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"tolerance": 0.0},
        {"tolerance": 0.999},
        {"granularity": 1},
        {"window": 1},
        {"window": None},
        {"hosts": np.array([-7, 3])},
        {"speed": np.array([0.0, 0.1])},
        {"base_load": np.array([0.0, 0.0])},
        {"shape": HeadShape(1, 1, 1, 1, 1)},
        {"cost": CostModel(pair=0.0)},
        {"tick": tick_of((0, 0, 10, 0), (0, 10, 20, 1), (1, 5, 5, 0))},
        {"tick": tick_of((0, 0, (1 << 31) - 1, 0))},
        {"tick": Layout.from_rank_lengths([[]]).tick(), "speed": np.zeros(1)},
    ],
)
def test_what_is_just_allowed(change: dict[str, Any]) -> None:
    check_input(dataclasses.replace(GOOD, **change))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tick": Layout.from_rank_lengths([]).tick()}, "at least one rank, found 0"),
        ({"tolerance": 1.0}, "tolerance is 1.0"),
        ({"tolerance": float("nan")}, "tolerance is nan"),
        ({"granularity": 0}, "granularity is 0"),
        ({"window": 0}, "window is 0"),
        ({"hosts": np.array([0])}, r"hosts has shape \(1,\) and dtype int64; it needs .* for each of the 2 ranks"),
        ({"hosts": np.array([0.0, 1.0])}, "dtype float64"),
        ({"shape": HeadShape(6, 4, 8, 8, 2)}, "6 query heads cannot be shared by 4 KV heads"),
        ({"shape": HeadShape(0, 1, 8, 8, 2)}, "0 query heads"),
        ({"shape": HeadShape(4, 4, 0, 8, 2)}, "head_dim 0"),
        ({"shape": HeadShape(4, 4, 8, 0, 2)}, "value_dim 0"),
        ({"shape": HeadShape(4, 4, 8, 8, 0)}, "bytes_per_element 0"),
        ({"speed": np.array([1.0])}, r"speed has shape \(1,\); it needs one number for each of the 2 ranks"),
        ({"speed": np.array([1.0, -1.0])}, "speed of rank 1 is -1.0"),
        ({"speed": np.array([0.0, 0.0])}, "speed is 0 on every rank"),
        ({"base_load": np.array([0.0, np.inf])}, "base_load of rank 1 is inf"),
        *[({"cost": dataclasses.replace(PAIRS, **{name: wrong})}, f"cost.{name} is {wrong}")
          for name in ("pair", "row", "key", "task", "byte_inside", "byte_between") for wrong in (-1.0, float("inf"))],
        ({"tick": tick_of((0, 0, 5, 2))}, "a query segment lies on rank 2 of a tick with 2 ranks"),
        ({"tick": tick_of((0, 0, 5, -1), (1, 0, 5, 1), key=True)}, "a key segment lies on rank -1"),
        ({"tick": tick_of((0, 0, 5, 0), (1, 6, 5, 0))}, r"query segment 1 is \[6, 5\)"),
        ({"tick": tick_of((0, -1, 5, 0))}, r"query segment 0 is \[-1, 5\)"),
        ({"tick": tick_of((0, 0, 1 << 31, 0))}, "2147483648 tokens is longer"),
        ({"tick": tick_of((3, 4, 10, 1), (3, 0, 5, 0), (1, 0, 9, 0), key=True)},
         r"two key segments hold the same rows of document 3: \[0, 5\) on rank 0 and \[4, 10\) on rank 1"),
    ],
)  # fmt: skip
def test_what_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(CADConfigError, match=words):
        check_input(dataclasses.replace(GOOD, **change))


WHOLE = [(0, 0, 10, 0, 4, 0), (1, 0, 20, 0, 4, 0), (2, 0, 30, 0, 4, 1)]


@pytest.mark.parametrize(
    "wrong",
    [
        WHOLE[:2],
        [*WHOLE[:2], (2, 0, 30, 0, 3, 1)],
        [*WHOLE[:2], (2, 1, 30, 0, 4, 1)],
        [*WHOLE, (2, 29, 30, 3, 4, 0)],
        [*WHOLE, (5, 0, 1, 0, 4, 0)],
        [*WHOLE, (2, 5, 5, 0, 4, 0)],
        [*WHOLE, (2, 0, 5, -1, 1, 0)],
        [*WHOLE[:2], (2, 0, 30, 0, 5, 1)],
        [*WHOLE[:2], (2, 0, 30, 0, 4, 2)],
    ],
)
def test_coverage(wrong: list[tuple[int, ...]]) -> None:
    check_coverage(np.array(WHOLE), LAYOUT.tick(), 4)
    right = [*WHOLE[:2], (2, 0, 30, 0, 1, 0), (2, 0, 7, 1, 4, 1), (2, 7, 30, 1, 4, 0)]
    check_coverage(np.array(right), LAYOUT.tick(), 4)
    with pytest.raises(AssertionError):
        check_coverage(np.array(wrong), LAYOUT.tick(), 4)


def test_cuts_off_the_granularity_are_counted() -> None:
    """Allowed: multiples of it from the start of the document or of a segment, and ends."""
    tick = Layout.from_stream([50], 2, 30).tick()
    rows = [(0, 16), (16, 30), (30, 46), (46, 50)]
    assert check_cuts(np.array([(0, *row, 0, 4, 0) for row in rows]), tick, 16) == 0
    assert check_cuts(np.array([(0, 0, 17, 0, 4, 0), (0, 17, 29, 0, 4, 0)]), tick, 16) == 3
    assert check_cuts(np.array([(0, 0, 31, 0, 4, 0)]), tick, 16) == 1
    assert check_cuts(np.array([(0, 0, 14, 0, 4, 0)]), tick, 16) == 1
