"""Two CUDA streams in one attention call, on the CPU: which work is ordered after which, by clocks in place of a GPU.

Memory of a stream may be used again by that stream as soon as it is freed. So whoever reads what another stream made
must be waited for by that stream before the memory goes.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from deepspeed_cad.attention.call import AttentionCall, Unused
from deepspeed_cad.attention.device_schedule import upload_schedule
from deepspeed_cad.attention.forward import ForwardServed
from deepspeed_cad.attention.setup import CallCounts, CallSetup, Modes
from deepspeed_cad.exchange.transport import Outgoing
from deepspeed_cad.kernels.interface import MaskRule
from deepspeed_cad.kernels.torch_math import TorchMath
from deepspeed_cad.layout import Layout
from deepspeed_cad.schedule.waves import Cut, schedule_waves

CPU = torch.device("cpu")


class Stream:
    """Counts its own work, and what it knows to be over of every other."""

    cuda_stream = 0

    def __init__(self) -> None:
        self.clock: Counter[int] = Counter()

    def work(self) -> None:
        self.clock[id(self)] += 1

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.clock |= event.clock

    def wait_stream(self, other: Stream) -> None:
        self.clock |= other.clock

    def synchronize(self) -> None: ...

    def is_after(self, other: Stream) -> bool:
        return self.clock[id(other)] == other.clock[id(other)]


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.clock: Counter[int] = Counter()
        self.timed, self.recorded = enable_timing, False

    def record(self, stream: Stream | None = None) -> None:
        self.clock = Counter((stream or torch.cuda.current_stream()).clock)
        self.recorded = True

    def query(self) -> bool:
        assert self.recorded, "one that never was is over at once"
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds: one per piece of work of any stream that lies between, or its negative."""
        assert self.timed and other.timed and self.recorded and other.recorded
        return float(other.clock.total() - self.clock.total())


@pytest.fixture()
def main(monkeypatch: pytest.MonkeyPatch) -> Stream:
    main = Stream()
    stack = [main]

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        stack.append(stream)
        try:
            yield
        finally:
            stack.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stack[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return main


class NothingMoves:
    """A transport whose waits and placements are work of the stream that asks for them; what arrives is zero."""

    name, exchanges, bytes_sent = "nothing", 0, 0

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    def dispatch(self, schedule: Any, fields: list[Outgoing], nano_batch: int, moment: Any) -> Any:
        main: Any = torch.cuda.current_stream()
        queued = main.clock[id(main)]

        def wait() -> list[torch.Tensor]:
            stream: Any = torch.cuda.current_stream()
            assert stream.clock[id(main)] >= queued, "what is served begins after what was queued before"
            stream.work()
            if self.fails:
                raise RuntimeError("out of memory")
            return [f.home.new_zeros(int(schedule.served_rows[0, f.kind]), f.home.shape[2]) for f in fields]

        return SimpleNamespace(wait=wait)

    def give_back(self, schedule: Any, fields: list[Any], nano_batch: int, moment: Any) -> Any:
        aside: Any = torch.cuda.current_stream()
        aside.work()

        def wait() -> None:
            main: Any = torch.cuda.current_stream()
            assert main.is_after(aside), "results are placed after everything that ran beside"
            main.work()

        return SimpleNamespace(wait=wait)

    def close(self) -> None: ...


class Working(TorchMath):
    def __init__(self) -> None:
        self.streams: list[Any] = []

    def forward(self, *given: Any) -> Any:
        self.streams.append(torch.cuda.current_stream())
        self.streams[-1].work()
        return super().forward(*given)

    def backward(self, *given: Any) -> Any:
        self.streams.append(torch.cuda.current_stream())
        self.streams[-1].work()
        return super().backward(*given)


def make_call(aside: Stream, transport: NothingMoves, waves: int = 1) -> tuple[AttentionCall, list[torch.Tensor]]:
    """Of rank 0: two batches of its own document of 8, one of which runs beside, then document 2 served."""
    tick = Layout.from_rank_lengths([[8, 3], [5]]).tick()
    tasks = np.array([[0, 0, 8, 0, 1, 0], [0, 0, 8, 1, 2, 0], [1, 0, 3, 0, 2, 1], [2, 0, 5, 0, 2, 0]])
    schedule = upload_schedule(schedule_waves(tick, tasks, 0, 2, None, Cut(waves)), CPU, two_streams=True)
    setup = CallSetup(
        schedule, Working(), transport, MaskRule(0.5), Modes(), CallCounts(), aside=aside  # type: ignore[arg-type]
    )  # fmt: skip
    return AttentionCall(setup), [torch.randn(11, heads, 4, requires_grad=True) for heads in (4, 2, 2)]


def test_each_stream_waits_for_what_reads_its_memory(main: Stream) -> None:
    aside, spans = Stream(), list[Any]()
    call, inputs = make_call(aside, NothingMoves())
    call.setup.counts.tracer = SimpleNamespace(span=lambda *given: spans.append(given) or nullcontext())  # type: ignore[assignment]
    main.work()
    o = call(*inputs)
    kernel: Any = call.setup.kernel
    assert kernel.streams == [main, aside, aside], "own batches, served ones, then the own ones that hide the return"
    assert main.is_after(aside) and aside.is_after(main)
    main.work()
    o.sum().backward()
    assert kernel.streams == 2 * [main, aside, aside]
    names = ["dispatch", "local", *(f"{name} aside" for name in ("wait", "served", "return", "local")), "wait"]
    found = [(name + " aside" * beside, way) for name, _, _, way, beside in spans]
    assert found == [(name, way) for way in (False, True) for name in names]
    assert main.is_after(aside) and aside.is_after(main)
    assert main.clock[id(main)] == 6, "work before each pass, a batch and a placement in each"
    # Both are idle from the end of what runs beside until results are placed: two pieces of work that time passes by.
    assert call.setup.counts.waits.seconds() == pytest.approx(0.004)


def test_waves_do_not_hold_own_batches_up(main: Stream) -> None:
    """All own batches run on the training stream: the other one waits for waves that travel."""
    aside = Stream()
    call, inputs = make_call(aside, NothingMoves(), waves=2)
    o = call(*inputs)
    kernel: Any = call.setup.kernel
    assert kernel.streams == [main, main, aside, aside]
    o.sum().backward()
    assert kernel.streams == 2 * [main, main, aside, aside]
    assert main.is_after(aside) and aside.is_after(main)


def test_an_error_beside_leaves_the_streams_in_order(main: Stream) -> None:
    aside = Stream()
    call, inputs = make_call(aside, NothingMoves(fails=True))
    with pytest.raises(RuntimeError, match="out of memory"):
        call(*inputs)
    assert aside.clock[id(aside)] and main.is_after(aside)


def test_a_pass_that_nobody_finishes_leaves_the_streams_in_order(main: Stream) -> None:
    """Servers changed between two of its steps: what the other stream still writes is freed, by any thread."""
    aside = Stream()
    call, inputs = make_call(aside, NothingMoves())
    call.serve(call.dispatch(*inputs))
    assert aside.clock[id(aside)] and not main.is_after(aside)
    written = weakref.ref(call.expect(ForwardServed).o_THV)
    order = []
    weakref.finalize(call.expect(ForwardServed).o_THV, lambda: order.append(main.is_after(aside)))
    with torch.cuda.stream(Stream()):  # type: ignore[arg-type]
        call.state = Unused()
        gc.collect()
    assert written() is None and order == [True], "freed before the training stream waits"
