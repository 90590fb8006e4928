"""Keys that are about the trainers alone, with reserved servers beside them: what they do in place they do here."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import training
from pool import WorkerPool
from served import run

import deepspeed_cad
from deepspeed_cad.session import close_session
from deepspeed_cad.trace import WARM_UP

LENGTHS = [[200, 31], [40, 9, 1, 70]]


def _run(workers: WorkerPool, train: Any, **block: Any) -> list[Any]:
    """What two trainers beside one server give."""
    return run(workers, 2, 1, train, **block)[0]


def _verified(rank: int, trainers: int, block: dict[str, Any]) -> list[str]:
    from deepspeed_cad.integrations import verify

    said: list[str] = []
    verify.notice = said.append
    model = deepspeed_cad.apply(training.tiny_llama(torch.float32), block).train()
    for step in range(3):
        batch = training.pack(training.documents(LENGTHS[(rank + step) % 2], seed=10 * step + rank))
        model(**batch, use_cache=False).loss.backward()
    return said


@pytest.mark.parametrize("overlap", [pytest.param("auto", marks=pytest.mark.long), "local_first"])
def test_verify(workers: WorkerPool, overlap: str) -> None:
    first, second = _run(workers, _verified, verify=2, overlap=overlap)
    assert len(first) == 2 and second == []
    for line in first:
        assert "is the same without CAD: loss 4." in line
        assert ("dK" in line) == (overlap == "local_first") == ("nano-batches were not compared" not in line)


def _traced(rank: int, trainers: int, block: dict[str, Any]) -> None:
    model = deepspeed_cad.apply(training.tiny_llama(), block).train()
    for step in range(WARM_UP + 4):
        training.loss_sum(model, training.pack(training.documents(LENGTHS[rank], seed=step))).backward()
    close_session()


def test_trace(workers: WorkerPool) -> None:
    """One timeline of all ranks: where trainers wait, and what the server attends meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        _run(workers, _traced, trace=str(path))
        events = json.loads(path.read_text())["traceEvents"]
        assert [one.name for one in Path(folder).iterdir()] == ["trace.json"]
    for rank in range(2):
        names = {event["name"] for event in events if event["pid"] == rank and event["ph"] == "X"}
        assert {"dispatch A", "dispatch B", "served A", "wait A", "return A", "model B"} <= names
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 2}
    assert [*lanes.values()] == ["micro-batch", "serving A", "serving B"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["rank 0", "rank 1", "server 2"]
    spans = [e for e in events if e["ph"] == "X" and e["pid"] == 2]
    # Two layers, forward and backward, of each part, in three micro-batches.
    served = Counter((lanes[e["tid"]], e["cat"]) for e in spans if e["name"] == "served")
    assert served == {(f"serving {part}", way): 6 for part in "AB" for way in ("forward", "backward")}
    # On one clock: what is served lies inside the micro-batch of the trainers.
    steps = [e for e in events if e["ph"] == "X" and e["name"].startswith("micro-batch") and e["pid"] < 2]
    begin, end = min(e["ts"] for e in steps), max(e["ts"] + e["dur"] for e in steps)
    assert all(begin <= e["ts"] and e["ts"] + e["dur"] <= end for e in spans if e["name"] == "served")


def _dealt(rank: int, trainers: int, block: dict[str, Any]) -> dict[str, Any]:
    """Losses and gradients of a step of two micro-batches, summed over trainers."""
    model = deepspeed_cad.apply(training.tiny_llama(), block).train()
    session = deepspeed_cad.current_session()
    assert session is not None
    rows = [[[160, 70, 30], [80, 80]], [[20] * 3, [20, 5]]][rank]
    batches = [training.pack(training.documents(row, 10 * rank + i)) for i, row in enumerate(rows)]
    loader = session.look_ahead(batches, model, accumulation=2, global_loss=True)
    return training.sums_of_all_ranks(loader, model, 2) | {"tokens": session.statistics.tokens}


def test_documents_are_dealt_out_to_trainers(workers: WorkerPool) -> None:
    """By their tokens: servers make attention even."""
    kept, dealt = (_run(workers, _dealt, documents=how)[0] for how in ("keep", "auto"))
    assert kept["tokens"] > 1.5 and dealt["tokens"] < 1.15
    assert dealt["losses"] == pytest.approx(kept["losses"], rel=1e-10)
    for name, gradient in kept["gradients"].items():
        assert np.abs(dealt["gradients"][name] - gradient).max() < 1e-9, name
