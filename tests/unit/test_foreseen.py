"""Predictions against every measured run: within the limits, on the page, and for files put into the folder."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from scripts import load_script

ROOT = Path(__file__).resolve().parents[2]


def foreseen() -> ModuleType:
    return load_script("benchmarks/foreseen.py")


FILES = sorted(
    path.relative_to(ROOT / "benchmarks" / "results").as_posix()
    for kind in foreseen().KINDS
    for path in (ROOT / "benchmarks" / "results").glob(f"*/{kind}")
)


@cache
def rows(file: str) -> list[Any]:
    found: list[Any] = foreseen().foresee_run(ROOT / "benchmarks" / "results" / file)
    return found


@pytest.mark.parametrize("file", FILES)
def test_every_run_is_foreseen_within_the_limits(file: str) -> None:
    """A miss is allowed only with its reason in `KNOWN`, from where it comes to the page."""
    module = foreseen()
    compared = [row for row in rows(file) if row.tokens is not None]
    assert compared or all(row.note for row in rows(file))
    for row in compared:
        for figure, value in module.beyond(row).items():
            assert (row.file, row.mode, figure) in module.KNOWN, f"{row.mode}: {figure} {value:.3f}"


def test_the_page_shows_these_figures() -> None:
    """Run `python benchmarks/foreseen.py` after new measurements or changes of the simulator."""
    page = (ROOT / "docs" / "foreseen.md").read_text()
    lines = {
        (run, mode): figures
        for run, mode, figures in re.findall(r"^\| (h200\S+) \| `(.+?)` \| (.*) \|$", page, re.MULTILINE)
    }
    expected = [row for file in FILES for row in rows(file)]
    assert len(lines) == len(expected)
    for row in expected:
        shown = lines[row.file.removesuffix(".json"), row.mode]
        if row.tokens is None:
            assert row.note in shown
            continue
        for text, value in zip(shown.split("|"), (row.tokens, row.ratio, row.memory), strict=True):
            # Planners may differ in the last digits.
            assert bool(text.strip()) == (value is not None)
            assert value is None or float(text) == pytest.approx(value, abs=5e-3)
