"""A step ahead: the micro-batches of one optimizer step are arranged together, before the first of them is trained.

In: this rank's micro-batches of a step, as its loader gave them. Out: the same in the order in which heavy ones meet
heavy ones on the other ranks, with documents exchanged where the config says so, announced to the feed. The work runs
on the look-ahead thread; the training thread submits a step and takes it when it is due.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from deepspeed_cad.ahead.assign import Assignment, assign_documents, order_rows
from deepspeed_cad.ahead.documents import Announcement, read_documents
from deepspeed_cad.ahead.feed import EpochOverError, Feed
from deepspeed_cad.ahead.gather import Subject, What, digest
from deepspeed_cad.ahead.move_documents import Fields, Moved, exchange_documents, read_fields
from deepspeed_cad.ahead.step_message import StepMessage, to_documents
from deepspeed_cad.attention.microbatch import MicroBatch, PlanKey
from deepspeed_cad.cost import PAIRS
from deepspeed_cad.errors import CADError, CADUnsupportedError

logger = logging.getLogger("deepspeed_cad")

ORDERED = (
    "ranks but 0 train the micro-batches of a step in another order, so compare losses of whole steps, or set "
    '"documents": "in_order"'
)
EXCHANGED = "documents change ranks within a step, so compare losses of whole steps, summed over ranks"
"""What a user must know who compares losses with those of a run without CAD."""


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
    arranged: Future[Arranged] | None = None
    """None: trained as it is, and announced when it was submitted."""
    announcements: list[Announcement] = field(default_factory=list)
    ended: bool = False
    """The loader ended within this step: other ranks may have more in it."""
    error: CADError | None = None
    """A micro-batch cannot be read. The other ranks learn of it when they gather this step's lengths."""


class StepAhead:
    """Arranges the steps of one model's loader, in the order in which they are trained."""

    def __init__(self, feed: Feed, accumulation: int = 1) -> None:
        """`accumulation`: micro-batches per optimizer step, the same on every rank."""
        self.feed, self.accumulation = feed, accumulation
        self.last: Assignment | None = None
        """How the documents of the step arranged last were assigned; None where none were."""
        self._said: set[str] = set()

    def submit(self, batches: list[Any], ended: bool = False) -> Step | None:
        """Announce a step's micro-batches, or begin to arrange them; None where there are none: the loader ended.

        Every rank calls it for every step. How many micro-batches a rank has may differ where its loader `ended`.
        """
        # What all ranks do alike must not depend on how many micro-batches this one has.
        together = self.feed.replicas > 1 and (self.accumulation > 1 or self.feed.exchanges)
        together = together and self.feed.config.documents != "in_order" and not self.feed.shares.pieces
        if not all(_is_readable(batch) for batch in batches):
            together = False
        if not together:
            for batch in batches:
                announce(self.feed, batch)
            if not batches:
                self.feed.end()
            return Step(batches) if batches else None
        at, keys, exchange = self.feed.next_step(), dict(self.feed.keys), self.feed.exchanges
        try:
            announcements = [read_documents(batch) for batch in batches]
        except CADError as error:
            # Raised when the step is due: the one before is still to be trained, on every rank.
            self.feed.fail_later(error)
            return Step(batches, error=error)
        if not batches:
            self.feed.worker.submit(lambda: self.feed.gather_step(at, np.zeros(0, np.int64)))
            return None
        ready = _copied(batches[0])

        def job() -> Arranged:
            ready()
            return self._arrange(at, batches, announcements, keys, exchange)

        ended = ended and len(batches) < self.accumulation
        return Step(batches, self.feed.worker.submit(job), announcements, ended)

    def hand_out(self, step: Step) -> list[Any]:
        """The micro-batches of a step in the order of training, announced. Waits until they are arranged."""
        if step.error is not None:
            raise step.error
        if step.arranged is None:
            return step.batches
        try:
            arranged = self.feed.worker.wait(step.arranged, "the documents of a step")
        except EpochOverError as error:
            # Given out all the same: only training them would be wrong.
            for mine in step.announcements:
                late: Future[MicroBatch] = Future()
                late.set_exception(error)
                self.feed.accept(mine, late)
            return step.batches
        planned: Future[MicroBatch] = Future()
        planned.set_result(arranged.first)
        self.feed.accept(arranged.announcements[0], planned)
        for mine in arranged.announcements[1:]:
            self.feed.announce(mine)
        if step.ended:
            # Ranks that have more in this step drop the rest when they hear that this one ended.
            self.feed.end()
        return [one.on_device() for one in arranged.moved]

    # On the look-ahead thread

    def _arrange(
        self,
        at: tuple[int, int, int],
        batches: list[Any],
        announcements: list[Announcement],
        keys: dict[PlanKey, int],
        exchange: bool,
    ) -> Arranged:
        feed = self.feed
        with feed.between_collectives("the documents of a step"):
            fields, fixed = self._fields(batches, announcements) if exchange else (None, [True] * len(batches))
            message = StepMessage(announcements, fixed, 0 if fields is None else digest(repr(fields))).to_array()
        every = feed.gather_step(at, message)
        said = [StepMessage.from_array(every[rank]) for rank in feed.shares.members]
        with feed.between_collectives("the documents of a step"):
            moved = self._place(at, batches, said, fields, keys, exchange)
            known = {id(batch): mine for batch, mine in zip(batches, announcements)}
            mine = [known[id(one.batch)] if id(one.batch) in known else read_documents(one.batch) for one in moved]
        return Arranged(moved, mine, feed.plans.open(feed.gather_first(at, mine[0]), keys, feed.number))

    def _place(
        self,
        at: tuple[int, int, int],
        batches: list[Any],
        said: list[StepMessage],
        fields: Fields | None,
        keys: dict[PlanKey, int],
        exchange: bool,
    ) -> list[Moved]:
        """The micro-batches that this rank trains, in order."""
        feed, gatherer = self.feed, self.feed.gatherer
        if len({len(one.micro_batches) for one in said}) > 1:
            return [Moved(batch, {}) for batch in batches]
        step = to_documents(said)
        if not step.spans_ranks:
            feed.arranged = EXCHANGED if exchange else ORDERED
        # Before the first forward, no kind of layer is known.
        cost = feed.plans.cost
        work = step.work([(cost.cost_for(key.shape), key.window) for key in keys] or [(PAIRS, None)])
        if not exchange or not fields_agree(said, self._say):
            return [Moved(batches[i], {}) for i in order_rows(step, work)[feed.shares.replica]]
        assignment = assign_documents(step, work, feed.config.tolerance)
        gatherer.agree(assignment.fingerprint(), Subject(What.ASSIGNMENT, feed.number, *at[:2]))
        moved = exchange_documents(batches, fields or Fields((), ()), step, assignment, gatherer)
        self.last = assignment
        logger.debug(
            "documents exchanged: %d tokens, attention max/mean %.3f instead of %.3f", assignment.tokens_moved,
            assignment.imbalance, assignment.imbalance_before,
        )  # fmt: skip
        return moved

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


def fields_agree(said: Sequence[StepMessage], say: Callable[[str], None]) -> bool:
    """Whether the micro-batches of all ranks that take part have the same fields."""
    names = {one.fields for one in said} - {0}
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
