"""Gathering: every rank tells the others its segments, on a gloo group and a thread of its own.

All collectives of the session's CPU group run on that one thread, in the order in which the training thread asked for
them, which is the same on every rank. With the lengths travel the package version and the fingerprints of config and
model; a difference ends in an error that names the rank before anything is trained.
"""

from __future__ import annotations

import atexit
import hashlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from deepspeed_cad.ahead.pace import Pace
from deepspeed_cad.errors import CADDataError, CADPeerError
from deepspeed_cad.exchange.liveness import Liveness
from deepspeed_cad.layout import LocalSegments
from deepspeed_cad.threads import start_daemon
from deepspeed_cad.version import __version__

Result = TypeVar("Result")

_VERSION, _CONFIG, _MODEL, _TURN, _TOKENS, _UNIT, _SEGMENTS, _WAITED, _TICKS = range(9)
PATIENCE_S = 10.0
"""How long an ending process waits for its look-ahead thread."""
FAILED = -1
"""In place of a number of segments: this rank could not read its micro-batch."""


def digest(text: str) -> int:
    """62-bit fingerprint of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 2


@dataclass(frozen=True, eq=False)
class Announcement:
    """One rank's micro-batch: its segments and the rows between which ping-pong may cut."""

    local: LocalSegments
    unit: int = 1
    """Cuts are multiples of it: the row length of a batch of several rows, else 1."""


class Worker:
    """Runs jobs one after the other on a daemon thread."""

    def __init__(self, device: torch.device | None = None) -> None:
        """`device`: that of the events which jobs ask about."""
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = start_daemon("look-ahead", self._loop, device)
        # A thread that is still inside a collective when the interpreter goes down takes the process along (SIGABRT).
        atexit.register(self.close)

    def submit(self, job: Callable[[], Result]) -> Future[Result]:
        """Queue a job."""
        future: Future[Result] = Future()
        self._jobs.put((future, job))
        return future

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


class Gatherer:
    """The collectives of the session's CPU group."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        rank: int,
        ranks: int,
        liveness: Liveness | None,
        pace: Pace | None = None,
    ) -> None:
        """`pace` learns from what ranks measured, which travels with the lengths of their documents."""
        self.group, self.rank, self.ranks, self.liveness, self.pace = group, rank, ranks, liveness, pace
        self._turn = 0

    def numbers(self, value: int, what: str) -> list[int]:
        """One number of every rank."""
        return [int(row[0]) for row in self._all(np.array([value]), what)]

    def agree(self, value: int, what: str) -> None:
        """Raise CADPeerError, naming ranks, unless every rank has the same number."""
        values = self.numbers(value, f"the other ranks' {what}")
        common = max(set(values), key=values.count)
        if any(other != common for other in values):
            odd = [rank for rank, other in enumerate(values) if other != common]
            raise CADPeerError(
                f"ranks {odd} have another {what} than the rest: all ranks must run the same code on the same input. "
                "Check that package versions and the compiled library are equal on all machines"
            )

    def segments(self, mine: Announcement | None, config: str, model: str) -> list[Announcement]:
        """Every rank's announcement; None where this rank could not read its micro-batch."""
        header = np.zeros(9, np.int64)
        header[_VERSION], header[_CONFIG], header[_MODEL] = digest(__version__), digest(config), digest(model)
        header[_TURN] = self._turn
        header[_SEGMENTS] = FAILED
        if mine is not None:
            header[_TOKENS], header[_UNIT], header[_SEGMENTS] = mine.local.tokens, mine.unit, len(mine.local.begin)
        if self.pace is not None:
            header[_WAITED], header[_TICKS] = self.pace.report()
        self._turn += 1
        headers = np.stack(self._all(header, "the other ranks' document lengths"))
        self._compare(headers)
        failed = np.flatnonzero(headers[:, _SEGMENTS] == FAILED)
        if len(failed) or mine is None:
            raise CADDataError(f"no micro-batch was trained: {self._said(failed.tolist())}")
        if self.pace is not None:
            self.pace.hear(headers[:, _WAITED], headers[:, _TICKS])
        widest = int(headers[:, _SEGMENTS].max())
        payload = np.zeros((max(widest, 1), 3), np.int64)
        payload[: len(mine.local.begin)] = mine.local.to_array()
        rows = self._all(payload.reshape(-1), "the other ranks' document lengths") if widest else [payload] * self.ranks
        return [
            Announcement(
                LocalSegments.from_array(row.reshape(-1, 3)[: int(head[_SEGMENTS])], int(head[_TOKENS])),
                int(head[_UNIT]),
            )
            for row, head in zip(rows, headers, strict=True)
        ]

    def _compare(self, headers: np.ndarray) -> None:
        for column, what, remedy in (
            (_VERSION, "version of deepspeed_cad", "install the same version everywhere"),
            (_CONFIG, '"cad" block', "give every rank the same configuration"),
            (_MODEL, "model", "load the same model on every rank"),
            (_TURN, "count of micro-batches", "every rank must train the same number of micro-batches"),
        ):
            values = headers[:, column].tolist()
            common = max(set(values), key=values.count)
            odd = [rank for rank, value in enumerate(values) if value != common]
            if odd:
                raise CADPeerError(f"ranks {odd} have another {what} than the rest; {remedy}")

    def _said(self, ranks: list[int]) -> str:
        said = []
        for rank in ranks:
            text = "could not read its micro-batch"
            if self.liveness is not None and self.liveness.store.check([f"error/{rank}"]):
                text = self.liveness.store.get(f"error/{rank}").decode()
            said.append(f"rank {rank}: {text}")
        return "; ".join(said)

    def _all(self, values: np.ndarray, what: str) -> list[np.ndarray]:
        if self.group is None or self.ranks == 1:
            return [values]
        mine = torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))
        everyone = [torch.empty_like(mine) for _ in range(self.ranks)]
        with Liveness.watch(self.liveness, what):
            dist.all_gather(everyone, mine, group=self.group)
        return [tensor.numpy() for tensor in everyone]
