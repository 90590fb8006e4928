"""How a rank waits for what others do, where nothing wakes it: it asks, pauses, and looks around now and then.

And the job's store, asked with a limit of time: a link that dies leaves whoever asks in a call that nothing ends.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

import torch.distributed as dist

from deepspeed_cad.threads import run_aside

Answer = TypeVar("Answer")

LOOK_S = 0.5
"""Between two looks at the error board while a rank waits."""
LATE_S = 10.0
"""Of waiting after which ranks that did not come are named."""
FIRST_PAUSE_S, EXCHANGE_PAUSE_S, PAUSE_S = 20e-6, 1e-3, 0.25
"""Between two questions: at first; at most where an exchange is waited for; at most where many ranks ask one store."""
SHARE = 1 / 8
"""A pause is as long as this share of what was waited before it, so nobody waits much longer than is needed."""


def _nothing(*given: object) -> None:
    pass


def wait_until(
    ask: Callable[[], Answer],
    timeout_s: float,
    look_around: Callable[[], object] = _nothing,
    longest_pause_s: float = PAUSE_S,
    when_late: Callable[[float], object] = _nothing,
) -> Answer:
    """What `ask` gives as soon as that is true, or when time is up. `look_around`: called about every LOOK_S; raises
    where waiting is in vain. `longest_pause_s`: between two questions. `when_late`: called once, after LATE_S, with
    the seconds so far."""
    began = looked = time.monotonic()
    while not (answer := ask()):
        waited_s = (now := time.monotonic()) - began
        if waited_s > LATE_S:
            when_late(waited_s)
            when_late = _nothing
        if waited_s > timeout_s:
            break
        if now - looked > LOOK_S:
            looked = now
            look_around()
        time.sleep(min(max(SHARE * waited_s, FIRST_PAUSE_S), longest_pause_s))
    return answer


class SilentStoreError(RuntimeError):
    """The store did not answer in time."""


class PatientStore:
    """What an error board needs of a store, asked by threads that may be lost."""

    def __init__(self, store: dist.Store, limit_s: float) -> None:
        """`limit_s`: seconds that an answer may take. While one is overdue, later questions fail at once."""
        self._store, self._limit_s = store, limit_s
        self._overdue: Future[Any] | None = None

    def read(self, keys: list[str]) -> dict[str, str]:
        """What is there of these: one question, however many they are."""
        store = self._store
        return self._ask(lambda: {key: store.get(key).decode() for key in keys if store.check([key])})

    def check(self, keys: list[str]) -> bool:
        return self._ask(lambda: self._store.check(keys))

    def set(self, key: str, value: str) -> None:
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
