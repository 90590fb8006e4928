"""Notices exchanges that do not end, and those that are not the same on all ranks: a thread that looks a few times
per second.

In: the events before and after each wait on a CUDA stream, what arrives with it, and calls in which the host may
wait. A wait that its stream has reached and not left for `timeout_s` is stuck: a peer died or hangs. Out: the alarm,
which the training thread raises at its next call and the error board tells the other ranks, and a call of `give_up` on
a thread of its own, which is to let the streams go on.
"""

import faulthandler
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch
import torch.distributed as dist

from deepspeed_cad.errors import CADPeerError, ServerLostError
from deepspeed_cad.exchange.failure.board import LOST, Liveness
from deepspeed_cad.exchange.failure.identity import Comparison, Identity
from deepspeed_cad.exchange.failure.patience import LOOK_S
from deepspeed_cad.threads import is_over, run_aside, start_daemon

logger = logging.getLogger(__name__)

PAUSE_S = 0.2
ARRIVAL_PAUSE_S = 1e-4
"""At most, between two looks of the host: what is queued behind an exchange starts late by so much. A choice."""
VAIN_S = 1.0
"""A wait that lasts so long after its stream reached it does not end with what is still on its way from a rank that
stopped."""
AGAIN_S, AGAIN = 1.0, 5
"""A peer that is still alive may undo what let a stream go on: it is done again after so long, so many times."""
LAST_S = 5.0
"""After the last time: a GPU whose streams still stand may be stuck as a whole, because a kernel that is launched for
the first time needs the context to be idle. The training thread, which waits for the GPU too, raises no error then."""
EXIT_CODE = 70


class Alarm:
    """What stops one transport on one rank: a wait that did not end, or ranks that run different exchanges."""

    def __init__(self, rank: int, liveness: Liveness | None, timeout_s: float) -> None:
        """`liveness` None: nobody can be told."""
        self.rank, self.timeout_s = rank, timeout_s
        self.liveness = liveness or Liveness(dist.HashStore(), rank, 0)
        self._waited_for, self._sign, self._reason = "", "", ""
        self.told = False
        """Whether the training thread has had an error of it."""

    def in_job(self, rank: int) -> int:
        """The number that a rank of this group has in the job, as messages give it."""
        watched = self.liveness.watched
        return watched[rank] if rank < len(watched) else rank

    @property
    def sounded(self) -> bool:
        return bool(self._waited_for or self._reason)

    @property
    def goes_on(self) -> bool:
        """Whether the others go on without a server that is lost; on all ranks alike."""
        return self.liveness.losses is not None

    def stop(self, reason: str) -> None:
        """Ranks run different exchanges: say so here and, by the board, on every rank."""
        if not self.sounded:
            self._reason = reason
            self.liveness.stop(reason)

    def time_out(self, waited_for: str, sign: str = "") -> None:
        """Something did not end in time, or by `sign` will not: who is missing is found out when this is raised."""
        if not self.sounded:
            self._waited_for, self._sign = waited_for, sign or f"no sign of it within {self.timeout_s:g} s"
            # Now, and not when it is raised: the training thread may be stuck with its GPU, and the others must not
            # take this rank for the one that died.
            self.liveness.report(f"{LOST} in {waited_for}")

    def why(self) -> str:
        """What the alarm was sounded for, as far as it is known now."""
        return str(self.explain(self._waited_for, RuntimeError(self._sign), patience_s=0.0))

    def check(self) -> None:
        if self.sounded:
            raise self.explain(self._waited_for, RuntimeError(self._sign))

    def explain(self, waited_for: str, error: BaseException, patience_s: float | None = None) -> CADPeerError:
        """The error for something that failed while this rank waited for others; ServerLostError where a server that
        is lost did that, and the others go on."""
        if self._reason:
            explained = CADPeerError(f"rank {self.in_job(self.rank)} stopped: {self._reason}")
        else:
            # An alarm that was sounded has told the others that this rank stopped.
            explained = self.liveness.explain(waited_for, error, not self.sounded, patience_s)
        self.told = self.told or not isinstance(explained, ServerLostError)
        return explained


class _Wait(NamedTuple):
    before: torch.cuda.Event
    after: torch.cuda.Event
    label: object
    then: Callable[[], None] | None


