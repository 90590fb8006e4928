"""A step ahead: the micro-batches of one optimizer step are arranged together, before the first of them is trained.

In: this rank's micro-batches of a step, as its loader gave them. Out: the same in the order in which heavy ones meet
heavy ones on the other ranks, with documents exchanged where the config says so, announced to the feed. The work runs
on the look-ahead thread; the training thread submits a step and takes it when it is due.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deepspeed_cad.ahead.assign import Assignment, StepDocuments, assign_documents, order_rows
from deepspeed_cad.ahead.documents import read_documents
from deepspeed_cad.ahead.feed import Feed
from deepspeed_cad.ahead.gather import Announcement, digest
from deepspeed_cad.ahead.move_documents import Fields, Moved, exchange_documents, read_fields
from deepspeed_cad.attention.microbatch import MicroBatch, PlanKey
from deepspeed_cad.cost import PAIRS
from deepspeed_cad.errors import CADError, CADUnsupportedError
from deepspeed_cad.layout import LocalSegments

logger = logging.getLogger("deepspeed_cad")


@dataclass(eq=False)
class Arranged:
    """A step on this rank as it will be trained; its first micro-batch is planned."""

    moved: list[Moved]
    announcements: list[Announcement]
    first: MicroBatch


@dataclass(eq=False)
class Step:
    """A step that was submitted."""

    batches: list[Any]
    arranged: Future[Arranged] | None
    """None: trained as it is, and announced when it was submitted."""
    error: CADError | None = None
    """A micro-batch cannot be read. The other ranks learn of it when they gather this step's lengths."""


class StepAhead:
    """Arranges the steps of one model's loader, in the order in which they are trained."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self.last: Assignment | None = None
        """How the documents of the step arranged last were assigned; None where none were."""
        self._said: set[str] = set()

    def submit(self, batches: list[Any]) -> Step:
        """Announce a step's micro-batches, or begin to arrange them; every rank submits as many."""
        session = self.feed.session
        exchange = self.feed.exchanges and session.ranks > 1
        alone = len(batches) == 1 or session.ranks == 1
        if not all(_is_readable(batch) for batch in batches) or (alone and not exchange):
            for batch in batches:
                announce(self.feed, batch)
            return Step(batches, None)
        try:
            announcements = [read_documents(batch) for batch in batches]
        except CADError as error:
            # Raised when the step is due: the one before is still to be trained, on every rank.
            if session.liveness is not None:
                session.liveness.report(str(error))
            return Step(batches, session.worker.submit(self._fail), error)
        keys, ready = list(self.feed.keys), _copied(batches[0])

        def job() -> Arranged:
            ready()
            return self._arrange(batches, announcements, keys, exchange)

        return Step(batches, session.worker.submit(job))

    def hand_out(self, step: Step) -> list[Any]:
        """The micro-batches of a step in the order of training, announced. Waits until they are arranged."""
        if step.arranged is None:
            return step.batches
        if step.error is not None:
            wait([step.arranged], self.feed.session.config.timeout_s)
            raise step.error
        arranged = self.feed.session.wait(step.arranged, "the documents of a step")
        planned: Future[MicroBatch] = Future()
        planned.set_result(arranged.first)
        self.feed.accept(arranged.announcements[0], planned)
        for mine in arranged.announcements[1:]:
            self.feed.announce(mine)
        return [one.on_device() for one in arranged.moved]

    # On the look-ahead thread

    def _fail(self) -> Arranged:
        self.feed.gather(None)
        raise CADError("this rank could not read a micro-batch")

    def _arrange(
        self, batches: list[Any], announcements: list[Announcement], keys: list[PlanKey], exchange: bool
    ) -> Arranged:
        session, feed = self.feed.session, self.feed
        fields, fixed = self._fields(batches, announcements) if exchange else (None, [True] * len(batches))
        table = _to_table(announcements, fixed, 0 if fields is None else digest(repr(fields)))
        tables = [one.local.to_array() for one in feed.gather(table)]
        moved = [Moved(batch, {}) for batch in batches]
        if len({int(one[0, 0]) for one in tables}) == 1:
            step = _to_step(tables)
            # Before the first forward, no kind of layer is known.
            work = step.work([(session.cost.cost_for(key.shape), key.window) for key in keys] or [(PAIRS, None)])
            if exchange and fields_agree(tables, self._say):
                assignment = assign_documents(step, work, session.config.tolerance)
                session.gatherer.agree(assignment.fingerprint(), "assignment of documents")
                moved = exchange_documents(batches, fields or Fields((), ()), step, assignment, session.gatherer)
                self.last = assignment
                logger.debug(
                    "documents exchanged: %d tokens, attention max/mean %.3f instead of %.3f", assignment.tokens_moved,
                    assignment.imbalance, assignment.imbalance_before,
                )  # fmt: skip
            else:
                moved = [Moved(batches[i], {}) for i in order_rows(step, work)[session.rank]]
        known = {id(batch): mine for batch, mine in zip(batches, announcements)}
        announcements = [known[id(one.batch)] if id(one.batch) in known else read_documents(one.batch) for one in moved]
        return Arranged(moved, announcements, session.open_micro_batch(feed.gather(announcements[0]), keys))

    def _fields(
        self, batches: Sequence[Any], announcements: Sequence[Announcement]
    ) -> tuple[Fields | None, list[bool]]:
        """The fields that travel, and which micro-batches cannot take part."""
        common: Fields | None = None
        fixed = []
        for batch, mine in zip(batches, announcements):
            found = read_fields(batch, mine)
            if isinstance(found, Fields) and common is not None and found != common:
                found = "its fields differ from those of the step's other micro-batches"
            if isinstance(found, Fields):
                common = found
            else:
                self._say(found)
            fixed.append(not isinstance(found, Fields))
        return common, fixed

    def _say(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            logger.warning("deepspeed_cad: documents of a micro-batch are not exchanged: %s", reason)


def fields_agree(tables: Sequence[np.ndarray], say: Callable[[str], None]) -> bool:
    """Whether the micro-batches of all ranks that take part have the same fields."""
    names = {int(one[0, 1]) for one in tables} - {0}
    if len(names) > 1:
        say("the fields of micro-batches, or their types, differ between ranks")
    return len(names) == 1


def allow_exchange(feed: Feed, model: torch.nn.Module) -> None:
    """Let a model's documents be exchanged: called where the loss is known to be normalised over the global batch.

    Raises CADUnsupportedError for a model whose loss is not a sum over tokens.
    """
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "output_router_logits", False):
            raise CADUnsupportedError(
                '"documents": "exchange" with output_router_logits=True: the router\'s auxiliary loss is computed for '
                "each micro-batch, so it depends on which documents share one. Turn one of them off"
            )
    feed.exchanges = True


