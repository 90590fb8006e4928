"""What the inputs of benchmarks become, and what their results say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "docs")]
import steps  # noqa: E402
from train_workload import Workload  # noqa: E402

STEPS = {
    "chat --documents 16": "`chat`, 16",
    "chat --documents 16 --padded": "`chat`, 16, padded",
    "chat --documents 4 --accumulation 4 --steps 6": "`chat`, 4, in each of 4 micro-batches",
}


@pytest.mark.parametrize("options", STEPS)
def test_what_dealing_out_gains_is_what_the_page_says(
    options: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["steps.py", *options.split()])
    steps.main()
    found = capsys.readouterr().out.splitlines()[-1].split(" | ")[1:-1]
    assert f"| {STEPS[options]} | {' | '.join(found)} |\n" in (ROOT / "docs" / "steps.md").read_text()


WORKLOADS = sorted((ROOT / "benchmarks" / "workloads").glob("*.json"))


@pytest.mark.parametrize("path", WORKLOADS, ids=lambda path: path.stem)
def test_workloads_can_be_cut_and_scaled(path: Path) -> None:
    workload = Workload.load(path)
    assert workload.fit(workload.ranks, None, False, None) == workload
    for scale in (False, True):
        small = workload.fit(2, 500, scale, 2)
        assert len(small.steps) == 2
        for step in range(2):
            rows = small.make_rows(step, 64)
            assert [len(row.tokens) for row in rows] == [small.row_tokens] * small.rows
            assert sum(int((row.targets >= 0).sum()) for row in rows) == small.targets(step)
            assert sum(small.local(step, rank).tokens for rank in range(2)) == 1000
    with pytest.raises(ValueError, match="start fewer processes"):
        workload.fit(workload.ranks + 1, None, False, None)
