"""What `make test-gpu` makes of lines, and what it says where there is nothing to check."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gpu_check
import pytest
import torch
from gpu_check import GROUPS, Ended, Launch, merge, table
from lines import Lines, Place

from deepspeed_cad.errors import CADPeerError, CADUnsupportedError


def line(case: str, state: str, rank: int, detail: str = "") -> dict[str, Any]:
    return {"what": "transport nvlink", "case": case, "state": state, "rank": rank, "detail": detail, "seconds": 1.0}


def test_a_case_is_as_bad_as_its_worst_rank() -> None:
    ended = Ended(
        Launch("transports"), [line("a", "passed", 0), line("a", "failed", 1, "x | y\nz"), line("b", "refused", 0)]
    )
    rows = merge([ended])
    assert [(row["case"], row["state"]) for row in rows] == [("a", "failed"), ("b", "refused")]
    assert "| a | FAILED | 1.0 | rank 1: x / y z |" in table(rows)
    assert gpu_check._summary(ended.lines) == "0 passed, 1 failed, 1 skipped"


class Second(Place):
    """The second of two ranks; the first one refuses, or does not."""

    first = ""

    def gather(self, value: Any) -> list[Any]:
        return [self.first, value]


@pytest.mark.parametrize(
    ("first", "error", "state", "words"),
    [
        ("", None, "passed", ""),
        ("", CADUnsupportedError("heads of 192"), "refused", "heads of 192"),
        ("heads of 192", CADPeerError("rank 0 stopped"), "refused", "heads of 192"),
        ("heads of 192", None, "refused", "heads of 192"),
        ("", CADPeerError("rank 0 stopped"), "failed", "CADPeerError: rank 0 stopped"),
        ("", ValueError("a defect"), "failed", "ValueError: a defect"),
    ],
)
def test_what_one_rank_refuses_is_refused_on_all(
    tmp_path: Path, first: str, error: Exception | None, state: str, words: str
) -> None:
    place = Second(1, 2, torch.device("cpu"))
    object.__setattr__(place, "first", first)

    def run() -> str:
        if error is not None:
            raise error
        return words

    lines = Lines(place, tmp_path / "lines")
    assert lines.check("a model", "stream", lambda: (True, place.together(run))) == state
    last = json.loads((tmp_path / "lines").read_text().splitlines()[-1])
    assert (last["state"], last["detail"]) == (state, words)


def test_without_gpus_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    assert gpu_check.main() == 0
    first, last = capsys.readouterr().out.splitlines()
    assert "sees no GPU" in first and last == f"0 passed, 0 failed, {len(GROUPS)} skipped"
