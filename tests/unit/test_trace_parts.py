"""The timeline: what spans and gaps become, how ranks merge theirs, and what the command says of bad input."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from deepspeed_cad.cli import main
from deepspeed_cad.trace.file import COMPUTE, Span, name_gaps, part_path, to_events
from deepspeed_cad.trace.record import WARM_UP, Tracer


def _marks(*rows: tuple[str, int | None, bool, float, float]) -> list[Span]:
    return [Span(COMPUTE, *row) for row in rows]


def test_gaps_are_named_by_what_surrounds_them() -> None:
    compute = _marks(
        ("micro-batch begins", None, False, 0.0, 0.0),
        ("layer begins", None, False, 1.0, 1.0),
        ("dispatch", 0, False, 2.0, 2.1),
        ("local", 0, False, 3.0, 4.0),
        ("attention ends", 0, False, 4.0, 4.0),
        ("layer ends", None, False, 5.0, 5.0),
        ("dispatch", 0, True, 7.0, 7.1),
        ("attention ends", 0, True, 8.0, 8.0),
        ("micro-batch ends", None, False, 9.0, 9.0),
    )
    for i in (1, 5):
        compute[i].details["layer"] = 0
    found = [(gap.what, gap.nano_batch, gap.backward, gap.begin, gap.end) for gap in name_gaps(compute)]
    assert found == [
        ("embedding", None, False, 0.0, 1.0),
        ("pre", 0, False, 1.0, 2.0),
        ("other", None, False, 2.1, 3.0),
        ("post", 0, False, 4.0, 5.0),
        ("head and loss", None, False, 5.0, 7.0),
        ("other", None, True, 7.1, 8.0),
        ("rest of the step", None, True, 8.0, 9.0),
    ]


def test_nothing_is_recorded_outside_of_the_chosen_micro_batches(tmp_path: Path) -> None:
    tracer = Tracer(str(tmp_path / "trace.json"), 1, torch.device("cpu"), 0, 1)
    for step in range(WARM_UP + 3):
        tracer.next_micro_batch()
        assert tracer.recording == (step == WARM_UP)
        with tracer.span("local", 0, "layer", False):
            tracer.mark("attention ends", 0)
    found = json.loads((tmp_path / "trace.json").read_text())
    assert sum(event["name"] == "local A" for event in found["traceEvents"]) == 1
    assert not part_path(tmp_path / "trace.json", 0).exists()


def test_the_last_rank_merges(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    tracers = [Tracer(str(path), 1, torch.device("cpu"), rank, 2) for rank in range(2)]
    for tracer in tracers:
        for _ in range(WARM_UP + 1):
            tracer.next_micro_batch()
        with tracer.span("served", 1, "layer", True):
            pass
    tracers[1].finish()
    assert not path.exists()
    tracers[0].finish()
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["name"] == "served B"} == {0, 1}
    assert min(event["ts"] for event in events if event["ph"] == "X") < 1e5
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]


def test_events_of_a_rank_without_attention() -> None:
    assert all(event["ph"] == "M" for event in to_events(3, []))


def test_cli_says_what_is_wrong(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["trace"]) == 2
    assert "there is no command to run" in capfd.readouterr().err
    output = ["--output", str(tmp_path / "trace.json")]
    assert main(["trace", *output, "--steps", "0", "--", "true"]) == 2
    assert "--steps is 0" in capfd.readouterr().err
    assert main(["trace", *output, "--", str(tmp_path / "missing")]) == 2
    assert "cannot run" in capfd.readouterr().err
    assert main(["trace", *output, "--", sys.executable, "-c", "pass"]) == 2
    assert "left no timeline" in capfd.readouterr().err
