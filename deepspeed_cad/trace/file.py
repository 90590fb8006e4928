"""The file that a timeline becomes: trace events that Perfetto and chrome://tracing read, and how idle ranks are in it.

In: the spans of one rank. Out: its events, with names for what the training stream did between its spans; one file from
the parts of all ranks; shares of time in which servers attended nothing and trainers waited.

Every rank is a process: a lane for its training stream, one for the stream beside it where served attention has its
own, and one per nano-batch for exchanges. A rank that only serves has one per nano-batch for that.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COMPUTE, ASIDE, STEP = "training stream", "serving stream", "micro-batch"
NANO_BATCHES = "AB"
SERVING = tuple(f"serving {name}" for name in NANO_BATCHES)
"""Of a rank that only serves: each nano-batch has a stream of its own there, and both may run at a time."""
MODEL = "model"
"""What the training stream does between spans: linear layers, norms, embedding, head and loss."""
NAMELESS = 50e-6
"""Seconds: what is shorter between two spans is left out."""
WAITS = ("wait", "dispatch", "return")
"""Of a trainer. Starting an exchange takes no time on a GPU; on a CPU ranks wait for each other there."""


@dataclass
class Span:
    """One thing that happened; begin and end are CUDA events or seconds."""

    lane: str
    what: str
    nano_batch: int | None
    backward: bool
    begin: Any
    end: Any = None
    details: dict[str, Any] = field(default_factory=dict)


def to_events(rank: int, spans: list[Span], serves: bool = False) -> list[dict[str, Any]]:
    """Trace events of one rank; `serves`: it only serves."""
    aside = [ASIDE] if any(span.lane == ASIDE for span in spans) else []
    lanes = [STEP, *(SERVING if serves else (COMPUTE, *aside)), *(f"exchange {name}" for name in NANO_BATCHES)]
    lanes += sorted({span.lane for span in spans} - {*lanes})
    about: list[tuple[int, str, dict[str, Any]]] = [
        (0, "process_name", {"name": f"server {rank}" if serves else f"rank {rank}"})
    ]
    for lane, name in enumerate(lanes):
        about += [(lane, "thread_name", {"name": name}), (lane, "thread_sort_index", {"sort_index": lane})]
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": rank, "tid": lane, "name": name, "args": args} for lane, name, args in about
    ]
    for span in [*spans, *([] if serves else name_gaps(spans))]:
        direction = "backward" if span.backward else "forward"
        lettered = span.nano_batch is not None and span.lane in (COMPUTE, ASIDE)
        events.append(
            {
                "ph": "X",
                "pid": rank,
                "tid": lanes.index(span.lane),
                "name": f"{span.what} {NANO_BATCHES[span.nano_batch or 0]}" if lettered else span.what,
                "cat": direction,
                "ts": span.begin * 1e6,
                "dur": (span.end - span.begin) * 1e6,
                "args": {"direction": direction, **span.details},
            }
        )
    return events


def name_gaps(spans: list[Span]) -> list[Span]:
    """Spans for what lies between those of the training stream, and between these and the ends of micro-batches, which
    are given in the order in which they begin. What ends with a dispatch is of its nano-batch."""
    found: list[Span] = []
    steps = [span for span in spans if span.lane == STEP]
    last = [Span(STEP, "", None, False, span.end) for span in steps[-1:]]
    at: float | None = None
    for span in [*(span for span in spans if span.lane in (COMPUTE, STEP)), *last]:
        if at is not None and span.begin - at > NAMELESS:
            nano_batch = span.nano_batch if span.what == "dispatch" else None
            found.append(Span(COMPUTE, MODEL, nano_batch, span.backward, at, span.begin))
        at = span.begin if span.lane == STEP else span.end
    return found


def part_path(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.name}.rank{rank}")


def merge_parts(path: Path, ranks: int) -> bool:
    """Join the parts of all ranks into one file and remove them; False while some are missing."""
    parts = [part_path(path, rank) for rank in range(ranks)]
    try:
        found = [json.loads(part.read_text()) for part in parts]
    except FileNotFoundError:
        return False
    first = min(part["began"] for part in found)
    for part in found:
        for event in part["traceEvents"]:
            if "ts" in event:
                event["ts"] = round(event["ts"] + (part["began"] - first) * 1e6, 3)
                event["dur"] = round(event["dur"], 3)
    write_json(
        path, {"displayTimeUnit": "ms", "traceEvents": [event for part in found for event in part["traceEvents"]]}
    )
    for part in parts:
        part.unlink(missing_ok=True)
    return True


def write_json(path: Path, content: Any) -> None:
    """Write at once, so that nobody reads half a file."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    unfinished.write_text(json.dumps(content))
    os.replace(unfinished, path)


def find_idle(timeline: dict[str, Any]) -> tuple[dict[int, float], dict[int, float]]:
    """By rank, of the time that its micro-batches took: the share in which a trainer's training stream waited for
    exchanges, and that in which a server attended nothing. Nothing where the timeline has no micro-batch."""
    events = timeline["traceEvents"]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    servers = {pid for (pid, _), name in lanes.items() if name in SERVING}
    steps: list[tuple[float, float]] = []
    found: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in (e for e in events if e["ph"] == "X"):
        pid, lane = event["pid"], lanes[event["pid"], event["tid"]]
        what, span = event["name"].split(" ")[0], (event["ts"], event["ts"] + event["dur"])
        # A server hears of a micro-batch when the host of trainer 0 begins it, ahead of GPUs.
        if lane == STEP and pid not in servers:
            steps.append(span)
        elif (lane in SERVING and what == "served") or (lane == COMPUTE and what in WAITS):
            found[pid].append(span)
    if not steps:
        return {}, {}
    total = covered(steps)
    trainers = sorted({pid for pid, _ in lanes} - servers)
    waited = {pid: covered(found[pid]) / total for pid in trainers}
    return waited, {pid: max(0.0, 1.0 - covered(found[pid]) / total) for pid in sorted(servers)}


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    length, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        length += max(0.0, end - max(begin, until))
        until = max(until, end)
    return length
