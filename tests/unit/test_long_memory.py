"""The arithmetic behind docs/million-tokens.md: its tables are those of the page, and near what was measured."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from long_memory import MEASURED, PAGE, Measured, foreseen  # noqa: E402


@pytest.mark.parametrize("number", range(len(PAGE)))
def test_the_page_has_these_tables(number: int) -> None:
    """`python benchmarks/long_memory.py --page` prints them."""
    assert PAGE[number]() in (ROOT / "docs" / "million-tokens.md").read_text()


@pytest.mark.parametrize("run", MEASURED)
def test_near_what_was_measured(run: Measured) -> None:
    assert foreseen(run) == pytest.approx(run.peak_GiB, rel=0.07)
