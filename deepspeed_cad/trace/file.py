"""The file that a timeline becomes: trace events that Perfetto and chrome://tracing read.

In: the spans and marks of one rank, in the order in which they began. Out: its events, with names for what the training
stream did between its spans; and one file from the parts of all ranks.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COMPUTE, ASIDE, STEP = "training stream", "serving stream", "micro-batch"
NANO_BATCHES = "AB"
SERVING = tuple(f"serving {name}" for name in NANO_BATCHES)
"""Of a rank that only serves: each nano-batch has a stream of its own there, and both may run at a time."""
NAMELESS = 50e-6
"""Seconds: what lies between two spans and has no name is left out where it is shorter."""


@dataclass
class Span:
    """One thing that happened; begin and end are CUDA events or seconds, equal for a mark."""

    lane: str
    what: str
    nano_batch: int | None
    backward: bool
    begin: Any
    end: Any = None
    details: dict[str, Any] = field(default_factory=dict)


def to_events(rank: int, spans: list[Span], serves: bool = False) -> list[dict[str, Any]]:
    """Trace events of one rank: its spans, and names for what the training stream did between them.

    `serves`: the rank only serves.
    """
    aside = [ASIDE] if any(span.lane == ASIDE for span in spans) else []
    own = SERVING if serves else (COMPUTE, *aside)
    lanes = [STEP, *own, *(f"exchange {name}" for name in NANO_BATCHES)]
    lanes += sorted({span.lane for span in spans} - {*lanes})
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": rank, "tid": 0, "name": "process_name", "args": {"name": name_rank(rank, serves)}},
        {"ph": "M", "pid": rank, "tid": 0, "name": "process_sort_index", "args": {"sort_index": rank}},
    ]
    for lane, name in enumerate(lanes):
        about = {"ph": "M", "pid": rank, "tid": lane}
        events.append({**about, "name": "thread_name", "args": {"name": name}})
        events.append({**about, "name": "thread_sort_index", "args": {"sort_index": lane}})
    streams = (COMPUTE, ASIDE)
    compute = [span for span in spans if span.lane == COMPUTE]
    others = [span for span in spans if span.lane != COMPUTE]
    for span in [*others, *(span for span in compute if span.end > span.begin), *name_gaps(compute)]:
        direction = "backward" if span.backward else "forward"
        letter = f" {NANO_BATCHES[span.nano_batch]}" if span.nano_batch is not None and span.lane in streams else ""
        events.append(
            {
                "ph": "X",
                "pid": rank,
                "tid": lanes.index(span.lane),
                "name": f"{span.what}{letter}",
                "cat": direction,
                "ts": span.begin * 1e6,
                "dur": (span.end - span.begin) * 1e6,
                "args": {"direction": direction, **span.details},
            }
        )
    return events


def name_rank(rank: int, serves: bool) -> str:
    return f"server {rank}" if serves else f"rank {rank}"


def name_gaps(compute: list[Span]) -> list[Span]:
    """Spans for what lies between those of the training stream: the model before and after attention."""
    found: list[Span] = []
    backward = False
    for one, following in zip(compute, compute[1:]):
        if one.what == "micro-batch begins":
            backward = False
        # A layer that begins where the same one has just ended is run again: the loss lies between.
        again = one.details.get("layer") == following.details.get("layer") and following.what == "layer begins"
        turning = one.what == "layer ends" and not backward and (again or following.backward)
        backward = backward or turning or following.backward
        what, nano_batch = ("head and loss", None) if turning else _gap(one, following)
        if following.begin - one.end > (NAMELESS if what == "other" else 0.0):
            found.append(Span(COMPUTE, what, nano_batch, backward and not turning, one.end, following.begin))
    return found


def _gap(one: Span, following: Span) -> tuple[str, int | None]:
    """Name and nano-batch of the time between two spans or marks."""
    if following.what == "micro-batch ends":
        return "rest of the step", None
    if one.what == "micro-batch begins":
        return "embedding", None
    if one.what == "layer begins" and following.backward:
        return "recompute, post", following.nano_batch
    if following.what == "dispatch":
        # In backward, what comes after attention in the model is passed first.
        return ("post" if following.backward else "pre"), following.nano_batch
    if one.what == "attention ends":
        return ("pre" if one.backward else "post"), one.nano_batch
    if one.what == "layer begins" and following.what == "layer ends":
        return "recompute", None
    return "other", None


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
