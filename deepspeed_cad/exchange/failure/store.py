"""The job's store in two forms: asked with a limit of time, and as torch's symmetric memory has to see it.

A store on another host answers over the network, and a link that dies leaves whoever asks it waiting in a call that
nothing ends: no connection is closed, and only `wait` knows a time-out. So a thread of its own asks, and whoever wants
the answer waits for that so long and no longer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from deepspeed_cad.errors import CADPeerError
from deepspeed_cad.threads import run_aside

if TYPE_CHECKING:
    from deepspeed_cad.exchange.failure.watchdog import Alarm

Answer = TypeVar("Answer")


class SilentStoreError(RuntimeError):
    """The store did not answer in time."""


class PatientStore:
    """What an error board needs of a store, on threads that may be lost."""

    def __init__(self, store: dist.Store, limit_s: float) -> None:
        """`limit_s`: seconds that an answer may take. While one is overdue, later questions fail at once."""
        self._store, self._limit_s = store, limit_s
        self._overdue: Future[Any] | None = None

    def read(self, keys: list[str]) -> dict[str, str]:
        """What is there of these: one question, however many they are."""
        store = self._store
        return self._ask(lambda: {key: store.get(key).decode() for key in keys if store.check([key])})

    def check(self, keys: list[str]) -> bool:
        """See dist.Store."""
        return self._ask(lambda: self._store.check(keys))

    def set(self, key: str, value: str) -> None:
        """See dist.Store."""
        self._ask(lambda: self._store.set(key, value))

    def _ask(self, question: Callable[[], Answer]) -> Answer:
        if self._overdue is not None and not self._overdue.done():
            raise SilentStoreError(f"the job's store has not answered for more than {self._limit_s:g} s")
        try:
            answer = run_aside("asks the store", question)
        except RuntimeError:  # Python 3.12.1 starts no thread at the end of a process, where a rank says so
            return question()
        try:
            return answer.result(self._limit_s)
        except FutureTimeout as error:
            self._overdue = answer
            raise SilentStoreError(f"the job's store did not answer within {self._limit_s:g} s") from error


_KEY = re.compile(r"(.*)/(\d+)/(\d+)")


class MemoryStore(dist.Store):
    """The store of one group through which its ranks map each other's memory, not all of them there from the start.

    Torch numbers what its symmetric memory exchanges, in keys "WHAT/NUMBER/RANK", by a counter of the process
    (`StoreExchange` in its CUDASymmetricMemoryUtils.hpp; later versions count for each group). A server that came later
    has exchanged less, so its keys would never be those that the others wait for. Here each number is replaced by its
    place among those of the group, in which all members exchange the same.

    Torch holds it by a pointer: whoever registers it has to keep it.
    """

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

    def check(self, keys: list[str]) -> bool:
        """Whether values are there."""
        return self._store.check([self._rename(key) for key in keys])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until values are there; raises as `get`."""
        alarm = self._alarm
        # Asked again and again, so that it ends where a server is lost.
        if not alarm.liveness.patiently(
            lambda: self.check(keys), "other ranks' memory", with_servers=True, timeout_s=alarm.timeout_s
        ):
            raise CADPeerError(
                f"rank {alarm.rank} waited {alarm.timeout_s:g} s for {', '.join(keys)} while ranks map "
                "each other's memory"
            )

    def _rename(self, key: str) -> str:
        found = _KEY.fullmatch(key)
        if found is None:
            return key
        what, number, rank = found.groups()
        place = self._places.setdefault((what, number), len(self._places))
        return f"{what}/place {place}/{rank}"
