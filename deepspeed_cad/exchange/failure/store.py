"""The job's store, asked with a limit of time.

A store on another host answers over the network, and a link that dies leaves whoever asks it waiting in a call that
nothing ends: no connection is closed, and only `wait` knows a time-out. So a thread of its own asks, and whoever wants
the answer waits for that so long and no longer.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

import torch.distributed as dist

from deepspeed_cad.threads import run_aside

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
