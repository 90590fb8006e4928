"""Cases of the fuzz run are replayed from their line, and what is allowed to become of them is what it should be."""

from dataclasses import replace
from typing import Any

import pytest
from fuzz.case import ALL, Case, Plant, draw
from fuzz.judge import may

TWO = Case(0, batches=(3, 3))


@pytest.mark.parametrize("seed", range(40))
def test_lines_are_replayed(seed: int) -> None:
    case = draw(seed)
    assert Case.from_line(case.to_line()) == case == draw(seed)
    assert len(may(case)) == case.world == len(case.batches)


RIGHT, ERROR, EITHER = {"right"}, {"error"}, {"right", "error"}
LONGER = {"batches": (3, 1), "epochs": 2, "ahead": False}
"""Rank 1 trains as many micro-batches as rank 0 does before its third."""


@pytest.mark.parametrize("changes, ends", [
    ({}, [RIGHT, RIGHT]), ({"batches": (3, 4), "stop": 3}, [RIGHT, RIGHT]),
    ({"batches": (3, 4)}, [EITHER, ERROR]), ({"batches": (3, 4), "epochs": 2}, [ERROR, ERROR]),
    ({"batches": (3, 4), "epochs": 2, "ahead": False}, [EITHER, ERROR]),
    ({"plant": Plant("break", 0, 0, 1)}, [EITHER, ERROR]),
    ({"plant": Plant("break", 0, 0, 1), "epochs": 2}, [ERROR, ERROR]),
    ({"plant": Plant("break", ALL, 0, 1)}, [RIGHT, RIGHT]), ({"plant": Plant("look", 1, 0, 1)}, [RIGHT, RIGHT]),
    ({"plant": Plant("look", 1, 0, 1), "block": {"forward_only": "balanced"}}, [EITHER, ERROR]),
    ({"plant": Plant("look", 1, 0, 2), "look": 2}, [RIGHT, RIGHT]),
    ({"plant": Plant("loss", ALL, 0, 1, caught=True)}, [RIGHT, RIGHT]),
    ({"plant": Plant("loss", 0, 0, 1)}, [{"planted", "error"}, ERROR]),
    ({"plant": Plant("forward", 0, 0, 1, caught=True)}, [ERROR, ERROR]),
    ({"plant": Plant("forward", 0, 0, 2, caught=True)}, [EITHER, EITHER]),
    ({"plant": Plant("loss", 0, 1, 0, caught=True), **LONGER}, [ERROR, EITHER]),
    ({"plant": Plant("loss", 0, 0, 1, caught=True), **LONGER}, [ERROR, ERROR]),
    ({"plant": Plant("positions", 1, 0, 1)}, [ERROR, ERROR]),
])  # fmt: skip
def test_what_may_become_of_a_case(changes: dict[str, Any], ends: list[set[str]]) -> None:
    assert may(replace(TWO, **changes)) == ends
