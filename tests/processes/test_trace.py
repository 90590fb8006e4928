"""The timeline of real runs: two processes, and two trainers beside a server."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import training
from pool import WorkerPool
from served import run

import deepspeed_cad
from deepspeed_cad.session import close_session
from deepspeed_cad.trace import STEPS, WARM_UP

LAYERS = 2


def _train(rank: int, world: int, block: dict[str, Any]) -> None:
    model = deepspeed_cad.apply(training.tiny_llama(), training.BLOCK | block).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for step in range(WARM_UP + STEPS):
        lengths = [[260], [40, 30, 9, 1, 50]][rank]
        training.loss_sum(model, training.pack(training.documents(lengths, seed=step))).backward()
    close_session()


def _read(path: Path) -> list[dict[str, Any]]:
    """The events of the only file in its folder."""
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    return json.loads(path.read_text())["traceEvents"]


def _lanes(events: list[dict[str, Any]], rank: int) -> dict[int, str]:
    return {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == rank}


def _lane(events: list[dict[str, Any]], rank: int, name: str) -> Iterator[dict[str, Any]]:
    (lane,) = (tid for tid, of in _lanes(events, rank).items() if of == name)
    found = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (rank, lane)]
    return iter(sorted(found, key=lambda event: event["ts"]))


def test_timeline_of_two_ranks(workers: WorkerPool, tmp_path: Path) -> None:
    path, waves = tmp_path / "new" / "folder" / "trace.json", 2
    workers.run(_train, 2, {"overlap": "interleave", "waves": waves, "trace": str(path)})
    events = _read(path)
    for rank in range(2):
        assert len(list(_lane(events, rank, "micro-batch"))) == STEPS
        compute = list(_lane(events, rank, "training stream"))
        assert {f"{what} {x}" for what in ("dispatch", "local", "served", "wait", "return", "model") for x in "AB"} <= {
            event["name"] for event in compute
        }
        # Kept attention is not run again, so there are as many backward calls as forward ones.
        served = Counter(e["cat"] for e in compute if e["name"].startswith("served"))
        assert served == dict.fromkeys(("forward", "backward"), STEPS * LAYERS * 2 * waves)
        # One stream does one thing at a time (times are rounded to nanoseconds).
        for one, following in zip(compute, compute[1:]):
            assert following["ts"] >= one["ts"] + one["dur"] - 0.01


def test_timeline_of_a_server(workers: WorkerPool, tmp_path: Path) -> None:
    """One timeline of all ranks: where trainers wait, and what the server attends meanwhile."""
    path = tmp_path / "trace.json"
    run(workers, 2, 1, _train, trace=str(path))
    events = _read(path)
    lanes = _lanes(events, 2)
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["rank 0", "rank 1", "server 2"]
    spans = [e for e in events if e["ph"] == "X" and e["pid"] == 2 and e["name"] == "served"]
    served = Counter((lanes[e["tid"]], e["cat"]) for e in spans)
    assert served == {(f"serving {part}", way): STEPS * LAYERS for part in "AB" for way in ("forward", "backward")}
    # On one clock: what is served lies inside the micro-batch of the trainers.
    steps = [e for e in events if e["ph"] == "X" and e["name"].startswith("micro-batch") and e["pid"] < 2]
    begin, end = min(e["ts"] for e in steps), max(e["ts"] + e["dur"] for e in steps)
    assert all(begin <= e["ts"] and e["ts"] + e["dur"] <= end for e in spans)
