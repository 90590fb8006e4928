"""In what order a rank runs its own tasks and those that it serves: in turn on one stream, or beside each other on two.

The same for both passes. In: the dispatch under way, and two functions: `run` runs local batches, `serve` takes what
arrived, runs the served batches and starts their return. Out: what `serve` gives, and the return under way.
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
Serve = Callable[[list[torch.Tensor]], tuple[Made, Returned]]


class Ends(NamedTuple):
    """Moments of a tick on two streams."""

    own: torch.cuda.Event
    arrived: torch.cuda.Event
    served: torch.cuda.Event


@dataclass(frozen=True, eq=False)
class Return:
    """Results on their way home."""

    back: Returned
    ends: Ends | None
    """Where two streams run."""

    def finish(self, setup: CallSetup, backward: bool = False) -> None:
        """Wait for what comes back, and for the other stream where there is one."""
        if self.ends is None or setup.aside is None:
            with setup.span("wait", backward), setup.counts.waits.timed(setup.device, True, setup.gain):
                self.back.wait()
            return
        current = torch.cuda.current_stream(setup.device)
        returned = torch.cuda.Event(enable_timing=True)
        with setup.span("wait", backward):
            current.wait_event(self.ends.served)
            self.back.wait()
        returned.record(current)
        setup.aside.wait_event(returned)
        setup.counts.waits.beside(*self.ends, returned, setup.gain)


def run_alone(setup: CallSetup, run: Run, backward: bool = False) -> None:
    """Run all batches of a group of one rank."""
    with setup.span("local", backward):
        run(setup.schedule.early + setup.schedule.late)


def run_tasks(
    setup: CallSetup, out: Dispatched, run: Run, serve: Serve[Made], backward: bool = False
) -> tuple[Made, Return]:
    """Run local and served batches as the call is set up."""
    if setup.aside is not None:
        return _run_beside(setup, setup.aside, out, run, serve, backward)
    return _run_in_turn(setup, out, run, serve, backward)


def _run_in_turn(
    setup: CallSetup, out: Dispatched, run: Run, serve: Serve[Made], backward: bool
) -> tuple[Made, Return]:
    """About half of the local batches hide the dispatch, the other half the return."""

    def wait() -> list[torch.Tensor]:
        with setup.span("wait", backward), setup.counts.waits.timed(setup.device, False, setup.gain):
            return out.wait()

    received = None if setup.modes.local_first else wait()
    with setup.span("local", backward):
        run(setup.schedule.early)
    made, back = serve(wait() if received is None else received)
    with setup.span("local", backward):
        run(setup.schedule.late)
    return made, Return(back, None)


def _run_beside(
    setup: CallSetup, aside: torch.cuda.Stream, out: Dispatched, run: Run, serve: Serve[Made], backward: bool
) -> tuple[Made, Return]:
    """Kernels of one stream fill the processors that the last blocks of the other leave idle.

    Memory belongs to the stream that made it, and both read what the other made. What the current stream made is
    freed only after `Return.finish`, or an error here, has made it wait for `aside`. What `aside` made is read by the
    current stream only where results are placed at home; `Return.finish` makes `aside` wait for that.
    """
    current = torch.cuda.current_stream(setup.device)
    own, arrived, served = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    aside.wait_event(current.record_event())
    with setup.span("local", backward):
        run(setup.schedule.early)
    own.record(current)
    try:
        with torch.cuda.stream(aside):
            with setup.span("wait", backward, aside=True):
                received = out.wait()
            arrived.record(aside)
            made, back = serve(received)
            with setup.span("local", backward, aside=True):
                run(setup.schedule.late)
            served.record(aside)
    except BaseException:
        current.wait_stream(aside)
        raise
    return made, Return(back, Ends(own, arrived, served))
