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
import training
from pool import WorkerPool

import deepspeed_cad
from deepspeed_cad.cli import main
from deepspeed_cad.session import close_session
from deepspeed_cad.trace import STEPS, WARM_UP

ROOT = Path(__file__).parents[2]


def _train(rank: int, world: int, block: dict[str, Any]) -> None:
    model = training.tiny_llama()
    deepspeed_cad.apply(model, {"granularity": 16, "tolerance": 0.02, "links": training.LINKS, **block})
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    for step in range(WARM_UP + STEPS):
        lengths = [[260], [40, 30, 9, 1, 50]][rank]
        training.loss_sum(model, training.pack(training.documents(lengths, seed=step))).backward()
    close_session()


def _lane(events: list[dict[str, Any]], rank: int, name: str) -> Iterator[dict[str, Any]]:
    lanes = [e for e in events if e["name"] == "thread_name" and e["pid"] == rank and e["args"]["name"] == name]
    found = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (rank, lanes[0]["tid"])]
    return iter(sorted(found, key=lambda event: event["ts"]))


def test_timeline_of_two_ranks(workers: WorkerPool) -> None:
    layers, nano_batches, waves = 2, 2, 2
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        workers.run(_train, 2, {"overlap": "interleave", "waves": waves, "trace": str(path)})
        events = json.loads(path.read_text())["traceEvents"]
    for rank in range(2):
        assert len(list(_lane(events, rank, "micro-batch"))) == STEPS
        compute = list(_lane(events, rank, "training stream"))
        names = {event["name"] for event in compute}
        assert {
            f"{what} {x}" for what in ("dispatch", "local", "served", "wait", "return", "model") for x in "AB"
        } <= names
        # Kept attention is not run again, so there are as many backward calls as forward ones.
        served = Counter(e["cat"] for e in compute if e["name"].startswith("served"))
        assert served == dict.fromkeys(("forward", "backward"), STEPS * layers * nano_batches * waves)
        # One stream does one thing at a time (times are rounded to nanoseconds).
        for one, following in zip(compute, compute[1:]):
            assert following["ts"] >= one["ts"] + one["dur"] - 0.01


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
def test_cli_traces_a_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script, output = tmp_path / "train.py", tmp_path / "trace.json"
    script.write_text(SCRIPT.format(tests=str(ROOT / "tests")))
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    assert main(["trace", "--steps", "2", "--output", str(output), "--", *launch]) == 0
    assert "idle: rank 0 " in capfd.readouterr().out
    events = json.loads(output.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["trace.json", "train.py"]
