"""The timeline of a real run on two processes."""

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
from deepspeed_cad.trace.record import WARM_UP, Tracer

ROOT = Path(__file__).parents[2]


def _train(rank: int, world: int, block: dict[str, Any], path: str, steps: int) -> None:
    model = training.tiny_llama()
    deepspeed_cad.apply(model, {"granularity": 16, "tolerance": 0.02, "links": training.LINKS, **block})
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


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import torch.distributed as dist, training, deepspeed_cad
from deepspeed_cad.session import close_session
dist.init_process_group("gloo")
model = training.tiny_llama().train()
deepspeed_cad.apply(model, {{"granularity": 16, "links": training.LINKS}})
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
