"""The timeline without processes: what is recorded when, what it is named, and how the files of ranks become one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from deepspeed_cad.cli import main
from deepspeed_cad.trace.file import ASIDE, COMPUTE, STEP, Span, merge_parts, name_gaps, part_path, to_events
from deepspeed_cad.trace.record import NOT_TRACED, PATH_VARIABLE, STEPS_VARIABLE, WARM_UP, Tracer, open_tracer

CPU = torch.device("cpu")


def recording(folder: Path, steps: int = 1) -> Tracer:
    """A tracer that records."""
    tracer = Tracer(str(folder / "trace.json"), steps, CPU, 0, 1)
    for _ in range(WARM_UP + 1):
        tracer.next_micro_batch()
    assert tracer.recording
    return tracer


def test_events_of_a_rank() -> None:
    spans = [
        Span(STEP, "micro-batch 2", None, False, 0.0, 1.0),
        Span(COMPUTE, "local", 1, True, 0.25, 0.5, {"layer": "x"}),
        Span(COMPUTE, "attention ends", 1, True, 0.5, 0.5),
        Span(ASIDE, "served", 0, False, 0.3, 0.4),
        Span("exchange B", "O back", 1, False, 0.4, 0.45, {"MiB sent": 1.5}),
    ]
    events = to_events(7, spans)
    assert all(event["pid"] == 7 for event in events)
    told = [(e["name"], e["tid"], next(iter(e["args"].values()))) for e in events if e["ph"] == "M"]
    lanes = [STEP, COMPUTE, ASIDE, "exchange A", "exchange B"]
    assert told[:2] == [("process_name", 0, "rank 7"), ("process_sort_index", 0, 7)]
    assert told[2:] == [
        pair for i, lane in enumerate(lanes) for pair in (("thread_name", i, lane), ("thread_sort_index", i, i))
    ]
    found = {e["name"]: (lanes[e["tid"]], e["cat"], e["ts"], e["dur"], e["args"]) for e in events if e["ph"] == "X"}
    assert found == {
        "micro-batch 2": (STEP, "forward", 0.0, 1e6, {"direction": "forward"}),
        "local B": (COMPUTE, "backward", 0.25e6, 0.25e6, {"direction": "backward", "layer": "x"}),
        "served A": (ASIDE, "forward", pytest.approx(0.3e6), pytest.approx(0.1e6), {"direction": "forward"}),
        "O back": (
            "exchange B", "forward", pytest.approx(0.4e6), pytest.approx(0.05e6),
            {"direction": "forward", "MiB sent": 1.5},
        ),
    }  # fmt: skip
    assert "serving stream" not in json.dumps(to_events(7, spans[:3]))


def mark(what: str, at: float, layer: int | None = None, backward: bool = False, nano_batch: int | None = None) -> Span:
    return Span(COMPUTE, what, nano_batch, backward, at, at, {"layer": layer})


@pytest.mark.parametrize(
    "one, following, name",
    [
        (mark("micro-batch begins", 0), mark("layer begins", 1, 0), ("embedding", None, False)),
        (mark("layer begins", 0, 0), mark("dispatch", 1, None, False, 1), ("pre", 1, False)),
        (mark("layer begins", 0, 0), mark("dispatch", 1, None, True, 1), ("recompute, post", 1, True)),
        (mark("layer begins", 0, 0), mark("layer ends", 1, 0), ("recompute", None, False)),
        (mark("attention ends", 0, None, False, 1), mark("layer ends", 1, 0), ("post", 1, False)),
        (mark("attention ends", 0, None, True, 1), mark("layer begins", 1, 0), ("pre", 1, True)),
        (mark("attention ends", 0, None, True, 1), mark("dispatch", 1, None, True, 0), ("post", 0, True)),
        (mark("layer ends", 0, 0), mark("dispatch", 1, None, True, 1), ("head and loss", None, False)),
        (mark("layer ends", 0, 3), mark("layer begins", 1, 3), ("head and loss", None, False)),
        (mark("layer ends", 0, 3), mark("layer begins", 1, 4), ("other", None, False)),
        (mark("layer ends", 0, 3), mark("micro-batch ends", 1), ("rest of the step", None, False)),
    ],
)
def test_names_of_gaps(one: Span, following: Span, name: tuple[str, int | None, bool]) -> None:
    # A backward span before it, where there is one, has said that the backward runs.
    (gap,) = name_gaps([one, one, following])
    assert (gap.what, gap.nano_batch, gap.backward, gap.begin, gap.end, gap.lane) == (*name, 0, 1, COMPUTE)


def test_gaps_remember_the_direction_until_the_next_micro_batch() -> None:
    names = ["layer ends", "layer begins", "layer ends", "micro-batch ends", "micro-batch begins", "layer begins"]
    gaps = name_gaps([mark(what, i, 0) for i, what in enumerate(names)])
    assert [(gap.what, gap.backward) for gap in gaps] == [
        ("head and loss", False), ("recompute", True), ("rest of the step", True), ("other", True),
        ("embedding", False),
    ]  # fmt: skip


def test_ranks_share_one_clock(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for rank in (0, 1):
        assert not merge_parts(path, 2)
        events = [{"name": "lane"}, {"name": "x", "ts": 5.0, "dur": 0.12345}]
        part_path(path, rank).write_text(json.dumps({"began": 100.5 - rank / 4, "traceEvents": events}))
    assert merge_parts(path, 2)
    assert json.loads(path.read_text()) == {
        "displayTimeUnit": "ms",
        "traceEvents": [
            {"name": "lane"}, {"name": "x", "ts": 250005.0, "dur": 0.123},
            {"name": "lane"}, {"name": "x", "ts": 5.0, "dur": 0.123},
        ],
    }  # fmt: skip
    assert [one.name for one in tmp_path.iterdir()] == ["trace.json"]


def test_spans_of_both_streams(tmp_path: Path) -> None:
    tracer = recording(tmp_path)
    with tracer.span("local", 1, "layer 5", True):
        tracer.mark("attention ends", 1, backward=True, layer=2)
    with pytest.raises(KeyError), tracer.span("served", 0, "layer 5", False, aside=True):
        raise KeyError
    spans = [(s.lane, s.what, s.nano_batch, s.backward, s.details) for s in tracer._spans]
    assert spans == [
        (STEP, f"micro-batch {WARM_UP}", None, False, {}),
        (COMPUTE, "micro-batch begins", None, False, {"layer": None}),
        (COMPUTE, "local", 1, True, {"layer": "layer 5"}),
        (COMPUTE, "attention ends", 1, True, {"layer": 2}),
        (ASIDE, "served", 0, False, {"layer": "layer 5"}),
    ]
    local, ends, served = tracer._spans[2:]
    assert local.begin <= ends.begin == ends.end <= local.end <= served.begin <= served.end


def test_micro_batches_of_a_recording(tmp_path: Path) -> None:
    tracer = recording(tmp_path, steps=2)
    tracer.next_micro_batch()
    assert tracer.recording
    tracer.next_micro_batch()
    assert not tracer.recording and not tracer._spans
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    steps = [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e["name"].startswith("micro-batch ")]
    assert [name for name, _, _ in steps if name[-1].isdigit()] == [f"micro-batch {WARM_UP + i}" for i in range(2)]
    assert steps[0][2] == pytest.approx(steps[1][1], abs=0.01)
    assert [e["name"] for e in events].count("rest of the step") == 2
    for _ in range(3):
        tracer.next_micro_batch()
    assert not tracer.recording


def test_nothing_is_recorded_while_off(tmp_path: Path) -> None:
    stale = tmp_path / "trace.json"
    stale.write_text("old")
    tracer = Tracer(str(stale), 1, CPU, 0, 1)
    assert not stale.exists()
    assert tracer.span("local", 0, "layer", False) is NOT_TRACED
    tracer.mark("attention ends")
    under_way: Any = SimpleNamespace(wait=lambda: "arrived")
    assert tracer.exchange("O back", 0, False, SimpleNamespace(), lambda: under_way) is under_way  # type: ignore[arg-type, type-var]
    tracer.finish()
    assert not tracer._spans and not list(tmp_path.iterdir())


@pytest.mark.parametrize("has_stream", [True, False])
def test_exchanges_end_with_their_copies_or_with_the_wait(tmp_path: Path, has_stream: bool) -> None:
    tracer = recording(tmp_path)
    transport: Any = SimpleNamespace(bytes_sent=1 << 20, stream=object() if has_stream else None)

    def start() -> Any:
        transport.bytes_sent += 3 << 19
        return SimpleNamespace(wait=lambda: "arrived")

    under_way = tracer.exchange("dO out", 1, True, transport, start)
    span = tracer._spans[-1]
    assert (span.lane, span.what, span.nano_batch, span.backward) == ("exchange B", "dO out", 1, True)
    assert span.details == {"MiB sent": 1.5}
    assert (span.end is not None) == has_stream
    first = under_way.wait()
    end = span.end
    assert first == under_way.wait() == "arrived"
    assert end is not None and span.end == end >= span.begin


@pytest.mark.parametrize(("two_ways", "lane"), [(False, "exchange A, wave 2"), (True, "exchange A, wave 2 back")])
def test_a_return_that_may_start_before_its_dispatch_is_over_has_a_lane_of_its_own(
    tmp_path: Path, two_ways: bool, lane: str
) -> None:
    tracer, under_way = recording(tmp_path), SimpleNamespace(wait=lambda: None)
    transport: Any = SimpleNamespace(bytes_sent=0, two_ways=two_ways)
    for is_return in (False, True):
        tracer.exchange("", 0, False, transport, lambda: cast(Any, under_way), 1, is_return=is_return)
    assert [span.lane for span in tracer._spans[-2:]] == ["exchange A, wave 2", lane]


class Layers(torch.nn.Module):
    """Two layers with a child each; run as transformers does with checkpointing, past the layer's `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(2, 2)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def test_layers_are_marked_again_where_they_run_again(tmp_path: Path) -> None:
    tracer, model = recording(tmp_path), Layers()
    tracer.watch_layers(model.layers)
    begin = len(tracer._spans)
    loss = model(torch.ones(1, 2)).sum()
    forward = [(s.what, s.details["layer"]) for s in tracer._spans[begin:]]
    assert forward == [(what, layer) for layer in range(2) for what in ("layer begins", "layer ends")]
    begin = len(tracer._spans)
    loss.backward()
    assert [(s.what, s.details["layer"]) for s in tracer._spans[begin:] if s.what == "layer begins"] == [
        ("layer begins", 1), ("layer begins", 0),
    ]  # fmt: skip


