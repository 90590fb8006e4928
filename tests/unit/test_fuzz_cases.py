"""Cases of the fuzz run are replayed from their line, and what is allowed to become of them is what it should be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fuzz.case import ALL, FORMS, HYBRIDS, Case, Fate, Plant, simpler
from fuzz.data import micro_batch
from fuzz.draw import draw
from fuzz.judge import judge, may
from fuzz.play import Played

TWO = Case(0, batches=(3, 3))


@pytest.mark.parametrize("seed", range(40))
def test_lines_are_replayed(seed: int) -> None:
    """A case is the same from its line, and so is each that shrinking makes of it; none is as complex as before."""
    case = draw(seed)
    assert Case.from_line(case.to_line()) == case == draw(seed)
    for simple in simpler(case):
        assert simple != case and Case.from_line(simple.to_line()) == simple
        assert len(may(simple)) == simple.world == len(simple.batches)


def test_all_kinds_are_drawn() -> None:
    cases = [draw(seed) for seed in range(2000)]
    assert {case.world for case in cases} == {1, 2, 3, 4}
    assert {case.plant.kind for case in cases if case.plant} == {
        "forward", "loss", "backward", "loader", "positions", "break", "skip", "look",
    }  # fmt: skip
    assert {form for case in cases for form in case.forms} == set(FORMS)
    assert any(0 in micro_batch(case, 0, 0)["input_ids"].shape for case in cases), "no rank is ever empty"
    drawn = {feature for case in cases for feature in case.features()}
    assert drawn >= {
        "in place", "reserved servers", "killed server", "hung server", "slow server", "trainers go on", "pipeline",
        "evaluation", "waves", "memory", "keep host", "accumulation", "no checkpointing", "checkpointing, reentrant",
        "checkpointing, not reentrant", *(f"hybrid: {model}" for model in HYBRIDS),
    }  # fmt: skip


RIGHT, ERROR, EITHER = {"right"}, {"error"}, {"right", "error"}
LONGER = {"batches": (3, 1), "epochs": 2, "ahead": False}
"""Rank 1 trains as many micro-batches as rank 0 does before its third."""


@pytest.mark.parametrize(
    ("changes", "ends"),
    [
        ({}, [RIGHT, RIGHT]),
        ({"batches": (3, 4), "stop": 3}, [RIGHT, RIGHT]),
        ({"batches": (3, 4)}, [EITHER, ERROR]),
        ({"batches": (3, 4), "epochs": 2}, [ERROR, ERROR]),
        ({"batches": (3, 4), "epochs": 2, "ahead": False}, [EITHER, ERROR]),
        ({"plant": Plant("break", 0, 0, 1)}, [EITHER, ERROR]),
        ({"plant": Plant("break", 0, 0, 1), "epochs": 2}, [ERROR, ERROR]),
        ({"plant": Plant("break", ALL, 0, 1)}, [RIGHT, RIGHT]),
        ({"plant": Plant("look", 1, 0, 1)}, [EITHER, ERROR]),
        ({"plant": Plant("look", 1, 0, 2), "look": 2}, [RIGHT, RIGHT]),
        ({"plant": Plant("loss", ALL, 0, 1, caught=True)}, [RIGHT, RIGHT]),
        ({"plant": Plant("loss", 0, 0, 1)}, [{"planted", "error"}, ERROR]),
        ({"plant": Plant("forward", 0, 0, 1, caught=True)}, [ERROR, ERROR]),
        ({"plant": Plant("forward", 0, 0, 2, caught=True)}, [EITHER, ERROR]),
        ({"plant": Plant("loss", 0, 1, 0, caught=True), **LONGER}, [ERROR, EITHER]),
        ({"plant": Plant("loss", 0, 0, 1, caught=True), **LONGER}, [ERROR, ERROR]),
        ({"plant": Plant("positions", 1, 0, 1)}, [ERROR, ERROR]),
    ],
)
def test_what_may_become_of_a_case(changes: dict[str, Any], ends: list[set[str]]) -> None:
    assert may(replace(TWO, **changes)) == ends


def _error(kind: str, *bases: str, text: str = "rank 1 stopped") -> Any:
    return kind, [kind, *bases], text, ""


LOST = replace(TWO, servers=1, fates=(Fate(0, "KILL", "return", 1),), block={"on_server_failure": "continue"})
STOPS = replace(LOST, block={"on_server_failure": "stop"})
NAMED = _error("CADPeerError", "CADError", text="server 2 ended: its process died")
NAMELESS = _error("CADPeerError", "CADError", text="the group broke")


@pytest.mark.parametrize(
    ("case", "played", "begins"),
    [
        (LOST, [Played(0), Played(1), None], ""),
        (LOST, [Played(0), Played(1), Played(2, exit_code=0)], ""),
        (LOST, [Played(0), Played(1), Played(2, exit_code=1)], "server: rank 2"),
        (LOST, [Played(0), Played(1), Played(2, exit_code=0, held=8)], "server: rank 2"),
        (LOST, [Played(0), None, None], "hang"),
        (LOST, [Played(0, error=NAMED), Played(1, error=NAMED), None], "unexpected"),
        (STOPS, [Played(0, error=NAMED), Played(1, error=NAMED), None], ""),
        (STOPS, [Played(0), Played(1, error=NAMELESS), None], "unclear"),
        (STOPS, [Played(0, error=NAMED), Played(1, error=NAMED), Played(2, exit_code=1)], "unexpected"),
        (replace(TWO, servers=1), [Played(0), Played(1), None], "hang"),
    ],
)  # fmt: skip
def test_judge_of_servers(case: Case, played: list[Any], begins: str) -> None:
    failure = judge(case, played)
    assert failure.startswith(begins) and bool(failure) == bool(begins)
