"""A step ahead: the micro-batches of one optimizer step are arranged together, before the first of them is trained.

In: this rank's micro-batches of a step, as its loader gave them. Out: the same in the order in which heavy ones meet
heavy ones on the other ranks, or with documents dealt out to all ranks, announced to the feed. The work runs
on the look-ahead thread; the training thread submits a step and takes it when it is due.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch

from deepspeed_cad.ahead.announced import IN_ORDER, NO_PADDING, STAYS, StepMessage, to_documents
from deepspeed_cad.ahead.documents import Announcement
from deepspeed_cad.ahead.feed import ON_ITS_OWN, EpochOverError, Feed, InStep, StepAt
from deepspeed_cad.ahead.gather import Subject, What, digest
from deepspeed_cad.ahead.move_documents import Fields, Moved, move_documents, read_fields, read_padding
from deepspeed_cad.attention.microbatch import MicroBatch, PlanKey
from deepspeed_cad.errors import CADError
from deepspeed_cad.layout import Ints
from deepspeed_cad.notice import notice
from deepspeed_cad.planner.deal import deal, order_rows

logger = logging.getLogger("deepspeed_cad")

ORDERED = (
    "ranks but 0 train the micro-batches of a step in another order, so compare losses of whole steps, or set "
    '"documents": "in_order"'
)
DEALT = "documents are dealt out to all ranks before each step, so compare losses of whole steps, summed over ranks"
"""What a user must know who compares losses with those of a run without CAD."""
NOT_STATED = "nothing says that the loss is divided by the targets of all ranks"
AT_RANDOM = cache(re.compile(r"drop|jitter|noise").search)
"""Finds names of attributes of modules that are probabilities, or sizes, of what falls on tokens at random."""
EXPERTS = "deepspeed.moe."
OF_EXPERTS = "DeepSpeed's mixture of experts has a capacity and a loss of all tokens of a micro-batch"
Due = Callable[[], list[Any]]
"""Called when a step is due: gives its micro-batches in the order of training, announced."""
Arranged = tuple[list[Moved], list[Announcement], MicroBatch]
"""A step on this rank as it will be trained, its announcements, and its first micro-batch, planned."""


class StepAhead:
    def __init__(self, feed: Feed, accumulation: int = 1) -> None:
        """`accumulation`: micro-batches per optimizer step, the same on every rank."""
        self.feed, self.accumulation = feed, accumulation
        feed.read_ahead = True
        self._said: set[str] = set()

    @property
    def together(self) -> bool:
        """Whether the micro-batches of a step are arranged."""
        feed = self.feed
        more = feed.replicas > 1 and ((self.accumulation > 1 and feed.orders) or feed.deals)
        return bool(more and feed.config.documents != "in_order" and not feed.shares.pieces)

    def submit(self, batches: list[Any], ended: bool = False) -> Due | None:
        """Announce a step's micro-batches, or begin to arrange them; None where there are none: the loader ended. Every
        rank calls it for every step. How many micro-batches a rank has may differ where its loader `ended`."""
        feed = self.feed
        # What all ranks do alike must not depend on how many micro-batches this one has.
        together = self.together and all(map(_is_readable, batches))
        at = feed.next_step() if together else None
        try:
            announcements = [feed.read(batch) for batch in batches if _is_readable(batch)]
        except CADError as error:
            # Raised when the step is due: the one before is still to be trained, on every rank.
            feed.fail_later(error)
            failed: Future[list[Any]] = Future()
            failed.set_exception(error)
            return failed.result
        if at is None:
            for mine in announcements:  # of others their forward says where documents are
                feed.announce(mine)
            if not batches or (ended and len(batches) < self.accumulation):
                feed.end()
            return (lambda: batches) if batches else None
        keys, stays = dict(feed.keys), IN_ORDER if feed.holds else None if feed.deals else STAYS
        if not batches:
            feed.worker.submit(lambda: feed.gather_step(at, None))
            return None
        ready = _copied(batches[0])

        def job() -> Arranged:
            ready()
            return self._arrange(at, batches, announcements, keys, stays)

        arranged = feed.worker.submit(job)
        return lambda: self._hand_out(at, arranged, batches, announcements, ended and len(batches) < self.accumulation)

    def _hand_out(
        self, at: StepAt, arranged: Future[Arranged], batches: list[Any], announcements: list[Announcement], ended: bool
    ) -> list[Any]:
        """`ended`: the loader did within this step, and other ranks may have more in it."""
        feed, planned = self.feed, Future[MicroBatch]()
        try:
            moved, announcements, first = feed.worker.wait(arranged, "the documents of a step")
        except EpochOverError as error:
            # Given out all the same: only training them would be wrong.
            planned.set_exception(error)
            for mine in announcements:
                feed.accept(mine, planned)
            return batches
        planned.set_result(first)
        size = len(announcements)
        places = [InStep(at, place, size) if feed.arranged else ON_ITS_OWN for place in range(size)]
        feed.accept(announcements[0], planned, places[0])
        for mine, place in zip(announcements[1:], places[1:]):
            feed.announce(mine, at=place)
        if ended:
            # Ranks that have more in this step drop the rest when they hear that this one ended.
            feed.end()
        return [one.on_device() for one in moved]

    # On the look-ahead thread

    def _arrange(
        self, at: StepAt, batches: list[Any], announcements: list[Announcement], keys: dict[PlanKey, int],
        stays: int | None,
    ) -> Arranged:  # fmt: skip
        feed = self.feed
        with feed.between_collectives():
            found = self._fields(batches, announcements) if stays is None else None
            fields, padding = (None, NO_PADDING) if found is None else found
            message = StepMessage(announcements, stays or STAYS if fields is None else digest(repr(fields)), padding)
        every = feed.gather_step(at, message.to_array())
        said = [StepMessage.from_array(every[rank]) for rank in feed.shares.members]
        with feed.between_collectives():
            moved, loaded = self._place(at, batches, said, fields, keys)
            known = {id(batch): mine for batch, mine in zip(batches, announcements)}
            mine = [known[id(one.batch)] if id(one.batch) in known else feed.read(one.batch) for one in moved]
            mine = [replace(one, loaded=int(tokens)) for one, tokens in zip(mine, loaded)]
        return moved, mine, feed.plans.open(feed.gather_lengths(at[0], at[2], mine[0]), keys, feed.number)

    def _place(
        self, at: StepAt, batches: list[Any], said: list[StepMessage], fields: Fields | None, keys: dict[PlanKey, int]
    ) -> tuple[list[Moved], Ints]:
        """The micro-batches that this rank trains, in order, and the tokens that its loader gave in their places."""
        feed, replica = self.feed, self.feed.shares.replica
        as_loaded = [Moved(batch, {}) for batch in batches]
        own = np.array([one.local.tokens for one in said[replica].micro_batches])
        if len({len(one.micro_batches) for one in said}) > 1 or any(one.fields == IN_ORDER for one in said):
            return as_loaded, own
        documents = to_documents(said, padded=fields is not None and fields.padded)
        if (documents.begin > 0).any():  # from the rank before: micro-batches belong together across ranks
            return as_loaded, own
        step, costs = documents.step, feed.plans.step_costs(documents, keys, feed.number)
        order = order_rows(step.sums(costs.work))[replica]
        padding = self._agreed(said, fields)
        feed.arranged = ORDERED if padding is None and self.accumulation > 1 else DEALT if padding is not None else ""
        if padding is not None and fields is not None:
            crew = feed.plans.crew
            if crew.servers is not None:
                # Servers make attention even; what trainers do besides is their tokens.
                costs = replace(costs, work=np.zeros_like(costs.work))
            hosts = crew.hosts if crew.several_hosts else None
            cuts = feed.cuts and fields.cuts and crew.servers is None
            dealt = deal(step, costs, feed.config.tolerance, hosts, cuts)
            feed.gatherer.agree(0 if dealt is None else dealt.fingerprint(), Subject(What.DEAL, feed.number, *at[:2]))
            if dealt is not None:
                return move_documents(batches, fields, padding, documents, dealt, feed.gatherer), own[order]
        return [as_loaded[i] for i in order], own[order]

    def _fields(self, batches: Sequence[Any], announcements: Sequence[Announcement]) -> tuple[Fields, Ints] | None:
        """The fields of a step, and what is in its padding; None, and a line that says why, where documents stay."""
        each = [read_fields(batch, mine) for batch, mine in zip(batches, announcements)]
        fields = next((one for one in each if isinstance(one, str)), each[0])
        if any(one != fields for one in each) and not isinstance(fields, str):
            fields = "its fields differ from those of the step's other micro-batches"
        padding: Ints | str = NO_PADDING
        if not isinstance(fields, str) and fields.padded:
            padding = read_padding(batches, fields, announcements)
        if isinstance(fields, str) or isinstance(padding, str):
            self._say(fields if isinstance(fields, str) else str(padding))
            return None
        return fields, padding

    def _agreed(self, said: Sequence[StepMessage], fields: Fields | None) -> Ints | None:
        """What is in padding on all ranks; None where documents stay."""
        names = {one.fields for one in said}
        paddings = {one.padding.tobytes(): one.padding for one in said if len(one.padding)}
        if fields is None or STAYS in names:
            return None
        if fields.unknown and not paddings:
            self._say(f'its field "{fields.unknown[0]}" is new to CAD, and no rank has padding that shows its value')
            return None
        if len(names) > 1 or len(paddings) > 1:
            self._say(f"the {'fields' if len(names) > 1 else 'padding'} of micro-batches differ between ranks")
            return None
        return next(iter(paddings.values()), NO_PADDING)

    def _say(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            logger.warning("deepspeed_cad: documents stay on their ranks in a step with such a micro-batch: %s", reason)


def settle(feed: Feed, model: torch.nn.Module, unknown: str = "", wrong: str = "") -> None:
    """Decide whether documents of a model are dealt out before steps, and micro-batches put in order. `unknown`: why
    nobody knows that this gives the same; `"documents": "deal"` says that both do, `"keep"` that the order does.
    `wrong`: why dealing out would give something else. Empty where there is no such reason."""
    asked, random = feed.config.documents, find_random(model)
    feed.orders = not random and not (unknown and asked == "auto")
    if feed.replicas == 1 or not feed.config.look_ahead or asked not in ("auto", "deal"):
        return
    if feed.shares.count > 1:
        wrong = "several ranks hold one micro-batch together (tensor parallelism, Ulysses)"
    wrong, unknown = wrong or _find_company(model), unknown or random
    feed.deals = not wrong and (asked == "deal" or not unknown)
    remedy = "" if wrong else '; where that does not matter, "documents": "deal" deals them out'
    feed.stays = "" if feed.deals else f"documents stay on their ranks: {wrong or unknown}{remedy}"


def settle_together(feed: Feed, began: tuple[bool, bool] | None) -> tuple[bool, bool]:
    """What `settle` found, for ranks that read hooks and losses of their own: where an epoch begins documents are dealt
    out, and micro-batches put in order, only if all ranks may (collective). Within an epoch a rank for which something
    has changed keeps its next steps as they are. Gives what the epoch `began` with."""
    mine, others_deal = (feed.deals, feed.orders), False
    if first := began is None:
        said = [mine[0] + 2 * mine[1]]
        if feed.replicas > 1:
            said = feed.worker.run(lambda: feed.gatherer.numbers(said[0], Subject(What.LOADER, feed.number)))
        began, others_deal = (all(one & 1 for one in said), all(one & 2 for one in said)), any(one & 1 for one in said)
    # Where documents are dealt out micro-batches have no order that could be kept.
    which = 0 if began[0] else 1
    holds = began[which] and not mine[which]
    if feed.stays and ((first and feed.rank and others_deal) or (holds and not feed.holds)):
        notice(f"rank {feed.rank}: {feed.stays}")
    if mine[0] and not began[0]:
        feed.stays = "documents stay on their ranks: another rank has a reason for it"
    (feed.deals, feed.orders), feed.holds = began, holds
    return began


def _find_company(model: torch.nn.Module) -> str:
    """What of a document depends on those beside it."""
    for module in model.modules():
        config, adapters = vars(module).get("config"), vars(module).get("peft_config") or {}
        if any(getattr(one, "alora_invocation_tokens", None) for one in adapters.values()):
            return "alora_invocation_tokens is set, and PEFT looks for these tokens in whole rows"
        if getattr(config, "output_router_logits", False):
            return "output_router_logits is on, and the router's auxiliary loss depends on which documents meet"
        if getattr(config, "z_loss_coefficient", 0):
            return "z_loss_coefficient is set, and that loss is a mean over a micro-batch"
        if type(module).__module__.startswith(EXPERTS):
            return OF_EXPERTS
        if config is not None and (kind := batch_rope(config)):
            return f'rope_type "{kind}" rotates every document of a row by the longest one'
    return ""


def batch_rope(config: Any) -> str:
    """The RoPE type of a model whose frequencies depend on the largest position in the batch; else empty."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)] if isinstance(rope, dict) else []
    kinds = [one.get("rope_type", one.get("type")) for one in nested or [rope] if isinstance(one, dict)]
    return next((kind for kind in kinds if kind in ("dynamic", "longrope")), "")


def find_random(model: torch.nn.Module) -> str:
    for name, module in model.named_modules():
        values = {key: value for key, value in vars(module).items() if AT_RANDOM(key)}
        if "Dropout" in type(module).__name__:
            values["p"] = getattr(module, "p", 0.0)
        for key, value in values.items():
            if isinstance(value, dict):  # PEFT's, by adapter
                value = max((one for one in value.values() if isinstance(one, float)), default=0.0)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
                return f"{name}.{key} is {value:g}, and would fall on other tokens".lstrip(".")
    return ""


def _is_readable(batch: Any) -> bool:
    return isinstance(batch, Mapping) and ("input_ids" in batch or "inputs_embeds" in batch)


def _copied(batch: Mapping[str, Any]) -> Callable[[], None]:
    """What waits until the loader's copies to the GPU are made, whatever stream they run on."""
    for value in batch.values():
        if isinstance(value, torch.Tensor) and value.is_cuda:
            return torch.cuda.current_stream(value.device).record_event().synchronize
    return lambda: None
