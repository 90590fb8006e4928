"""The job's store, asked with a limit of time.

A store on another host answers over the network, and a link that dies leaves whoever asks it waiting in a call that
nothing ends: no connection is closed, and only `wait` knows a time-out. So a thread of its own asks, and whoever wants
the answer waits for that so long and no longer.

The store through which torch's symmetric memory lets ranks meet that have not all been there from the start.

Torch numbers what its symmetric memory exchanges, in keys "WHAT/NUMBER/RANK", by a counter of the process
(`StoreExchange` in its CUDASymmetricMemoryUtils.hpp; later versions count for each group). A server that came later has
exchanged less, so its keys would never be those that the others wait for, and all would wait without an end. Here each
number is replaced by its place among those of one group, in which all members exchange the same. Waiting asks again and
again, so it ends where a server is lost, too.

In: what torch asks of a store. Out: the same of the group's store, under names that are alike on all ranks.
"""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from deepspeed_cad.errors import CADPeerError, ServerLostError
from deepspeed_cad.exchange.failure.patience import wait_until
from deepspeed_cad.threads import start_daemon

if TYPE_CHECKING:
    from deepspeed_cad.exchange.failure.watchdog import Alarm

Answer = TypeVar("Answer")

IDLE_S = 30.0
"""The thread ends after so long without a question."""


class SilentStoreError(RuntimeError):
    """The store did not answer in time."""


class PatientStore:
    """What an error board needs of a store, on a thread that may be lost."""

    def __init__(self, store: dist.Store, limit_s: float) -> None:
        """`limit_s`: seconds that an answer may take. While one is overdue, later questions fail at once."""
        self._store, self._limit_s = store, limit_s
        self._questions: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._runs = False
        self._overdue: Future[Any] | None = None

    def get(self, key: str) -> bytes:
        """See dist.Store."""
        return self._ask(lambda: self._store.get(key))

    def check(self, keys: list[str]) -> bool:
        """See dist.Store."""
        return self._ask(lambda: self._store.check(keys))

    def set(self, key: str, value: str) -> None:
        """See dist.Store."""
        self._ask(lambda: self._store.set(key, value))

    def _ask(self, question: Callable[[], Answer]) -> Answer:
        overdue = self._overdue
        if overdue is not None and not overdue.done():
            raise SilentStoreError(f"the job's store has not answered for more than {self._limit_s:g} s")
        answer: Future[Answer] = Future()
        with self._lock:
            self._questions.put((answer, question))
            if not self._runs:
                self._runs = True
                start_daemon("asks the store", self._run, None)
        try:
            return answer.result(self._limit_s)
        except FutureTimeout as error:
            self._overdue = answer
            raise SilentStoreError(f"the job's store did not answer within {self._limit_s:g} s") from error

    def _run(self) -> None:
        while True:
            try:
                answer, question = self._questions.get(timeout=IDLE_S)
            except queue.Empty:
                with self._lock:
                    # A question may have come in between: whoever asked saw this thread run.
                    if self._questions.empty():
                        self._runs = False
                        return
                continue
            try:
                answer.set_result(question())
            except BaseException as error:
                answer.set_exception(error)
            del answer, question


PAUSE_S = 1e-3
_KEY = re.compile(r"(.*)/(\d+)/(\d+)")


class MemoryStore(dist.Store):
    """Of one group, on one rank. Torch holds it by a pointer: whoever registers it has to keep it."""

    def __init__(self, store: dist.Store, alarm: Alarm) -> None:
        super().__init__()
        self._store, self._alarm = store, alarm
        self._places: dict[tuple[str, str], int] = {}

    def set(self, key: str, value: str) -> None:
        """Leave a value."""
        self._store.set(self._rename(key), value)

    def get(self, key: str) -> bytes:
        """A value, when it is there. Raises ServerLostError where a server is lost, CADPeerError where time is up."""
        self.wait([key])
        return self._store.get(self._rename(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Several."""
        return [self.get(key) for key in keys]

    def check(self, keys: list[str]) -> bool:
        """Whether values are there."""
        return self._store.check([self._rename(key) for key in keys])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until values are there; raises as `get`."""

        def are_there() -> bool:
            there = self.check(keys)
            if not there and (lost := self._alarm.lost()):
                raise ServerLostError(lost)
            return there

        if not wait_until(are_there, self._alarm.timeout_s, PAUSE_S):
            raise CADPeerError(
                f"rank {self._alarm.rank} waited {self._alarm.timeout_s:g} s for {', '.join(keys)} while ranks map "
                "each other's memory"
            )

    def _rename(self, key: str) -> str:
        found = _KEY.fullmatch(key)
        if found is None:
            return key
        what, number, rank = found.groups()
        place = self._places.setdefault((what, number), len(self._places))
        return f"{what}/place {place}/{rank}"
