"""The look-ahead thread: jobs one after the other, in the order in which the training thread asked for them."""

import atexit
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any, TypeVar

import torch

from deepspeed_cad.errors import CADError, CADPeerError
from deepspeed_cad.threads import start_daemon

Result = TypeVar("Result")

PATIENCE_S = 10.0
TELL_S = 0.5
GRACE_S = 30.0
"""Added to `timeout_s` where the training thread waits for a job: the job's own time-out says more and comes first."""


class Worker:
    def __init__(self, device: torch.device | None = None, timeout_s: float = 300.0) -> None:
        """`device`: that of the events which jobs ask about. `timeout_s`: seconds to wait for another rank."""
        self.timeout_s = timeout_s
        self.while_blocked: Callable[[], None] = lambda: None
        """Called every TELL_S by a training thread that waits here."""
        self._training: int | None = None
        self._submitted = self._done = 0
        self._closed = False
        self._submitting = threading.RLock()  # a loader that is collected inside submits that it ended
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = start_daemon("look-ahead", self._loop, device)
        # A thread that is still inside a collective when the interpreter goes down takes the process along (SIGABRT).
        atexit.register(self.close)

    def submit(self, job: Callable[[], Result]) -> Future[Result]:
        """Queue a job. Raises CADError behind `close`."""
        future: Future[Result] = Future()
        with self._submitting:
            if self._closed:
                raise CADError(
                    "the session of CAD that this model trains with was closed. Leave it open, or turn CAD on for a "
                    "model that is built anew"
                )
            self._submitted += 1
            self._jobs.put((future, job))
        return future

    def run(self, job: Callable[[], Result]) -> Result:
        """Run a job in its turn and wait for it, at once where the caller is a job itself."""
        return job() if self.is_current() else self.wait(self.submit(job), "the look-ahead thread")

    def wait(self, future: Future[Result], what: str) -> Result:
        """The result of a job; its error is raised here. Raises CADPeerError where it does not end in time."""
        deadline = time.monotonic() + self.timeout_s + GRACE_S
        while not wait_for([future], min(TELL_S, max(0.0, deadline - time.monotonic()))).done:
            if time.monotonic() >= deadline:
                raise CADPeerError(f"waited {self.timeout_s:.0f} s for {what}")
            # A loader may be read on a thread of its own: where that one waits, training goes on.
            if threading.get_ident() == self._training:
                self.while_blocked()
        return future.result()

    def trains_here(self) -> None:
        """The calling thread runs the forwards: where it waits here, this rank starts no exchange meanwhile."""
        self._training = threading.get_ident()

    @property
    def training_thread(self) -> int:
        """Number of the thread that runs the forwards; before the first, that of the main thread."""
        return self._training or threading.main_thread().ident or 0

    @property
    def is_idle(self) -> bool:
        """Whether all jobs so far are over."""
        # In this order: jobs that were done when the first was read are all that there are when the second is.
        return self._done == self._submitted

    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Stop after the jobs that are queued, and wait for that, PATIENCE_S at most."""
        atexit.unregister(self.close)
        with self._submitting:
            self._closed = True
            self._jobs.put(None)
        if not self.is_current():
            self._thread.join(PATIENCE_S)

    def _loop(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        # A call of its own: until the next job comes, this thread holds nothing of a micro-batch.
        if (item := self._jobs.get()) is None:
            return False
        future, job = item
        try:
            future.set_result(job())
        except BaseException as error:
            future.set_exception(error)
        self._done += 1
        return True
