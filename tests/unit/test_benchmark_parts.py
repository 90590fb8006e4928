"""What the inputs of benchmarks become, and what their results say."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "docs")]
import steps  # noqa: E402

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
