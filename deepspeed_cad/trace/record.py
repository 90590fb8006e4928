"""A timeline of a few micro-batches over all ranks: what is recorded, and when.

In: spans and marks that attention calls, exchanges and decoder layers report while a `Tracer` is on. Out: a part file
per rank and, once all parts are there, one file (file.py) with a process row per rank: a lane for what the training
stream does (the model before and after attention, local and served attention, waits), one for the stream beside it
where served attention has its own, and one per nano-batch for exchanges. A rank that only serves has one per nano-batch
for that. Times are CUDA events on a GPU, wall time on a CPU. Without a tracer nothing here runs.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
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
        """Nothing is recorded yet.

        Args:
            path: of the timeline.
            steps: micro-batches to record.
            device: where this rank computes.
            rank: this one, of those that run attention.
            ranks: how many there are, servers among them.
            serves: this one only serves.
        """
        self.path, self.steps, self.device, self.rank, self.ranks = Path(path), steps, device, rank, ranks
        self.serves = serves
        self.recording = False
        self.micro_batches = 0
        self._spans: list[Span] = []
        self._origin: Any = None
        """The moment at which recording began, and the same as seconds since the epoch."""
        self._began = 0.0
        self._layer: int | None = None
        """The layer whose forward runs, the first or a second time."""
        for stale in (self.path, part_path(self.path, rank)):
            stale.unlink(missing_ok=True)

    # What the other rooms call

    def span(
        self, what: str, nano_batch: int, label: str, backward: bool, aside: bool = False
    ) -> AbstractContextManager[None]:
        """A span of the training stream, or of the one beside it: "dispatch", "local", "served", "return", "wait"."""
        if not self.recording:
            return NOT_TRACED
        lane = SERVING[nano_batch] if self.serves else ASIDE if aside else COMPUTE
        return self._timed(Span(lane, what, nano_batch, backward, None, details={"layer": label}))

    def mark(self, what: str, nano_batch: int | None = None, backward: bool = False, layer: int | None = None) -> None:
        """A moment of the training stream: "layer begins", "layer ends", "attention ends"."""
        if self.recording and not self.serves:
            now = self._now()
            self._spans.append(Span(COMPUTE, what, nano_batch, backward, now, now, {"layer": layer}))

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

    def name_tick(self, what: str, backward: bool) -> None:
        """What the micro-batch that just began is called; in a pipeline, the ticks of a round take its place."""
        if self.recording:
            step = next(span for span in reversed(self._spans) if span.lane == STEP)
            step.what, step.backward = what, backward

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
