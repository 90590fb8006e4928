"""The job's store, asked with a limit of time.

A store on another host answers over the network, and a link that dies leaves whoever asks it waiting in a call that
nothing ends: no connection is closed, and only `wait` knows a time-out. So a thread of its own asks, and whoever wants
the answer waits for that so long and no longer.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

import torch.distributed as dist

from deepspeed_cad.threads import start_daemon

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
