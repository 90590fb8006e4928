"""In what order a rank runs its own tasks and those that it serves: in turn on one stream, or beside each other on two.

The same for both passes. In: the dispatches under way, and two functions: `run` runs local batches, `serve` takes a
wave and what arrived of it, runs its served batches and starts their return. Out: what `serve` gives for each wave, and
the returns under way. All ranks start the same exchanges in the same order: the dispatches of the first waves, then
return after return; behind a return starts the next dispatch, once the return before it is back and placed. So only
the waves that schedule/waves.py names have memory at once.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from deepspeed_cad.attention.device_schedule import Batches
from deepspeed_cad.attention.setup import CallSetup, WavesOut
from deepspeed_cad.exchange.transport import Returned

Made = TypeVar("Made")
Run = Callable[[Batches], None]
Serve = Callable[[int, list[Tensor]], tuple[Made, Returned]]


class Ends(NamedTuple):
    """Moments of a tick on two streams."""

    own: torch.cuda.Event
    """The current stream's own tasks."""
    waits: list[tuple[torch.cuda.Event | None, torch.cuda.Event]]
    """Of the other stream: from when until when it waited for a wave; from the beginning where there is no event."""
    served: torch.cuda.Event


@dataclass(frozen=True, eq=False)
class Return:
    """Results on their way home."""

    backs: deque[Returned]
    """Those of the last waves, in order."""
    ends: Ends | None
    out: WavesOut | None = None
    """Dispatches that nobody has waited for, as nothing here needs what they bring."""
    used: tuple[torch.cuda.Stream, Run, object] | None = None
    """Where two streams run: the current one and, by the functions that name it, its memory that the other one uses."""

    def __del__(self) -> None:
        # An error fell before `finish`, or the pass runs again: whatever thread frees this, what the current stream
        # does from now on must not use that memory earlier than the other stream has.
        if self.backs and self.ends is not None and self.used is not None:
            self.used[0].wait_event(self.ends.served)

    def finish(self, setup: CallSetup, backward: bool = False) -> None:
        """Wait for what comes back, and for the other stream where there is one."""
        if self.ends is None or setup.aside is None:
            with setup.span("wait", backward), setup.counts.waits.timed(setup.device):
                self._wait()
            return
        current = torch.cuda.current_stream(setup.device)
        returned = torch.cuda.Event(enable_timing=True)
        with setup.span("wait", backward):
            current.wait_event(self.ends.served)
            self._wait()
        returned.record(current)
        setup.aside.wait_event(returned)
        setup.counts.waits.beside(*self.ends, returned)

    def _wait(self) -> None:
        while self.out is not None and self.out.under_way:
            self.out.wait()
        # Each is freed as soon as it is placed.
        while self.backs:
            self.backs.popleft().wait()


def run_tasks(
    setup: CallSetup, out: WavesOut, run: Run, serve: Serve[Made], backward: bool = False
) -> tuple[tuple[Made, ...], Return | None]:
    """Run local and served batches as the call is set up. No return is under way in a group of one rank."""
    if not out.count:
        with setup.span("local", backward):
            run(setup.schedule.all_local)
        return (), None
    if setup.aside is not None:
        return _run_beside(setup, setup.aside, out, run, serve, backward)
    two_ways = setup.transport is not None and setup.transport.two_ways
    if two_ways and setup.modes.local_first and not setup.schedule.serves and out.started == out.count:
        return _run_own(setup, out, run, serve, backward)
    return _run_in_turn(setup, out, run, serve, backward)


def _run_own(
    setup: CallSetup, out: WavesOut, run: Run, serve: Serve[Made], backward: bool
) -> tuple[tuple[Made, ...], Return]:
    """Nothing is served here, as on most trainers beside servers: results may come home from the beginning."""
    served = [serve(wave, out.nothing()) for wave in range(out.count)]
    with setup.span("local", backward):
        run(setup.schedule.all_local)
    return tuple(made for made, _ in served), Return(deque(back for _, back in served), None, out)


def _run_in_turn(
    setup: CallSetup, out: WavesOut, run: Run, serve: Serve[Made], backward: bool
) -> tuple[tuple[Made, ...], Return]:
    """The first share of the local batches hides the dispatch, the others what is under way behind each wave."""

    def wait() -> list[Tensor]:
        with setup.span("wait", backward), setup.counts.waits.timed(setup.device):
            return out.wait()

    first, *others = setup.schedule.local
    ahead = deque() if setup.modes.local_first else deque(wait() for _ in range(out.started))
    with setup.span("local", backward):
        run(first)
    made: list[Made] = []
    backs: deque[Returned] = deque()
    for wave, local in enumerate(others):
        one, back = serve(wave, ahead.popleft() if ahead else wait())
        made.append(one)
        backs.append(back)
        if out.started < out.count:
            if wave:
                with setup.span("wait", backward), setup.counts.waits.timed(setup.device):
                    backs.popleft().wait()
            out.start_next()
        with setup.span("local", backward):
            run(local)
    return tuple(made), Return(backs, None)


def _run_beside(
    setup: CallSetup, aside: torch.cuda.Stream, out: WavesOut, run: Run, serve: Serve[Made], backward: bool
) -> tuple[tuple[Made, ...], Return]:
    """Kernels of one stream fill the processors that the last blocks of the other leave idle.

    Memory belongs to the stream that made it, and both read what the other made. What the current stream made is
    freed only after `Return.finish`, the end of a `Return` without that, or an error here, has made it wait for
    `aside`. What `aside` made is read by the current stream only where results are placed at home; `Return.finish`
    makes `aside` wait for that. Results that come back early are placed by `aside`, in rows and heads of O and dQ that
    local batches do not write, and in sums of their own (DeviceSchedule.lands_apart)."""
    current = torch.cuda.current_stream(setup.device)
    own = torch.cuda.Event(enable_timing=True)
    aside.wait_event(current.record_event())
    first, *others = setup.schedule.local
    with setup.span("local", backward):
        run(first)
    own.record(current)
    made: list[Made] = []
    backs: deque[Returned] = deque()
    waits: list[tuple[torch.cuda.Event | None, torch.cuda.Event]] = []
    idle_from: torch.cuda.Event | None = None

    def now() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(aside)
        return event

    try:
        with torch.cuda.stream(aside):
            for wave, local in enumerate(others):
                with setup.span("wait", backward, aside=True):
                    received = out.wait()
                waits.append((idle_from, now()))
                one, back = serve(wave, received)
                del received
                made.append(one)
                backs.append(back)
                if out.started < out.count:
                    if wave:
                        idle_from = now()
                        with setup.span("wait", backward, aside=True):
                            backs.popleft().wait()
                        waits.append((idle_from, now()))
                    out.start_next()
                with setup.span("local", backward, aside=True):
                    run(local)
                idle_from = now()
    except BaseException:
        current.wait_stream(aside)
        raise
    assert idle_from is not None  # there is at least one wave
    return tuple(made), Return(backs, Ends(own, waits, idle_from), used=(current, run, serve))
