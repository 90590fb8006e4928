"""Where each rank is: what one tells the others while it trains nothing, and logs while it waits for them in vain.

A script's loop may end on one rank only: its loader has fewer batches, it breaks out, its process ends. The others then
wait for it, under DDP and FSDP in a collective of torch's own, which names nobody. So a thread looks: a rank that has
begun nothing for QUIET_S leaves on the board what its training thread is in, and one whose forward or backward stands
in a collective for so long logs one line that says where those ranks are that are elsewhere. It ends nothing: they may
only be slow. In: the stack of the training thread, what this rank has begun, the board. Out: lines there, and the log.
"""

import logging
import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import CodeType, FrameType
from typing import NamedTuple

from deepspeed_cad.ahead.feed import Feed
from deepspeed_cad.ahead.gather import APART, Gatherer
from deepspeed_cad.ahead.worker import Worker
from deepspeed_cad.exchange.failure.board import Liveness, Place
from deepspeed_cad.notice import counted
from deepspeed_cad.threads import start_daemon

logger = logging.getLogger("deepspeed_cad")

QUIET_S = 10.0
"""Without a forward, an exchange or a collective of this rank, and in the same functions: what counts as waiting. A
choice: loaders and checkpoints of most jobs take less, and torch's own time-outs are ten minutes and more."""
KNOWN_S = 2.0
"""The same where this rank has heard that its next micro-batch is beyond the end of another rank's loader."""
MOST = 8
LOOKS = 10
_COLLECTIVES = ("torch.distributed", "torch.nn.parallel", "torch.autograd", "deepspeed.comm", "deepspeed_cad")
_STEPS = ("_call_impl", "_engine_run_backward")
"""Functions of torch inside which a module's forward runs, or a backward."""
_LIBRARY = os.path.dirname(os.__file__)
INNERMOST = 3
"""Functions of a stack that are asked whether they wait for other ranks: collectives have a wrapper or two."""


class Sight(NamedTuple):
    chain: tuple[CodeType, ...]
    """The functions on its stack, innermost first."""
    inside: bool
    collective: bool
    """The innermost one may wait for other ranks."""
    text: str


