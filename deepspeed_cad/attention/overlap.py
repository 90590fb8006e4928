"""In what order a rank runs its own tasks and those that it serves: in turn on one stream, or beside each other on two.

The same for both passes. In: the dispatches under way, one of each wave, and two functions: `run` runs local batches,
`serve` takes a wave and what arrived of it, runs its served batches and starts their return. Out: what `serve` gives
for each wave, and the returns under way. All ranks start the dispatches of all waves, then the returns, in this order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch

from deepspeed_cad.attention.device_schedule import Batches
from deepspeed_cad.attention.setup import CallSetup
from deepspeed_cad.exchange.transport import Dispatched, Returned

Made = TypeVar("Made")
Run = Callable[[Batches], None]
Serve = Callable[[int, list[torch.Tensor]], tuple[Made, Returned]]


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

    backs: list[Returned]
    """By waves."""
    ends: Ends | None
    """Where two streams run."""

    def finish(self, setup: CallSetup, backward: bool = False) -> None:
        """Wait for what comes back, and for the other stream where there is one."""
        if self.ends is None or setup.aside is None:
            with setup.span("wait", backward), setup.counts.waits.timed(setup.device, True, setup.gain):
                self._wait()
            return
        current = torch.cuda.current_stream(setup.device)
        returned = torch.cuda.Event(enable_timing=True)
        with setup.span("wait", backward):
            current.wait_event(self.ends.served)
            self._wait()
        returned.record(current)
        setup.aside.wait_event(returned)
        setup.counts.waits.beside(*self.ends, returned, setup.gain)

    def _wait(self) -> None:
        # Waves hold different head groups of a document: none places or adds where another one does.
        for back in self.backs:
            back.wait()


def run_alone(setup: CallSetup, run: Run, backward: bool = False) -> None:
    """Run all batches of a group of one rank."""
    with setup.span("local", backward):
        run(setup.schedule.all_local)


def run_tasks(
    setup: CallSetup, outs: tuple[Dispatched, ...], run: Run, serve: Serve[Made], backward: bool = False
) -> tuple[tuple[Made, ...], Return]:
    """Run local and served batches as the call is set up."""
    if setup.aside is not None:
        return _run_beside(setup, setup.aside, outs, run, serve, backward)
    return _run_in_turn(setup, outs, run, serve, backward)


def _run_in_turn(
    setup: CallSetup, outs: tuple[Dispatched, ...], run: Run, serve: Serve[Made], backward: bool
) -> tuple[tuple[Made, ...], Return]:
    """The first share of the local batches hides the dispatch, the others what is under way behind each wave."""

    def wait(out: Dispatched) -> list[torch.Tensor]:
        with setup.span("wait", backward), setup.counts.waits.timed(setup.device, False, setup.gain):
            return out.wait()

    first, *others = setup.schedule.local
    ahead = [] if setup.modes.local_first else [wait(out) for out in outs]
    with setup.span("local", backward):
        run(first)
    made, backs = [], []
    for wave, (out, local) in enumerate(zip(outs, others, strict=True)):
        one, back = serve(wave, ahead[wave] if ahead else wait(out))
        made.append(one)
        backs.append(back)
        with setup.span("local", backward):
            run(local)
    return tuple(made), Return(backs, None)


def _run_beside(
    setup: CallSetup,
    aside: torch.cuda.Stream,
    outs: tuple[Dispatched, ...],
    run: Run,
    serve: Serve[Made],
    backward: bool,
) -> tuple[tuple[Made, ...], Return]:
    """Kernels of one stream fill the processors that the last blocks of the other leave idle.

    Memory belongs to the stream that made it, and both read what the other made. What the current stream made is
    freed only after `Return.finish`, or an error here, has made it wait for `aside`. What `aside` made is read by the
    current stream only where results are placed at home; `Return.finish` makes `aside` wait for that.
    """
    current = torch.cuda.current_stream(setup.device)
    own = torch.cuda.Event(enable_timing=True)
    aside.wait_event(current.record_event())
    first, *others = setup.schedule.local
    with setup.span("local", backward):
        run(first)
    own.record(current)
    made, backs = [], []
    waits: list[tuple[torch.cuda.Event | None, torch.cuda.Event]] = []
    served: torch.cuda.Event | None = None
    try:
        with torch.cuda.stream(aside):
            for wave, (out, local) in enumerate(zip(outs, others, strict=True)):
                with setup.span("wait", backward, aside=True):
                    received = out.wait()
                arrived = torch.cuda.Event(enable_timing=True)
                arrived.record(aside)
                waits.append((served, arrived))
                one, back = serve(wave, received)
                made.append(one)
                backs.append(back)
                with setup.span("local", backward, aside=True):
                    run(local)
                served = torch.cuda.Event(enable_timing=True)
                served.record(aside)
    except BaseException:
        current.wait_stream(aside)
        raise
    assert served is not None  # there is at least one wave
    return tuple(made), Return(backs, Ends(own, waits, served))