class Watchdog:
    """Watches the waits of one transport, oldest first."""

    def __init__(
        self, alarm: Alarm, give_up: Callable[[], None], device: torch.device | None = None,
        comparison: Comparison | None = None,
    ) -> None:  # fmt: skip
        self.alarm, self.give_up, self.device, self.comparison = alarm, give_up, device, comparison
        self.end_messages: Callable[[], None] | None = None
        """Ends what goes through the group's own processes, not the transport."""
        self.end_process: Callable[[str], None] = _end_process
        self._waits: deque[_Wait] = deque()
        self._host: tuple[object, float] | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._given_up, self._gave_up_at, self._looked_at = 0, 0.0, 0.0
        self.freed = False
        """Whether a call of the host was ended because a server is lost: what it waited for has not come."""
        self._lost_since: float | None = None
        self._freeing: list[Future[None]] = []
        self._reached: tuple[torch.cuda.Event, float] | None = None
        """What is before the oldest wait that its stream has reached, and when that was seen."""

    def track(
        self, before: torch.cuda.Event, after: torch.cuda.Event, label: object, then: Callable[[], None] | None = None
    ) -> None:
        """Watch one wait; `then` is called from the watchdog's thread when it is over."""
        self._waits.append(_Wait(before, after, label, then))
        self._start()

    @contextmanager
    def inside(self, label: object) -> Iterator[None]:
        """Watch a call in which the host may wait for other ranks, as NCCL does when it first connects to one."""
        self._host = (label, time.monotonic())
        self._start()
        try:
            yield
        finally:
            self._host = None

    def wait_for(self, reached: Callable[[], bool], exchange: Identity) -> None:
        """Wait on the host for an exchange, where training goes on without a server that is lost. Raises
        ServerLostError where one is, and CADPeerError as streams do.

        Work that the host has queued far ahead could not be taken back behind a wait that does not end. So here no
        stream ever waits for another rank: what reads an exchange is queued only when all of it is there."""

        def has_arrived() -> bool:
            # First this: what ends a wait by force sounds the alarm, or says that it frees, before it does so.
            found = reached()
            self.alarm.check()
            return found and not self.freed

        with self.inside(exchange):  # it knows how long that may last
            self.alarm.liveness.patiently(
                has_arrived, str(exchange), exchange.index, with_servers=True, longest_pause_s=ARRIVAL_PAUSE_S
            )

    def close(self) -> None:
        """Stop watching; CADPeerError if what arrived last came from another exchange. Nothing is under way."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)
        wait(self._freeing, timeout=5.0)
        if self.alarm.sounded or self.comparison is None:
            return
        self._pop()
        if found := self.comparison.finish():
            self.alarm.stop(found)
            self.alarm.check()

    def abandon(self) -> None:
        self._stop.set()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = start_daemon("watchdog", self._run, self.device)

    def _run(self) -> None:
        try:
            while not self._stop.wait(PAUSE_S):
                if not self._frees():  # the driver may let no call through
                    self._pop()
                self._look(time.monotonic())
        except RuntimeError as error:
            logger.debug("the watchdog of the exchange ends with the CUDA context: %s", error)

    def _pop(self) -> None:
        while self._waits and is_over(self._waits[0].after):
            wait = self._waits.popleft()
            if wait.then is not None:
                wait.then()

    def _look(self, now: float) -> None:
        alarm, board = self.alarm, self.alarm.liveness
        if alarm.sounded:
            return self._let_go(now)
        if board.lost():
            self._reached = None
            return self._free_host(now)
        asks = bool(self._waits or self._host) and now - self._looked_at > LOOK_S
        self._looked_at = now if asks else self._looked_at
        if found := (self.comparison and self.comparison.look()) or (asks and board.stopped()):
            alarm.stop(found)
            return self._let_go(now)
        for label, since in self._standing(now):
            if now - since > alarm.timeout_s:
                alarm.time_out(str(label))
                logger.error("%s did not end in time; a peer died or hangs", label)
                return self._let_go(now)
            index = label.index if isinstance(label, Identity) else 0
            if asks and now - since > VAIN_S and (found := board.why_hopeless(index)):
                if board.only_lost():
                    # They do not say whom they lost, which is what a user needs to know.
                    alarm.time_out(str(label), found)
                else:
                    alarm.stop(f"waited for {label}: {found}")
                return self._let_go(now)

    def _standing(self, now: float) -> Iterator[tuple[object, float]]:
        if (host := self._host) is not None:
            yield host
        if self._waits and is_over((oldest := self._waits[0]).before):
            if self._reached is None or self._reached[0] is not oldest.before:
                self._reached = (oldest.before, now)
            yield oldest.label, self._reached[1]

    def _free(self) -> None:
        """Not on this thread: it must be there to end the process where the driver lets no call through. And side by
        side: a communicator of NCCL may be left only when the GPU stands in no other one."""
        ends = [end for end in (self.give_up, self.end_messages) if end is not None]
        self._freeing = [run_aside("frees the GPU", end, self.device) for end in ends]

    def _free_host(self, now: float) -> None:
        """A server is lost, the others go on, and the transport will be given up: nothing is an error, however long it
        lasts. Only a call of the host that does not come back, as NCCL's where it first connects, is to be ended."""
        self._lost_since = now if self._lost_since is None else self._lost_since
        if self.freed or (host := self._host) is None or now - max(host[1], self._lost_since) < VAIN_S:
            return
        self.freed = True
        self._free()

    def _frees(self) -> bool:
        return not all(end.done() for end in self._freeing)

    def _let_go(self, now: float) -> None:
        first, again = not self._given_up, self._given_up < AGAIN and now - self._gave_up_at > AGAIN_S
        if first or (again and (self._waits or self._host) and not self._frees()):
            self._given_up, self._gave_up_at = self._given_up + 1, now
            self._free()
        elif not self.alarm.told and now - self._gave_up_at > LAST_S:
            stands = self._host is not None or self._frees()  # or what was to end a wait does not come back
            if not (stands or (self._waits and is_over(self._waits[0].before) and not is_over(self._waits[0].after))):
                return
            what = "The GPU" if self._host is None else "The training thread"
            self.end_process(f"{self.alarm.why()}. {what} could not be freed from its wait, so this process ends")


def _end_process(reason: str) -> None:
    """As torch's watchdog of NCCL does: better a process that ends, and says why and where, than one that hangs."""
    with suppress(OSError, ValueError):  # an output that is no file
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
    sys.stderr.write(f"deepspeed_cad: {reason}\n")
    sys.stderr.flush()
    os._exit(EXIT_CODE)
