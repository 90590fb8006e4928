"""How long ranks were idle in a timeline: servers that attend nothing, trainers that wait for exchanges.

In: a timeline (file.py). Out: shares of the time that its micro-batches took.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from deepspeed_cad.trace.file import COMPUTE, SERVING

WAITS = ("wait", "dispatch", "return")
"""Of a trainer. Starting an exchange takes no time on a GPU; on a CPU ranks wait for each other there."""


@dataclass(frozen=True)
class Idle:
    """Shares of the time between the first and the last micro-batch's ends, by rank."""

    trainers: dict[int, float]
    """In which its training stream waited for exchanges."""
    servers: dict[int, float]
    """In which it attended nothing."""


def find_idle(timeline: dict[str, Any]) -> Idle:
    """The shares of all ranks of a timeline; none where it has no micro-batch."""
    events = timeline["traceEvents"]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    steps = [e for e in events if e["ph"] == "X" and lanes[e["pid"], e["tid"]] == "micro-batch"]
    servers = {pid for (pid, _), name in lanes.items() if name in SERVING}
    # Of the trainers: a server hears of a micro-batch when the host of trainer 0 begins it, ahead of GPUs.
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in steps if e["pid"] not in servers]
    if not spans:
        return Idle({}, {})
    total = covered(spans)
    busy: dict[int, list[tuple[float, float]]] = defaultdict(list)
    waits: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in (e for e in events if e["ph"] == "X"):
        pid, lane = event["pid"], lanes[event["pid"], event["tid"]]
        what, span = event["name"].split(" ")[0], (event["ts"], event["ts"] + event["dur"])
        if lane in SERVING and what == "served":
            busy[pid].append(span)
        elif lane == COMPUTE and what in WAITS:
            waits[pid].append(span)
    trainers = sorted({e["pid"] for e in steps} - servers)
    return Idle(
        {pid: covered(waits[pid]) / total for pid in trainers},
        {pid: max(0.0, 1.0 - covered(busy[pid]) / total) for pid in sorted(servers)},
    )


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    length, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        length += max(0.0, end - max(begin, until))
        until = max(until, end)
    return length
