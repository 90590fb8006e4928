"""A timeline of a few micro-batches over all ranks: one file that Perfetto and chrome://tracing read.

In: spans that attention calls report while a `Tracer` is on: CUDA events on a GPU, wall time on a CPU. Out: a part file
per rank and, once all parts are there, one file; shares of time in which servers attended nothing and trainers waited.
Every rank is a process with a lane for each of its streams. Without a tracer nothing here runs.
"""

import json
import logging
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from deepspeed_cad.config import write_json

logger = logging.getLogger("deepspeed_cad")

WARM_UP = 2
"""Micro-batches before the first that is recorded: plans and kernels are made for the first time in them."""
PATH_VARIABLE, STEPS_VARIABLE = "DEEPSPEED_CAD_TRACE", "DEEPSPEED_CAD_TRACE_STEPS"
"""What `deepspeed-cad trace` sets; the config key is "trace"."""
STEPS = 3
"""Micro-batches to record, where nobody says."""
NOT_TRACED: AbstractContextManager[None] = nullcontext()
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


class Tracer:
    """Records one process; all methods cost next to nothing before and after the recorded micro-batches."""

    def __init__(
        self, path: str, steps: int, device: torch.device, rank: int, ranks: int, serves: bool = False
    ) -> None:
        """`rank` of `ranks` that run attention, servers among them; `serves`: this one only serves."""
        self.path, self.steps, self.device, self.rank, self.ranks = Path(path), steps, device, rank, ranks
        self.serves = serves
        self.recording = False
        self.micro_batches = 0
        self._spans: list[Span] = []
        self._origin: Any = None  # when recording began
        self._began = 0.0  # the same in seconds since the epoch
        part_path(self.path, rank).unlink(missing_ok=True)

    def span(
        self, what: str, nano_batch: int, label: str, backward: bool, aside: bool = False
    ) -> AbstractContextManager[None]:
        """A span of the training stream, or of the one beside it: "dispatch", "local", "served", "return", "wait"."""
        if not self.recording:
            return NOT_TRACED
        lane = SERVING[nano_batch] if self.serves else ASIDE if aside else COMPUTE
        return self._timed(Span(lane, what, nano_batch, backward, None, details={"layer": label}))

    def next_micro_batch(self) -> None:
        """A training forward begins: start recording after the warm-up, stop and write after `steps`."""
        if self.micro_batches == WARM_UP:
            self.path.unlink(missing_ok=True)  # of an earlier run
            self._origin, self._began, self.recording = self._settled(), time.time(), True
        elif self.micro_batches == WARM_UP + self.steps:
            self.finish()
        if self.recording:
            self._spans.append(Span(STEP, f"micro-batch {self.micro_batches}", None, False, self._now()))
        self.micro_batches += 1

    def name_tick(self, what: str, backward: bool) -> None:
        """What the micro-batch that just began is called; in a pipeline, the ticks of a round take its place."""
        if self.recording:
            step = next(span for span in reversed(self._spans) if span.lane == STEP)
            step.what, step.backward = what, backward

    def finish(self) -> None:
        """Write this rank's part, and the whole timeline where it is the last part."""
        if not self.recording:
            return
        self.recording = False
        events = to_events(self.rank, self._resolve(), self.serves)
        self._spans.clear()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(part_path(self.path, self.rank), {"began": self._began, "traceEvents": events})
        if merge_parts(self.path, self.ranks):
            logger.info("timeline of %d micro-batches on %d ranks: %s", self.steps, self.ranks, self.path)

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    @contextmanager
    def _timed(self, span: Span) -> Iterator[None]:
        span.begin = self._now()
        self._spans.append(span)
        try:
            yield
        finally:
            span.end = self._now()

    def _settled(self) -> Any:
        """Now, when the device has done all that was queued."""
        now = self._now()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return now

    def _resolve(self) -> list[Span]:
        """The spans with begin and end in seconds since recording began."""
        now = self._settled()
        for span in self._spans:
            span.begin, span.end = (self._seconds(now if at is None else at) for at in (span.begin, span.end))
        steps = [span for span in self._spans if span.lane == STEP]
        for one, following in zip(steps, steps[1:]):
            one.end = following.begin
        return self._spans

    def _seconds(self, moment: Any) -> float:
        if isinstance(moment, float):
            return moment - float(self._origin)
        return float(self._origin.elapsed_time(moment)) / 1e3


def open_tracer(path: str, device: torch.device, rank: int, ranks: int) -> Tracer | None:
    """The tracer that the config or `deepspeed-cad trace` asks for; None where neither does."""
    path = os.environ.get(PATH_VARIABLE, path)
    return Tracer(path, int(os.environ.get(STEPS_VARIABLE, STEPS)), device, rank, ranks) if path else None


def to_events(rank: int, spans: list[Span], serves: bool = False) -> list[dict[str, Any]]:
    """Trace events of one rank; `serves`: it only serves."""
    lanes = [STEP, *(SERVING if serves else (COMPUTE, ASIDE))]
    about = [(0, "process_name", f"server {rank}" if serves else f"rank {rank}")]
    about += [(number, "thread_name", lane) for number, lane in enumerate(lanes)]
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": rank, "tid": at, "name": what, "args": {"name": name}} for at, what, name in about
    ]
    for span in [*spans, *([] if serves else name_gaps(spans))]:
        lettered = span.nano_batch is not None and not serves
        events.append(
            {
                "ph": "X",
                "pid": rank,
                "tid": lanes.index(span.lane),
                "name": f"{span.what} {NANO_BATCHES[span.nano_batch or 0]}" if lettered else span.what,
                "cat": "backward" if span.backward else "forward",
                "ts": span.begin * 1e6,
                "dur": (span.end - span.begin) * 1e6,
                "args": span.details,
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
    events = [event for part in found for event in part["traceEvents"]]
    write_json(path, {"displayTimeUnit": "ms", "traceEvents": events})
    for part in parts:
        part.unlink(missing_ok=True)
    return True


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
    waited = {pid: covered(found[pid]) / total for pid in sorted({pid for pid, _ in lanes} - servers)}
    return waited, {pid: max(0.0, 1.0 - covered(found[pid]) / total) for pid in sorted(servers)}


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    length, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        length += max(0.0, end - max(begin, until))
        until = max(until, end)
    return length
