"""The arithmetic behind docs/million-tokens.md: its tables are those of the page, and near what was measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from long_memory import MEASURED, PAGE, GiB, Measured, Setting, foreseen, totals  # noqa: E402

from deepspeed_cad.forecast.setting import ModelShape  # noqa: E402


@pytest.mark.parametrize("number", range(len(PAGE)))
def test_the_page_has_these_tables(number: int) -> None:
    """`python benchmarks/long_memory.py --page` prints them."""
    assert PAGE[number]() in (ROOT / "docs" / "million-tokens.md").read_text()


@pytest.mark.parametrize("run", MEASURED)
def test_near_what_was_measured(run: Measured) -> None:
    assert foreseen(run) == pytest.approx(run.peak_GiB, rel=0.07)


def test_what_is_turned_on_moves_memory_to_the_host() -> None:
    """By what is kept, and by checkpoints: L - 1 layers of each leave the GPU, L lie on the host."""
    on_device = Setting(1 << 20, 4, keep="device", checkpoints="device")
    kept, stored = Setting(1 << 20, 4, keep="host", checkpoints="device"), Setting(1 << 20, 4, keep="device")
    before = totals(ModelShape(), on_device)
    for one in (kept, stored):
        device, host = totals(ModelShape(), one)
        assert (before[0] - device) / (host - before[1]) == pytest.approx(31 / 32)
    unit = (1 << 18) * 4096 * 2
    assert totals(ModelShape(), stored)[1] - before[1] == 32 * unit == 64 * GiB