def announce(feed: Feed, batch: Any) -> None:
    """Announce a micro-batch if it is a dict that says where its documents are; otherwise its forward will."""
    if not _is_readable(batch):
        return
    try:
        mine = read_documents(batch)
    except CADError as error:
        feed.fail(error)
    feed.announce(mine)


def _is_readable(batch: Any) -> bool:
    return isinstance(batch, Mapping) and ("input_ids" in batch or "inputs_embeds" in batch)


def _copied(batch: Mapping[str, Any]) -> Callable[[], None]:
    """What waits until the loader's copies to the GPU are made, whatever stream they run on."""
    for value in batch.values():
        if isinstance(value, torch.Tensor) and value.is_cuda:
            event = torch.cuda.current_stream(value.device).record_event()
            return event.synchronize
    return lambda: None


def _to_table(announcements: Sequence[Announcement], fixed: Sequence[bool], fields: int) -> Announcement:
    """A step as the [n, 3] table that segments travel in: the step, its micro-batches, then their segments."""
    rows = [(len(announcements), fields, 0)]
    rows += [(one.local.tokens, int(f), len(one.local.begin)) for one, f in zip(announcements, fixed)]
    table = np.concatenate([np.array(rows, np.int64), *(one.local.to_array() for one in announcements)])
    return Announcement(LocalSegments.from_array(table, 0))


def _to_step(tables: Sequence[np.ndarray]) -> StepDocuments:
    count = int(tables[0][0, 0])
    heads = np.stack([one[1 : count + 1] for one in tables])
    segments = np.concatenate([one[count + 1 :] for one in tables])
    return StepDocuments(
        np.repeat(np.arange(len(tables)), heads[:, :, 2].sum(axis=1)),
        np.concatenate([np.repeat(np.arange(count), head[:, 2]) for head in heads]),
        segments[:, 0], segments[:, 1], heads[:, :, 0], heads[:, :, 1].astype(bool),
    )  # fmt: skip