class Whereabouts:
    def __init__(
        self, liveness: Liveness, gatherer: Gatherer, worker: Worker, feeds: Sequence[Feed],
        started: Callable[[], int], trained: Callable[[], int], timeout_s: float,
    ) -> None:  # fmt: skip
        """`started`: exchanges; `trained`: micro-batches, both that this rank has begun."""
        self.liveness, self.gatherer, self.worker, self.feeds = liveness, gatherer, worker, feeds
        self.trained, self.quiet_s = trained, min(QUIET_S, timeout_s / 4)
        liveness.started, liveness.begun = started, lambda: gatherer.begun
        liveness.idle_after = lambda: gatherer.begun if worker.is_idle else None
        worker.while_blocked = self._tell_blocked
        # A line from the beginning: what the job's store holds does not grow with what happens in a run.
        liveness.block(0, "nothing yet")
        self._begun, self._chain = (-1, -1, -1), tuple[CodeType, ...]()
        self._moved_at, self._since, self._first = 0.0, 0.0, 0
        self._told: Place | None = None
        self._said: set[str] = set()
        self._stop = threading.Event()
        self._thread = start_daemon("whereabouts", self._run, None)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(1.0)

    def leave(self, reason: str) -> None:
        """This process ends, for a `reason` or well: tell the others. Where an error ends it, log who had left before,
        which may be why: torch's errors name nobody."""
        rank, end = self.liveness.rank, f"after {counted(self.trained(), 'micro-batch')}"
        left: dict[int, str] = {}
        with suppress(RuntimeError, OSError):
            left = self.liveness.left([*self.liveness.others, *self.liveness.beside])
        before = "; ".join(f"rank {one} had left: {text}" for one, text in left.items() if text not in reason)
        if reason and before:
            logger.error("rank %d ends with %s. Before that %s", rank, textwrap.shorten(reason, 200), before)
        how = f"with {reason} {end}" if reason else f"without an error {end}. {APART}"
        self.liveness.leave(f"its process ended {how}", failed=bool(reason))

    def _tell_blocked(self) -> None:
        if (inside := self.gatherer.inside) is not None:
            self.liveness.block(inside[0], str(inside[1]))

    def _run(self) -> None:
        try:
            while not self._stop.wait(self.quiet_s / LOOKS):
                self.look(time.monotonic())
        except (RuntimeError, OSError) as error:
            logger.debug("nobody can be told where this rank is: %s", error)

    def look(self, now: float) -> None:
        """Once: tell and say what there is to say at this time in seconds."""
        begun = (self.trained(), self.liveness.started(), self.gatherer.begun)
        if begun != self._begun:
            self._first = begun[1] if begun[0] != self._begun[0] else self._first
            self._begun, self._chain, self._moved_at = begun, (), now
            if self._told is not None:
                self._told = None
                self.liveness.move(None)
            return
        sight = see(self.worker.training_thread)
        if sight.chain != self._chain:
            self._chain, self._since = sight.chain, now
        stands_s, waits = now - self._since, sight.inside and sight.collective
        begin = f"rank {self.liveness.rank}, which has begun {counted(begun[0], 'micro-batch')}, has waited"
        begin = f"{begin} {stands_s:.0f} s {sight.text}"
        if waits and stands_s > KNOWN_S and (known := next(filter(None, (feed.over for feed in self.feeds)), "")):
            self._say(known, f"{begin}, and will in vain: {known}")
        if now - self._moved_at < self.quiet_s:
            return
        place = Place(begun[0], sight.inside, waits and stands_s >= self.quiet_s, sight.text, begun[1])
        if place != self._told:
            self._told = place
            self.liveness.move(place)
        ends = begun[1] > self._first and any(code.co_name == _STEPS[1] for code in sight.chain)
        if place.waits and (elsewhere := self._elsewhere(place, begun[1] + (not ends))):
            words = list(elsewhere.values())
            more = f"; and {len(words) - MOST} more" if len(words) > MOST else ""
            remedy = "" if APART in words[-1] else f". {APART}"
            self._say(" ".join(elsewhere), f"{begin}. Meanwhile {'; '.join(words[:MOST])}{more}{remedy}")

    def _elsewhere(self, mine: Place, ahead: int) -> dict[str, str]:
        """The ranks that are not where this one waits: what is the same each time they are there, and in words. None
        where a lower rank waits, too, and says it. Who is done with this micro-batch, as `ahead` exchanges of its group
        show, is not waited for."""
        found: dict[str, str] = {}
        own, others = self.liveness.others, sorted([*self.liveness.others, *self.liveness.beside])
        left, places = self.liveness.left(others), self.liveness.places(others)
        for rank in others:
            place = places.get(rank)
            if rank in left:
                found[f"{rank}"] = f"rank {rank} has left: {left[rank]}"
            elif place is None or (place.waits and rank > self.liveness.rank):
                continue
            elif place.waits:
                return {}
            elif (place.micro_batches, rank in own) == (mine.micro_batches, True) and place.exchanges >= ahead:
                continue
            elif not place.inside or place.micro_batches < mine.micro_batches:
                found[f"{rank} {place.text}"] = f"rank {rank} is {place.describe()}"
        return found

    def _say(self, what: str, line: str) -> None:
        if what not in self._said:
            self._said.add(what)
            logger.warning(line)


def see(thread: int) -> Sight:
    """What a thread of this process is in, by its number; nothing where it has ended."""
    frames: list[FrameType] = []
    frame = sys._current_frames().get(thread)
    called = list[tuple[FrameType, str]]()
    while frame is not None:
        frames.append(frame)
        file = frame.f_code.co_filename
        # Of the standard library are only ways to wait, and runpy.
        if not file.startswith("<") and not (file.startswith(_LIBRARY) and "-packages" not in file):
            called.append((frame, str(frame.f_globals.get("__name__"))))
        frame = frame.f_back
    if not called:
        return Sight((), False, False, "at its end")
    inner = called[0][0]
    others = (one for one, module in called if not module.startswith("deepspeed_cad"))
    caller = next((one for one in others if "-packages" not in one.f_code.co_filename), inner)
    line = f"{os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}"
    return Sight(
        tuple(one.f_code for one in frames),
        any(one.f_code.co_name in _STEPS for one, _ in called),
        any(module.startswith(_COLLECTIVES) for _, module in called[:INNERMOST]),
        f"at {line}" if inner is caller else f"in {inner.f_code.co_name}, called at {line}",
    )
