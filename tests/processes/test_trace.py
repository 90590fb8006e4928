"""The timeline: what spans and gaps become, and a real run on two processes."""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import training
from pool import WorkerPool

import deepspeed_cad
from deepspeed_cad.cli import main
from deepspeed_cad.cli.trace import summary
from deepspeed_cad.trace.file import COMPUTE, Span, name_gaps, part_path, to_events
from deepspeed_cad.trace.record import WARM_UP, Tracer

ROOT = Path(__file__).parents[2]


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


def _train(rank: int, world: int, block: dict[str, Any], path: str, steps: int) -> None:
    model = training.tiny_llama()
    deepspeed_cad.apply(model, {"granularity": 16, "tolerance": 0.02, **block})
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    session = deepspeed_cad.current_session()
    tracer = session.counts.tracer
    own_tracer = tracer is None
    if own_tracer:
        tracer = session.counts.tracer = Tracer(path, steps, torch.device("cpu"), rank, world)
        tracer.watch_layers(model.model.layers)
    for step in range(WARM_UP + steps + 1):
        if own_tracer:
            tracer.next_micro_batch()
        lengths = [[260], [40, 30, 9, 1, 50]][rank]
        training.loss_sum(model, training.pack(training.documents(lengths, seed=step))).backward()


def _lane(events: list[dict[str, Any]], rank: int, name: str) -> Iterator[dict[str, Any]]:
    lanes = [e for e in events if e["name"] == "thread_name" and e["pid"] == rank and e["args"]["name"] == name]
    found = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (rank, lanes[0]["tid"])]
    return iter(sorted(found, key=lambda event: event["ts"]))


@pytest.mark.parametrize("overlap, waves", [("pingpong", 1), ("interleave", 2), ("none", 2)])
def test_timeline_of_two_ranks(workers: WorkerPool, overlap: str, waves: int) -> None:
    steps, layers = 2, 2
    nano_batches = 1 if overlap == "none" else 2
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        block = {"overlap": overlap, "waves": waves}
        workers.run(_train, 2, block, str(path), steps)
        timeline = json.loads(path.read_text())
    events = timeline["traceEvents"]
    for rank in range(2):
        assert len(list(_lane(events, rank, "micro-batch"))) == steps
        compute = list(_lane(events, rank, "training stream"))
        names = [event["name"] for event in compute]
        for what in ("dispatch", "local", "served", "wait", "return", "pre", "post"):
            assert f"{what} A" in names
            assert (f"{what} B" in names) == (nano_batches == 2)
        assert {"embedding", "head and loss", "rest of the step"} <= set(names)
        # Kept attention is not run again, so there are as many backward calls as forward ones.
        for direction in ("forward", "backward"):
            served = [e for e in compute if e["name"].startswith("served") and e["cat"] == direction]
            assert len(served) == steps * layers * nano_batches * waves
        # One stream does one thing at a time (times are rounded to nanoseconds).
        for one, following in zip(compute, compute[1:]):
            assert following["ts"] >= one["ts"] + one["dur"] - 0.01
        out = "dO, Q, K, V out"
        lanes = ["exchange A", *(f"exchange A, wave {number}" for number in range(2, waves + 1))]
        exchanges = [Counter((e["name"], e["cat"]) for e in _lane(events, rank, lane)) for lane in lanes]
        directions = {"forward": ("Q, K, V out", "O back"), "backward": (out, "dQ, dK, dV back")}
        expected = {(name, direction): steps * layers for direction, names in directions.items() for name in names}
        assert exchanges == [expected] * waves
    lines = summary(timeline).splitlines()
    assert lines[0].split() == ["ms", "per", "rank", "rank", "0", "rank", "1"]
    assert any(line.startswith("served backward") for line in lines)


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


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import torch.distributed as dist, training, deepspeed_cad
from deepspeed_cad.session import close_session
dist.init_process_group("gloo")
model = training.tiny_llama().train()
deepspeed_cad.apply(model, {{"granularity": 16}})
lengths = [[260], [40, 30, 9, 1, 50]][dist.get_rank()]
for step in range(4):
    training.loss_sum(model, training.pack(training.documents(lengths, seed=step))).backward()
close_session()
"""


@pytest.mark.slow
@pytest.mark.skipif("trace" not in deepspeed_cad.CADConfig.__dataclass_fields__, reason="sessions open no tracer yet")
def test_cli_traces_a_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script, output = tmp_path / "train.py", tmp_path / "trace.json"
    script.write_text(SCRIPT.format(tests=str(ROOT / "tests")))
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    assert main(["trace", "--steps", "2", "--output", str(output), "--", *launch]) == 0
    assert "served" in capfd.readouterr().out
    events = json.loads(output.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["trace.json", "train.py"]