def test_a_layer_that_runs_after_its_backward_is_marked(tmp_path: Path) -> None:
    """Two recomputes of one layer with a backward between them are two."""
    tracer, layer = recording(tmp_path), torch.nn.Sequential(torch.nn.Linear(2, 2))
    tracer.watch_layers([layer])
    child = layer[0]

    def begins() -> int:
        child(torch.ones(1, 2))
        return sum(span.what == "layer begins" for span in tracer._spans)

    assert [begins(), begins()] == [1, 1]
    with tracer.span("local", 0, "layer", False):
        pass
    assert begins() == 1
    with tracer.span("local", 0, "layer", True):
        pass
    assert begins() == 2


def test_who_asks_for_a_timeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PATH_VARIABLE, raising=False)
    monkeypatch.delenv(STEPS_VARIABLE, raising=False)
    assert open_tracer("", CPU, 0, 1) is None
    found = open_tracer(str(tmp_path / "a"), CPU, 1, 2)
    assert found is not None
    assert (found.path, found.steps, found.rank, found.ranks) == (tmp_path / "a", 3, 1, 2)
    monkeypatch.setenv(PATH_VARIABLE, str(tmp_path / "b"))
    monkeypatch.setenv(STEPS_VARIABLE, "5")
    found = open_tracer(str(tmp_path / "a"), CPU, 0, 1)
    assert found is not None and (found.path, found.steps) == (tmp_path / "b", 5)


def test_the_last_rank_merges(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    tracers = [Tracer(str(path), 1, CPU, rank, 2) for rank in range(2)]
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
