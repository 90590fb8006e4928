"""The timeline without processes: what is recorded when, what it is named, and how the files of ranks become one."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_cad import trace
from deepspeed_cad.cli import main
from deepspeed_cad.trace import ASIDE, COMPUTE, STEP, Span, merge_parts, open_tracer, part_path

CPU = torch.device("cpu")


def test_what_lies_between_spans_is_the_models() -> None:
    spans = [
        Span(STEP, "micro-batch 2", None, False, 0.0, 1.0), Span(COMPUTE, "dispatch", 1, False, 0.1, 0.2),
        Span(ASIDE, "served", 0, False, 0.2, 0.5), Span(COMPUTE, "local", 0, True, 0.4, 0.6),
        Span(COMPUTE, "wait", 0, True, 0.6 + 1e-5, 0.9),
    ]  # fmt: skip
    gaps = [(1, False, 0.0, 0.1), (None, True, 0.2, 0.4), (None, False, 0.9, 1.0)]
    assert trace.name_gaps(spans) == [Span(COMPUTE, trace.MODEL, *gap) for gap in gaps]


def test_ranks_share_one_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    # Of two ranks that see all parts at once the other may be the quicker one.
    part_path(path, 0).write_text(json.dumps({"began": 0.0, "traceEvents": []}))
    monkeypatch.setattr(trace, "write_json", lambda *_: part_path(path, 0).unlink())
    assert merge_parts(path, 1)


def test_two_micro_batches_are_recorded_behind_the_warm_up(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    """On a clock of the test; until it begins the timeline of an earlier session stays, but no part of it."""
    caplog.set_level("INFO", "deepspeed_cad")
    clock, path, layer = SimpleNamespace(now=5.0), tmp_path / "trace.json", {"layer": "layer 0"}
    monkeypatch.setattr(trace, "time", SimpleNamespace(perf_counter=lambda: clock.now, time=lambda: 100.0))
    assert [one.steps for one in (open_tracer(str(path), CPU, 0, 1),) if one] == [3], "where nobody says"
    monkeypatch.setenv(trace.STEPS_VARIABLE, "2")
    assert open_tracer("", CPU, 0, 1) is None
    monkeypatch.setenv(trace.PATH_VARIABLE, str(path))
    path.write_text("old"), part_path(path, 0).write_text("old")
    tracer: Any = open_tracer("of the config", CPU, 0, 1)
    assert not part_path(path, 0).exists()
    for step in range(6):
        assert path.read_text() == "old" if step < 3 else path.exists() == (step > 4) == bool(caplog.text)
        clock.now += 1.0
        tracer.next_micro_batch()
        assert (tracer.span("x", 0, "", False) is not trace.NOT_TRACED) == tracer.recording == (step in (2, 3))
        if step == 3:
            tracer.name_tick("tick 3", backward=True)
        for what, aside in (("dispatch", False), ("served", True)):
            with tracer.span(what, int(aside), "layer 0", True, aside):
                clock.now += 0.25
    assert f"timeline of 2 micro-batches on 1 ranks: {path}" in caplog.text
    events = json.loads(path.read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events[:4]] == ["rank 0", STEP, COMPUTE, ASIDE]
    assert [e["tid"] for e in events[:4]] == [0, 0, 1, 2] and {e["pid"] for e in events} == {0}
    assert [(e["tid"], e["name"], e["cat"], e["ts"] / 1e6, e["dur"] / 1e6, e["args"]) for e in events[4:]] == [
        (0, "micro-batch 2", "forward", 0.0, 1.5, {}), (1, "dispatch A", "backward", 0.0, 0.25, layer),
        (2, "served B", "backward", 0.25, 0.25, layer), (0, "tick 3", "backward", 1.5, 1.5, {}),
        (1, "dispatch A", "backward", 1.5, 0.25, layer), (2, "served B", "backward", 1.75, 0.25, layer),
        (1, "model", "backward", 0.25, 1.25, {}), (1, "model", "forward", 1.75, 1.25, {}),
    ]  # fmt: skip


def test_cli_says_what_is_wrong(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path, script = tmp_path / "trace.json", [sys.executable, "-c"]
    path.write_text("of an earlier run")
    for output, arguments, words in (
        (path, [], "there is no command to run"), (path, ["--steps", "0", "--", "true"], "--steps is 0"),
        (tmp_path, ["--", "true"], f"--output: {tmp_path} cannot be written: "),
        (path, ["--", str(tmp_path / "missing")], "cannot run"),
        (path, ["--", *script, "raise SystemExit(3)"], "the run ended with exit code 3 and left no timeline"),
    ):  # fmt: skip
        assert main(["trace", "--output", str(output), *arguments]) == 2 and words in capfd.readouterr().err


def test_cli_leaves_with_the_exit_code_of_the_run(tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    spans = [Span(STEP, "micro-batch 2", None, False, 0.0, 1.0), Span(COMPUTE, "wait", 0, False, 0.5, 0.75)]
    (tmp_path / "made.json").write_text(json.dumps({"traceEvents": trace.to_events(0, spans)}))
    script = f"import os, sys; os.rename('made.json', os.environ[{trace.PATH_VARIABLE!r}]); "
    script += f"sys.exit(int(os.environ[{trace.STEPS_VARIABLE!r}]))"
    assert main(["trace", "--steps", "7", sys.executable, "-c", script]) == 7
    where = f"{tmp_path / 'trace.json'}: open it in https://ui.perfetto.dev"
    assert capfd.readouterr().out.splitlines() == ["idle: rank 0 25%", where]
