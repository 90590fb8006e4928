"""A timeline of a few micro-batches over all ranks, in the trace format that Perfetto and chrome://tracing read.

In: spans and marks that attention calls, exchanges and decoder layers report while a `Tracer` is on. Out: one part file
per rank and, once all parts are there, one file with a process row per rank: a lane for what the training stream does
(the model before and after attention, local and served attention, waits) and a lane per nano-batch for exchanges.
Times are CUDA events on a GPU, wall time on a CPU. Without a tracer nothing here runs.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from deepspeed_cad.exchange.transport import Dispatched, Outgoing, Returned, Returning, Transport
from deepspeed_cad.schedule import Schedule

logger = logging.getLogger("deepspeed_cad")

WARM_UP = 2
"""Micro-batches before the first that is recorded: plans and kernels are made for the first time in them."""
PATH_VARIABLE, STEPS_VARIABLE = "DEEPSPEED_CAD_TRACE", "DEEPSPEED_CAD_TRACE_STEPS"
"""What `deepspeed-cad trace` sets; the config keys are "trace" and "trace_steps"."""
NOT_TRACED: AbstractContextManager[None] = nullcontext()
NAMELESS = 50e-6
"""Seconds: what lies between two spans and has no name is left out where it is shorter."""
COMPUTE, STEP = "training stream", "micro-batch"
NANO_BATCHES = "AB"


@dataclass
class Span:
    """One thing that happened; begin and end are CUDA events or seconds, equal for a mark."""

    lane: str
    what: str
    slot: int | None
    backward: bool
    begin: Any
    end: Any = None
    details: dict[str, Any] = field(default_factory=dict)


class Tracer:
    """Records one process; all methods cost next to nothing before and after the recorded micro-batches."""

    def __init__(self, path: str, steps: int, device: torch.device, rank: int, ranks: int) -> None:
        self.path, self.steps, self.device, self.rank, self.ranks = Path(path), steps, device, rank, ranks
        self.recording = False
        self.micro_batches = 0
        self._spans: list[Span] = []
        self._origin: Any = None
        """The moment at which recording began, and the same as seconds since the epoch."""
        self._began = 0.0
        self._backward = False
        """Direction of the span that is open."""
        self._layer: int | None = None
        """The layer whose forward runs, the first or a second time."""
        for stale in (self.path, part_path(self.path, rank)):
            stale.unlink(missing_ok=True)

    # What the other rooms call

    def span(self, what: str, slot: int, label: str, backward: bool) -> AbstractContextManager[None]:
        """A span of the training stream: "dispatch", "local", "served", "return" or "wait"."""
        if not self.recording:
            return NOT_TRACED
        return self._timed(Span(COMPUTE, what, slot, backward, None, details={"layer": label}))

    def mark(self, what: str, slot: int | None = None, backward: bool = False, layer: int | None = None) -> None:
        """A moment of the training stream: "layer begins", "layer ends", "attention ends"."""
        if self.recording:
            now = self._now()
            self._spans.append(Span(COMPUTE, what, slot, backward, now, now, {"layer": layer}))

    def next_micro_batch(self) -> None:
        """A training forward begins: start recording after the warm-up, stop and write after `steps`."""
        if self.recording:
            self.mark("micro-batch ends")
        if self.micro_batches == WARM_UP:
            self._start()
        elif self.micro_batches == WARM_UP + self.steps:
            self.finish()
        if self.recording:
            now = self._now()
            self._spans.append(Span(STEP, f"micro-batch {self.micro_batches}", None, False, now))
            self.mark("micro-batch begins")
        self.micro_batches += 1

    def watch_layers(self, layers: Iterable[torch.nn.Module]) -> None:
        """Mark where decoder layers begin and end, so that time between them has a name."""
        for index, layer in enumerate(layers):
            layer.forward = self._marked(layer.forward, index)
            # Where activation checkpointing runs a layer again, some transformers pass by its `forward`.
            for child in layer.children():
                child.register_forward_pre_hook(lambda *_, index=index: self._enter_layer(index))

    def _marked(self, forward: Callable[..., Any], layer: int) -> Callable[..., Any]:
        @wraps(forward)
        def marked(*args: Any, **kwargs: Any) -> Any:
            self._enter_layer(layer)
            try:
                return forward(*args, **kwargs)
            finally:
                self._layer = None
                self.mark("layer ends", layer=layer)

        return marked

    def _enter_layer(self, layer: int) -> None:
        if self._layer != layer:
            self._layer = layer
            self.mark("layer begins", layer=layer)

    def watch_transport(self, transport: Transport) -> Transport:
        """The same transport, with its exchanges on the timeline."""
        return _TracedTransport(transport, self)

    def finish(self) -> None:
        """Write this rank's part, and the whole timeline where it is the last part."""
        if not self.recording:
            return
        self.recording = False
        events = to_events(self.rank, self._resolve())
        self._spans.clear()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _write(part_path(self.path, self.rank), {"began": self._began, "traceEvents": events})
        merged = merge_parts(self.path, self.ranks)
        if merged:
            logger.info("timeline of %d micro-batches on %d ranks: %s", self.steps, self.ranks, self.path)

    # Time

    def _now(self, stream: torch.cuda.Stream | None = None) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream or torch.cuda.current_stream(self.device))
        return event

    @contextmanager
    def _timed(self, span: Span) -> Iterator[None]:
        span.begin = self._now()
        self._spans.append(span)
        self._backward = span.backward
        if span.backward:
            self._layer = None
        try:
            yield
        finally:
            span.end = self._now()

    def _start(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._origin = self._now()
        if self.device.type == "cuda":
            self._origin.synchronize()
        self._began = time.time()
        self.recording = True

    def _resolve(self) -> list[Span]:
        """The spans with begin and end in seconds since recording began."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = self._now()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for span in self._spans:
            span.begin = self._seconds(span.begin)
            span.end = self._seconds(now if span.end is None else span.end)
        steps = [span for span in self._spans if span.lane == STEP]
        for one, following in zip(steps, steps[1:]):
            one.end = following.begin
        return self._spans

    def _seconds(self, moment: Any) -> float:
        if isinstance(moment, float):
            return moment - float(self._origin)
        return float(self._origin.elapsed_time(moment)) / 1e3


class _TracedTransport:
    """A transport whose exchanges are spans: from their start to the end of the copies, or of the wait for them."""

    def __init__(self, inner: Transport, tracer: Tracer) -> None:
        self._inner, self._tracer = inner, tracer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def dispatch(self, schedule: Schedule, fields: list[Outgoing], slot: int) -> Dispatched:
        """See Transport."""
        return self._start("Q, K, V out", "dO, Q, K, V out", slot, lambda: self._inner.dispatch(schedule, fields, slot))

    def give_back(self, schedule: Schedule, fields: list[Returning], slot: int) -> Returned:
        """See Transport."""
        return self._start("O back", "dQ, dK, dV back", slot, lambda: self._inner.give_back(schedule, fields, slot))

    def close(self) -> None:
        """See Transport."""
        self._inner.close()

    def _start(self, forward: str, backward: str, slot: int, start: Any) -> Any:
        tracer = self._tracer
        if not tracer.recording:
            return start()
        is_backward = tracer._backward
        span = Span(f"exchange {NANO_BATCHES[slot]}", backward if is_backward else forward, slot, is_backward, None)
        span.begin = tracer._now()
        sent = self._inner.bytes_sent
        under_way = start()
        span.details["MiB sent"] = round((self._inner.bytes_sent - sent) / 2**20, 3)
        tracer._spans.append(span)
        stream = getattr(self._inner, "stream", None)
        if stream is not None:
            span.end = tracer._now(stream)
            return under_way
        return _TracedWait(under_way, span, tracer)


class _TracedWait:
    """What is under way on a transport without a stream of its own: over when somebody has waited for it."""

    def __init__(self, inner: Any, span: Span, tracer: Tracer) -> None:
        self._inner, self._span, self._tracer = inner, span, tracer

    def wait(self) -> Any:
        """See Dispatched and Returned."""
        found = self._inner.wait()
        if self._span.end is None:
            self._span.end = self._tracer._now()
        return found


def open_tracer(path: str, steps: int, device: torch.device, rank: int, ranks: int) -> Tracer | None:
    """The tracer that the config or `deepspeed-cad trace` asks for; None where neither does."""
    path = os.environ.get(PATH_VARIABLE, path)
    steps = int(os.environ.get(STEPS_VARIABLE, steps))
    return Tracer(path, steps, device, rank, ranks) if path else None


# From spans to a file


def to_events(rank: int, spans: list[Span]) -> list[dict[str, Any]]:
    """Trace events of one rank: its spans, and names for what the training stream did between them."""
    lanes = [STEP, COMPUTE, *(f"exchange {name}" for name in NANO_BATCHES)]
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": rank, "tid": 0, "name": "process_name", "args": {"name": f"rank {rank}"}},
        {"ph": "M", "pid": rank, "tid": 0, "name": "process_sort_index", "args": {"sort_index": rank}},
    ]
    for lane, name in enumerate(lanes):
        about = {"ph": "M", "pid": rank, "tid": lane}
        events.append({**about, "name": "thread_name", "args": {"name": name}})
        events.append({**about, "name": "thread_sort_index", "args": {"sort_index": lane}})
    compute = [span for span in spans if span.lane == COMPUTE]
    others = [span for span in spans if span.lane != COMPUTE]
    for span in [*others, *(span for span in compute if span.end > span.begin), *name_gaps(compute)]:
        direction = "backward" if span.backward else "forward"
        part = "" if span.slot is None or span.lane != COMPUTE else f" {NANO_BATCHES[span.slot]}"
        events.append(
            {
                "ph": "X",
                "pid": rank,
                "tid": lanes.index(span.lane),
                "name": f"{span.what}{part}",
                "cat": direction,
                "ts": span.begin * 1e6,
                "dur": (span.end - span.begin) * 1e6,
                "args": {"direction": direction, **span.details},
            }  # fmt: skip
        )
    return events


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
        what, slot = ("head and loss", None) if turning else _gap(one, following)
        if following.begin - one.end > (NAMELESS if what == "other" else 0.0):
            found.append(Span(COMPUTE, what, slot, backward and not turning, one.end, following.begin))
    return found


def _gap(one: Span, following: Span) -> tuple[str, int | None]:
    """Name and nano-batch of the time between two spans or marks."""
    if following.what == "micro-batch ends":
        return "rest of the step", None
    if one.what == "micro-batch begins":
        return "embedding", None
    if one.what == "layer begins" and following.backward:
        return "recompute, post", following.slot
    if following.what == "dispatch":
        # In backward, what comes after attention in the model is passed first.
        return ("post" if following.backward else "pre"), following.slot
    if one.what == "attention ends":
        return ("pre" if one.backward else "post"), one.slot
    if one.what == "layer begins" and following.what == "layer ends":
        return "recompute", None
    return "other", None


def part_path(path: Path, rank: int) -> Path:
    """Where a rank writes its part."""
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
    _write(path, {"displayTimeUnit": "ms", "traceEvents": [event for part in found for event in part["traceEvents"]]})
    for part in parts:
        part.unlink(missing_ok=True)
    return True


def _write(path: Path, content: Any) -> None:
    """Write at once, so that nobody reads half a file."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    unfinished.write_text(json.dumps(content))
    os.replace(unfinished, path)
