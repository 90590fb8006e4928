"""A timeline of a few micro-batches over all ranks: what is recorded, and when.

In: spans that attention calls and exchanges report while a `Tracer` is on. Out: a part file per rank and, once all
parts are there, one file (file.py). Times are CUDA events on a GPU, wall time on a CPU. Without a tracer nothing here
runs.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from deepspeed_cad.exchange.transport import Dispatched, Returned, Transport
from deepspeed_cad.trace.file import (
    ASIDE,
    COMPUTE,
    NANO_BATCHES,
    SERVING,
    STEP,
    Span,
    merge_parts,
    part_path,
    to_events,
    write_json,
)

logger = logging.getLogger("deepspeed_cad")

UnderWay = TypeVar("UnderWay", Dispatched, Returned)

WARM_UP = 2
"""Micro-batches before the first that is recorded: plans and kernels are made for the first time in them."""
PATH_VARIABLE, STEPS_VARIABLE = "DEEPSPEED_CAD_TRACE", "DEEPSPEED_CAD_TRACE_STEPS"
"""What `deepspeed-cad trace` sets; the config key is "trace"."""
STEPS = 3
"""Micro-batches to record, where nobody says."""
NOT_TRACED: AbstractContextManager[None] = nullcontext()


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
        self._origin: Any = None
        """The moment at which recording began, and the same as seconds since the epoch."""
        self._began = 0.0
        for stale in (self.path, part_path(self.path, rank)):
            stale.unlink(missing_ok=True)

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
            self._start()
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

    def exchange(
        self,
        what: str,
        nano_batch: int,
        backward: bool,
        transport: Transport,
        start: Callable[[], UnderWay],
        wave: int = 0,
        is_return: bool = False,
    ) -> UnderWay:
        """Start an exchange, with a span from here to the end of its copies, or of the wait for them."""
        if not self.recording:
            return start()
        # Exchanges of one lane never overlap. Where each way has its own, a return may start before its dispatch ends.
        lane = f"exchange {NANO_BATCHES[nano_batch]}" + (f", wave {wave + 1}" if wave else "")
        lane += " back" if is_return and transport.two_ways else ""
        span = Span(lane, what, nano_batch, backward, self._now())
        sent = transport.bytes_sent
        under_way = start()
        span.details["MiB sent"] = round((transport.bytes_sent - sent) / 2**20, 3)
        self._spans.append(span)
        stream = getattr(transport, "stream", None)
        if stream is None:
            return cast(UnderWay, _TracedWait(under_way, span, self))
        span.end = self._now(stream)
        return under_way

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
        try:
            yield
        finally:
            span.end = self._now()

    def _start(self) -> None:
        self._origin = self._settled()
        self._began = time.time()
        self.recording = True

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


class _TracedWait:
    """What is under way on a transport without a stream of its own: over when somebody has waited for it."""

    def __init__(self, inner: Any, span: Span, tracer: Tracer) -> None:
        self._inner, self._span, self._tracer = inner, span, tracer

    def wait(self) -> Any:
        found = self._inner.wait()
        if self._span.end is None:
            self._span.end = self._tracer._now()
        return found


def open_tracer(path: str, device: torch.device, rank: int, ranks: int) -> Tracer | None:
    """The tracer that the config or `deepspeed-cad trace` asks for; None where neither does."""
    path = os.environ.get(PATH_VARIABLE, path)
    steps = int(os.environ.get(STEPS_VARIABLE, STEPS))
    return Tracer(path, steps, device, rank, ranks) if path else None
