"""The look-ahead thread: jobs one after the other, in the order in which the training thread asked for them."""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

import torch

from deepspeed_cad.errors import CADPeerError
from deepspeed_cad.threads import start_daemon

Result = TypeVar("Result")

PATIENCE_S = 10.0
"""How long an ending process waits for its look-ahead thread."""
GRACE_S = 30.0
"""Added to `timeout_s` where the training thread waits for a job: the job's own time-out says more and comes first."""


class Worker:
    """Runs jobs one after the other on a daemon thread."""

    def __init__(self, device: torch.device | None = None, timeout_s: float = 300.0) -> None:
        """`device`: that of the events which jobs ask about. `timeout_s`: seconds to wait for another rank."""
        self.timeout_s = timeout_s
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = start_daemon("look-ahead", self._loop, device)
        # A thread that is still inside a collective when the interpreter goes down takes the process along (SIGABRT).
        atexit.register(self.close)

    def submit(self, job: Callable[[], Result]) -> Future[Result]:
        """Queue a job."""
        future: Future[Result] = Future()
        self._jobs.put((future, job))
        return future

    def run(self, job: Callable[[], Result]) -> Result:
        """Run a job in its turn and wait for it, at once where the caller is a job itself."""
        return job() if self.is_current() else self.wait(self.submit(job), "the look-ahead thread")

    def wait(self, future: Future[Result], what: str) -> Result:
        """The result of a job; its error is raised here. Raises CADPeerError where it does not end in time."""
        try:
            return future.result(self.timeout_s + GRACE_S)
        except FutureTimeout as error:
            if future.done():
                raise
            raise CADPeerError(f"waited {self.timeout_s:.0f} s for {what}") from error

    def is_current(self) -> bool:
        """Whether the caller is a job of this worker."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Stop after the jobs that are queued, and wait for that, PATIENCE_S at most."""
        atexit.unregister(self.close)
        self._jobs.put(None)
        if not self.is_current():
            self._thread.join(PATIENCE_S)

    def _loop(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        # A call of its own: until the next job comes, this thread holds nothing of a micro-batch.
        item = self._jobs.get()
        if item is None:
            return False
        future, job = item
        try:
            future.set_result(job())
        except BaseException as error:
            future.set_exception(error)
        return True
