"""The feed: the micro-batches of one model, announced by its loader and taken by its forwards, in the same order.

In: what a loader is about to hand out (`announce`) and what reaches the model (`take`). Out: planned micro-batches, or
an error on every rank where the two differ.
"""

from __future__ import annotations

import logging
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, NoReturn

from deepspeed_cad.ahead.gather import Announcement
from deepspeed_cad.attention.microbatch import MicroBatch, PlanKey
from deepspeed_cad.config import NOT_GLOBAL
from deepspeed_cad.errors import CADConfigError, CADDataError, CADError

if TYPE_CHECKING:
    from deepspeed_cad.session import Session

logger = logging.getLogger("deepspeed_cad")


class Feed:
    """The micro-batches of one model, in the order in which it trains them."""

    def __init__(self, session: Session, fingerprint: str) -> None:
        self.session, self.fingerprint = session, fingerprint
        self.keys: list[PlanKey] = []
        """Kinds of layers seen so far: what the look-ahead plans for."""
        self.exchanges = False
        """Whether documents are exchanged before steps: set where the loss is known to be normalised over all ranks."""
        self._ahead: deque[tuple[Announcement, Future[MicroBatch]]] = deque()

    def announce(self, mine: Announcement) -> None:
        """This rank will train `mine` after everything it announced before; every rank announces as many."""
        self._ahead.append((mine, self._gather(mine)))

    def accept(self, mine: Announcement, planned: Future[MicroBatch]) -> None:
        """Like `announce`, for a micro-batch that the look-ahead thread has planned already."""
        self._ahead.append((mine, planned))

    def gather(self, mine: Announcement | None) -> list[Announcement]:
        """Every rank's announcement, None where this one failed. Runs on the look-ahead thread."""
        return self.session.gatherer.segments(mine, self.session.settings, self.fingerprint)

    def forget(self) -> None:
        """Drop what was announced but not trained: the loader starts again."""
        self._ahead.clear()

    @property
    def next_announced(self) -> Announcement | None:
        """The announced micro-batch that the next forward must be, if the loader announced one."""
        return self._ahead[0][0] if self._ahead else None

    def take(self, mine: Announcement | None, queued: bool = True) -> MicroBatch:
        """The planned micro-batch of this forward. `mine` is None where it is the announced one, unread.

        `queued` is false for a forward that is none of the announced ones; it is the same on every rank.
        """
        if self.session.ranks > 1 and self.session.config.documents == "exchange" and queued and not self.exchanges:
            self.fail(CADConfigError(NOT_GLOBAL), announced=bool(self._ahead))
        if self._ahead and queued:
            announced, future = self._ahead.popleft()
            if mine is not None and not announced.local.same_as(mine.local):
                self.fail(
                    CADDataError(
                        f"rank {self.session.rank}: the micro-batch that reached the model "
                        f"({mine.local.tokens} tokens in {len(mine.local.begin)} documents) is not the one that the "
                        f"loader announced ({announced.local.tokens} in {len(announced.local.begin)}). "
                        'Set "look_ahead": 0 if batches are changed or skipped between loader and model'
                    ),
                    announced=True,
                )
        elif mine is None:
            raise CADError("no micro-batch was announced")
        else:
            self.session.plans_at_forward()
            future = self._gather(mine)
        micro_batch: MicroBatch = self.session.wait(future, "document lengths and plan")
        self.session.count(micro_batch)
        return micro_batch

    def learn(self, key: PlanKey) -> None:
        """Remember a kind of layer, so that the look-ahead plans for it."""
        if key not in self.keys:
            self.keys.append(key)

    def fail(self, error: CADError, announced: bool = False) -> NoReturn:
        """Tell the other ranks why this one cannot go on, then raise.

        Where the others wait for this rank's lengths they learn of it at once; where it had announced them already,
        they do when they next wait for this rank.
        """
        if self.session.liveness is not None:
            self.session.liveness.report(str(error))
        if not announced:
            self._send_failure()
        raise error

    def _send_failure(self) -> None:
        gatherer, config = self.session.gatherer, self.session.settings
        try:
            self.session.on_worker(lambda: gatherer.segments(None, config, self.fingerprint))
        except CADError as error:
            logger.debug("told the other ranks: %s", error)

    def _gather(self, mine: Announcement) -> Future[MicroBatch]:
        session, keys = self.session, list(self.keys)
        config = session.settings

        def job() -> MicroBatch:
            return session.open_micro_batch(session.gatherer.segments(mine, config, self.fingerprint), keys)

        return session.worker.submit(job)
