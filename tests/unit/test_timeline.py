"""The timeline without processes: what is recorded when, what it is named, and how the files of ranks become one."""

import json
import sys
from pathlib import Path

import pytest
import torch

from deepspeed_cad import trace
from deepspeed_cad.cli import main
from deepspeed_cad.trace import ASIDE, COMPUTE, STEP, Span, Tracer, merge_parts, part_path, to_events

CPU = torch.device("cpu")


def test_what_lies_between_spans_is_the_models() -> None:
    spans = [
        Span(STEP, "micro-batch 2", None, False, 0.0, 1.0), Span(COMPUTE, "dispatch", 1, False, 0.1, 0.2),
        Span(ASIDE, "served", 0, False, 0.2, 0.5), Span(COMPUTE, "local", 0, True, 0.4, 1.0 - 1e-5),
    ]  # fmt: skip
    gaps = [(1, False, 0.0, 0.1), (None, True, 0.2, 0.4)]
    assert trace.name_gaps(spans) == [Span(COMPUTE, trace.MODEL, *gap) for gap in gaps]


def test_events_of_a_rank() -> None:
    spans = [
        Span(STEP, "micro-batch 2", None, False, 0.0, 0.5),
        Span(COMPUTE, "local", 1, True, 0.0, 0.5, {"layer": "x"}),
        Span(ASIDE, "served", 0, False, 0.25, 0.5),
    ]
    events = to_events(7, spans)
    assert all(event["pid"] == 7 for event in events)
    lanes = [STEP, COMPUTE, ASIDE]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["rank 7"]
    assert {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"} == dict(enumerate(lanes))
    found = {e["name"]: (lanes[e["tid"]], e["cat"], e["ts"], e["dur"], e["args"]) for e in events if e["ph"] == "X"}
    assert found == {
        "micro-batch 2": (STEP, "forward", 0.0, 0.5e6, {}),
        "local B": (COMPUTE, "backward", 0.0, 0.5e6, {"layer": "x"}),
        "served A": (ASIDE, "forward", 0.25e6, 0.25e6, {}),
    }


def test_ranks_share_one_clock(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for rank in (0, 1):
        assert not merge_parts(path, 2)
        events = [{"name": "lane"}, {"name": "x", "ts": 5.0, "dur": 0.12345}]
        part_path(path, rank).write_text(json.dumps({"began": 100.5 - rank / 4, "traceEvents": events}))
    assert merge_parts(path, 2)
    events = json.loads(path.read_text())["traceEvents"]
    assert events == [
        {"name": "lane"}, {"name": "x", "ts": 250005.0, "dur": 0.123},
        {"name": "lane"}, {"name": "x", "ts": 5.0, "dur": 0.123},
    ]  # fmt: skip
    assert [one.name for one in tmp_path.iterdir()] == ["trace.json"]


def test_nothing_is_recorded_while_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "deepspeed_cad")
    stale = tmp_path / "trace.json"
    stale.write_text("old")
    tracer = Tracer(str(stale), 1, CPU, 0, 1)
    assert tracer.span("local", 0, "layer", False) is trace.NOT_TRACED
    tracer.finish()
    assert not tracer._spans and stale.read_text() == "old" and not caplog.text, "of a session before this one"
    for _ in range(trace.WARM_UP + 1):
        tracer.next_micro_batch()
    assert tracer.recording and not stale.exists()
    tracer.finish()
    assert f"on 1 ranks: {stale}" in caplog.text


def test_cli_says_what_is_wrong(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output = ["--output", str(tmp_path / "trace.json")]
    for arguments, words in (
        ([], "there is no command to run"),
        ([*output, "--steps", "0", "--", "true"], "--steps is 0"),
        ([*output, "--", str(tmp_path / "missing")], "cannot run"),
        ([*output, "--", sys.executable, "-c", "pass"], "left no timeline"),
    ):
        assert main(["trace", *arguments]) == 2 and words in capfd.readouterr().err
