"""What 32 layers would take, from runs of two and three: the table of benchmarks/longest_document.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from longest_document import GiB, longest, table  # noqa: E402


def run(layers: int, *tries: dict[str, Any]) -> dict[str, Any]:
    """As the script writes it: GPUs of 140 GiB, a host of 1000."""
    gpu, host = 140 * GiB, 1000 * GiB
    return {"layers": layers, "ranks": 2, "deep": 32, "gpu": gpu, "host": host, "tries": list(tries)}


def took(tokens: int, peak: float, host: float) -> dict[str, Any]:
    return {"tokens": tokens, "peak": peak * GiB, "host": host * GiB, "seconds": 10.0}


def test_a_layer_more_is_counted_for_each_that_is_missing() -> None:
    few = run(2, took(524288, 60.0, 60.0), took(786432, 88.0, 80.0), took(1 << 20, 110.0, 90.0))
    many = run(3, took(524288, 60.5, 74.0), took(786432, 89.0, 101.0), took(1 << 20, 113.0, 100.0))
    found = table([many, few])
    lines = [line.strip("| ").split(" | ") for line in found.splitlines()]
    assert lines[0][2:4] == ["peak GiB per GPU, 2 layers", "3 layers"] and len({len(line) for line in lines[:5]}) == 1
    # 60.5 + 29 × 0.5; 74 + 29 × 14.
    assert lines[2] == (
        ["524,288", "2", "60.00", "60.50", "0.50", "60.00", "74.00", "14.00", "75.0", "140.0", "480.0", "1000.0", "yes"]
    )
    assert lines[3][8:] == ["118.0", "140.0", "710.0", "1000.0", "yes"]
    assert lines[4][8:] == ["200.0", "140.0", "390.0", "1000.0", "no: GPU"]


def test_the_longest_is_where_the_first_memory_is_full() -> None:
    """By the line through the last two: 118 GiB at 786,432 tokens, 43 more for 262,144 more."""
    points = [(1, 0.0, 0.0), (524288, 75.0 * GiB, 480.0 * GiB), (786432, 118.0 * GiB, 710.0 * GiB)]
    gpu_full = 786432 + (140 * 0.95 - 118) / 43 * 262144
    assert f"full at {gpu_full:,.0f} tokens, where the GPU ends" in longest(points, 140 * GiB, 1000 * GiB, 32)
    host_full = 786432 + (500 * 0.95 - 710) / 230 * 262144
    assert f"full at {host_full:,.0f} tokens, where the host ends" in longest(points, 140 * GiB, 500 * GiB, 32)
    assert longest(points[:1], 140 * GiB, 1000 * GiB, 32) == longest(points, 0, 1000 * GiB, 32) == ""
