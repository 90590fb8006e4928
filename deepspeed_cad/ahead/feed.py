"""The feed: the micro-batches of one model, announced by its loader and taken by its forwards, in the same order.

In: what a loader is about to hand out (`announce`), where it ends (`end`) and what reaches the model (`take`). Out:
planned micro-batches, or an error on every rank where ranks differ.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple, NoReturn

from deepspeed_cad.ahead.documents import Announcement, read_documents, with_ids
from deepspeed_cad.ahead.gather import Said, State, Subject, What
from deepspeed_cad.ahead.plan import Plans
from deepspeed_cad.ahead.worker import Result
from deepspeed_cad.attention.microbatch import MicroBatch, PlanKey
from deepspeed_cad.errors import CADDataError, CADError, CADPeerError
from deepspeed_cad.layout import Ints, LocalSegments
from deepspeed_cad.notice import name_ranks

logger = logging.getLogger("deepspeed_cad")

StepAt = tuple[int, int, int]
"""Epoch, number of a step in it and of the step's first micro-batch."""


class InStep(NamedTuple):
    """Where a micro-batch stands in a step that was arranged as a whole; where none was, each is a step of its own."""

    step: StepAt = (0, 0, 0)
    place: int = 0
    size: int = 1

    def follows(self, before: "InStep") -> bool:
        """Whether no step is left, or begun, in its middle."""
        within = self.step == before.step and self.place == before.place + 1
        return within or (self.place == 0 and before.place == before.size - 1)


ON_ITS_OWN = InStep()


class EpochOverError(CADPeerError):
    """This rank trains a micro-batch of an epoch that is over on another rank."""


class Feed:
    def __init__(self, plans: Plans, fingerprint: str, number: int | None = 0) -> None:
        """`fingerprint` of the model is compared between ranks; `number`: how many models had CAD before this one. None
        for a model that is only looked at, such as a reference: ranks may have other ones of these, so it gets a number
        when all ranks first run it together."""
        self.plans, self.fingerprint, self.number = plans, fingerprint, number or 0
        self._numbered = number is not None
        self.gatherer, self.worker, self.config = plans.gatherer, plans.worker, plans.config
        self.rank, self.shares = self.gatherer.rank, self.gatherer.shares
        self.replicas = len(self.shares.replicas)
        self.keys: dict[PlanKey, int] = {}
        """Kinds of layers seen so far, what the look-ahead plans for; and how many layers there are of each."""
        self.deals = False
        """Whether documents are dealt out to ranks before steps."""
        self.cuts = False
        """Whether these may be cut, and then lie on several ranks."""
        self.orders = True
        """Whether micro-batches of a step may be trained in another order."""
        self.holds = False
        """Whether steps from now on stay as they are for what this rank found since the epoch began."""
        self.stays = ""
        """Why documents are not dealt out, where it is asked for, and what would turn it on."""
        self.read_ahead = False
        """Whether a loader is read a step ahead of training: else no step can be arranged."""
        self.arranged = ""
        """What is different about the micro-batches of a step, in words; empty where they come as they were loaded."""
        self._ahead: deque[tuple[Announcement, Future[MicroBatch], InStep]] = deque()
        self._taken = ON_ITS_OWN
        """Of the micro-batch that was trained last."""
        self._epoch = self._index = self._step = self._asked = 0
        self._forwards = self._looks = 0
        self._given_out = self._earlier = 0
        """Micro-batches that the loop drew and did not train yet; of these, those of epochs that ended."""
        self._at_once = 1
        """As many micro-batches this loop draws before it trains the first of them."""
        self._unannounced = 0
        self._over: dict[int, str] = {}
        """Why an epoch is over on some rank; changed on the look-ahead thread only, in the same order on every rank."""

    def read(self, given: Mapping[str, Any]) -> Announcement:
        """This rank's documents of a batch; raises what `read_documents` does."""
        mine = read_documents(given)
        compared = (self.shares.count > 1 or self.read_ahead) and not self.shares.pieces
        return with_ids(mine, given) if compared else mine

    # What loaders say

    def agree_to_announce(self, here: bool) -> bool:
        """Whether the batches of a loader reach the model as they are, on every rank; asked by every rank."""
        return all(self._ask_all(int(here)))

    def same_length(self, batches: int | None) -> bool:
        """Whether the loaders of all ranks have equally many batches; None: not known. Asked by every rank."""
        counts = self._ask_all(-1 if batches is None else batches)
        return counts[0] >= 0 and len(set(counts)) == 1

    def _ask_all(self, value: int) -> list[int]:
        subject, self._asked = Subject(What.LOADER, self.number, index=self._asked), self._asked + 1
        return [one.value for one in self.worker.run(lambda: self.gatherer.gather(subject, value=value))]

    def begin_epoch(self) -> int:
        """The loader starts again: what was announced but not trained is dropped, here and on other ranks, but for what
        the loop drew to the end of epochs before. Gives the epoch's number."""
        self._drop(self._earlier, len(self._ahead))
        self._epoch += 1
        self._index = self._step = 0
        return self._epoch

    def end_epoch(self, epoch: int, whole: bool) -> None:
        """What was announced in this epoch is not trained any more; but what the loop drew may be, of a `whole` one."""
        if epoch == self._epoch:
            self._drop(self._given_out if whole else 0, len(self._ahead))
            self._earlier = self._given_out

    def give_out(self) -> None:
        """The loader gives the training loop one more batch, if one is left that was announced."""
        self._given_out = min(self._given_out + 1, len(self._ahead))

    def announce(self, mine: Announcement, backward: bool = True, at: InStep = ON_ITS_OWN) -> None:
        """This rank will run `mine` after everything it announced before; `backward`: and its backward."""
        epoch, index = self._epoch, self._next_index()
        self._ahead.append((mine, self._plan(lambda: self.gather_lengths(epoch, index, mine), backward), at))

    def accept(self, mine: Announcement, planned: Future[MicroBatch], at: InStep = ON_ITS_OWN) -> None:
        """Like `announce`, for a micro-batch that the look-ahead thread has planned already."""
        self._next_index()
        self._ahead.append((mine, planned, at))

    def end(self) -> None:
        """The loader has no further micro-batch. Where other ranks' loaders have, those drop what they announced."""
        epoch, index = self._epoch, self._next_index()

        def job() -> None:
            if epoch not in self._over:
                self._note_end(self._gather(Subject(What.LENGTHS, self.number, epoch, index), None), epoch, index)

        self.worker.submit(job)

    def next_step(self) -> StepAt:
        step, self._step = self._step, self._step + 1
        return self._epoch, step, self._index

    def gather_step(self, at: StepAt, payload: Ints | None) -> list[Ints]:
        """What every rank says of a step; raises EpochOverError. Runs on the look-ahead thread."""
        epoch, step, index = at
        self._refuse_ended(epoch)
        said = self._gather(Subject(What.STEP, self.number, epoch=epoch, index=step), payload)
        self._note_end(said, epoch, index)
        if payload is not None:
            self._refuse_ended(epoch)
        return [one.payload for one in said]

    @property
    def in_words(self) -> str:
        """How micro-batches of a step are arranged, and why not otherwise."""
        unread = ""
        if self.deals and not self.read_ahead:
            unread = (
                "documents stay on their ranks until a loader is read ahead, as Accelerate's soon are; read yours by "
                "current_session().look_ahead(loader, model), unless it has state_dict() or DeepSpeed's data sampler"
            )
        return "; ".join(filter(None, (self.arranged, self.stays, unread)))

    @property
    def next_announced(self) -> Announcement | None:
        """The announced micro-batch that the next forward must be, if the loader announced one."""
        return self._ahead[0][0] if self._ahead else None

    @property
    def draws_more(self) -> bool:
        """Whether the training loop drew more micro-batches than it draws at once: it may have passed some over, as one
        does that goes on from a checkpoint, or the last ones of an epoch."""
        return self._given_out > self._at_once or self._earlier > 0

    @property
    def over(self) -> str:
        """Why the announced micro-batch that comes next cannot be trained, as far as this rank has heard; or ""."""
        coming = [one for _, one, _ in tuple(self._ahead)[:1] if one.done()]
        return str(coming[0].exception() or "") if coming else ""

    # What forwards say

    def take(self, mine: Announcement | None) -> MicroBatch:
        """The planned micro-batch of this training forward. `mine` is None where it is the announced one, unread."""
        self.refuse_abandoned()
        if mine is not None and self.draws_more:
            drawn = enumerate(one for one, *_ in islice(self._ahead, self._given_out))
            same = [(one.ids != mine.ids, place) for place, one in drawn if one.local.same_as(mine.local)]
            passed_over = min(same, default=(False, self._earlier))[1]
            self._drop(0, passed_over)
            if not passed_over:  # it reads its loader ahead of training
                self._at_once = self._given_out
        if not self._ahead:
            if mine is None:
                raise CADError("no micro-batch was announced")
            return self._wait(self._gather_now(mine))
        announced, future, at = self._ahead.popleft()
        self._unannounced, self._given_out, self._earlier = 0, max(self._given_out - 1, 0), max(self._earlier - 1, 0)
        if mine is not None and not announced.local.same_as(mine.local):
            sizes = [f"{one.local.tokens} tokens in {len(one.local.begin)} documents" for one in (mine, announced)]
            self.fail(
                CADDataError(
                    f"rank {self.rank}: the micro-batch that reached the model ({sizes[0]}) is not the one that the "
                    f'loader announced ({sizes[1]}). Set "look_ahead": 0 if batches are changed between loader and '
                    "model, batches of several loaders are trained in turn, or one is trained twice"
                )
            )
        if not at.follows(self._taken):
            self.fail(
                CADDataError(
                    f"rank {self.rank}: only a part of a step is trained: micro-batch {at.place + 1} of {at.size} "
                    f"comes after {self._taken.place + 1} of {self._taken.size}, but the ranks arrange a step as a "
                    "whole. Train or pass over whole steps, or begin the loader where training goes on, as "
                    'accelerate.skip_first_batches does, or set "documents": "in_order"'
                )
            )
        self._taken = at
        return self._wait(future)

    def look(self, mine: Announcement) -> MicroBatch:
        """The planned micro-batch of a forward without backward, which all ranks run together; none is announced."""
        self.refuse_abandoned()
        if not self._numbered:
            self.plans.references += 1
            self.number, self._numbered = -self.plans.references, True
        subject = Subject(What.LOOK, self.number, index=self._looks)
        return self.follow(lambda: self._gather(subject, mine.to_array()))

    def others_look(self) -> list[Said] | None:
        """What other ranks look at next, with any model, where this rank has no further forward without backward; None
        where no rank has one."""
        self.refuse_abandoned()
        subject = Subject(What.LOOK, self.number, index=self._looks)
        said = self._result(self.worker.submit(lambda: self._gather(subject, None)))
        return None if all(one.state == State.ENDED for one in said) else said

    def follow(self, gather: Callable[[], list[Said]]) -> MicroBatch:
        """The planned micro-batch of what ranks say that they look at."""
        self._looks += 1
        return self._wait(self._plan(lambda: [_announced(one) for one in gather()], backward=False))

    def refuse_abandoned(self) -> None:
        if self.plans.abandoned:
            # Also where plans were ready before: this rank's part of an exchange is missing, so no later one pairs up.
            raise CADPeerError(self.plans.abandoned)

    def _result(self, future: Future[Result]) -> Result:
        self.worker.trains_here()
        try:
            return self.worker.wait(future, "document lengths and plan")
        except CADError as error:
            # This rank stops here; those that wait for it in an exchange learn why.
            self.abandon(error)
            raise

    def _wait(self, future: Future[MicroBatch]) -> MicroBatch:
        micro_batch = self._result(future)
        self.gatherer.liveness.take(micro_batch.turn)
        micro_batch.calls.prepare()
        return micro_batch

    def learn(self, layers: dict[PlanKey, int]) -> None:
        self.keys |= {key: count for key, count in layers.items() if key not in self.keys}

    def stays_whole(self) -> None:
        """None that is announced from now on is cut into nano-batches; every rank says so at the same place."""
        self.worker.submit(lambda: self.plans.in_one_part.add(self.number))

    def fail(self, error: CADError) -> NoReturn:
        """Stop this rank: the others learn why where they wait for it, or at their next collective. Raises."""
        self.fail_later(error)
        self.abandon(error)
        raise error

    def fail_later(self, error: CADError) -> None:
        """This rank will stop after what it announced so far: the other ranks learn why at their next collective. An
        ending process gives them a little time for that (`Worker.close`)."""
        self.gatherer.liveness.announce(str(error))

        def job() -> None:
            try:
                self.gatherer.gather(Subject(What.LENGTHS, self.number), state=State.FAILED, model=self.fingerprint)
            except CADError as met:
                logger.debug("told the other ranks: %s", met)

        self.worker.submit(job)

    def abandon(self, error: CADError) -> None:
        if not self.plans.abandoned and max(self.plans.crew.ranks, self.gatherer.ranks) > 1:
            self.plans.abandoned = str(error) or type(error).__name__
            self.gatherer.liveness.report(self.plans.abandoned)

    @contextmanager
    def between_collectives(self) -> Iterator[None]:
        """What this rank does on the look-ahead thread while the others go on to the next collective. An error here is
        told to them at once: this rank's part of that collective will be missing."""
        try:
            yield
        except Exception as error:
            told = error
            if not isinstance(told, CADError):
                told = CADPeerError(f"rank {self.rank}: the documents of a step: {type(error).__name__}: {error}")
            self.gatherer.broken = self.gatherer.broken or told
            self.abandon(told)
            raise

    def raised(self, what: str, error: BaseException | None) -> None:
        """A forward, or a step of a pipeline, ended with an exception: this rank's part of its exchanges is missing."""
        if not isinstance(error, CADError):
            error = CADPeerError(
                f"rank {self.rank}: {what} ended with the exception {type(error).__name__}: {error}. Its attention is "
                "shared with the other ranks, so training cannot go on after it was caught: mend its cause (out of "
                "memory: shorter rows) and start again from a checkpoint"
            )
        self.abandon(error)

    def _gather_now(self, mine: Announcement) -> Future[MicroBatch]:
        subject = Subject(What.FORWARD, self.number, index=self._forwards)
        self._forwards += 1
        self._unannounced += 1
        # Prepared loaders of Accelerate announce from the second micro-batch of an epoch on.
        if self._unannounced == 3 and self.config.look_ahead and self.replicas > 1:
            self.plans.say_once(
                "no loader announces micro-batches, so they are planned when their forward starts: read the data "
                "through deepspeed_cad.current_session().look_ahead(loader, model), if it has no state_dict()"
            )
        return self._plan(lambda: [_announced(one) for one in self._gather(subject, mine.to_array())])

    def _plan(self, gather: Callable[[], list[Announcement]], backward: bool = True) -> Future[MicroBatch]:
        keys = dict(self.keys)
        return self.worker.submit(lambda: self.plans.open(gather(), keys, self.number, backward))

    def _next_index(self) -> int:
        index, self._index = self._index, self._index + 1
        return index

    def _drop(self, first: int, last: int) -> None:
        """Announced micro-batches, counted from the next one, will not be trained here: tell ranks that train one."""
        ahead = list(self._ahead)
        dropped = [planned for _, planned, _ in ahead[first:last]]
        self._ahead = deque(ahead[:first] + ahead[last:])
        self._given_out = min(self._given_out, first) + max(self._given_out - last, 0)
        self._earlier = min(self._earlier, first) + max(self._earlier - last, 0)

        def job() -> None:
            if turns := [one.result().turn for one in dropped if one.done() and one.exception() is None]:
                self.gatherer.liveness.drop(turns)

        if dropped:
            self.worker.submit(job)

    # On the look-ahead thread

    def _gather(self, subject: Subject, payload: Ints | None) -> list[Said]:
        state = State.ENDED if payload is None else State.GOING
        return self.gatherer.gather(subject, payload, state=state, model=self.fingerprint)

    def gather_lengths(self, epoch: int, index: int, mine: Announcement) -> list[Announcement]:
        """On the look-ahead thread: what all ranks announced. Raises EpochOverError where a loader had ended."""
        self._refuse_ended(epoch)
        said = self._gather(Subject(What.LENGTHS, self.number, epoch, index), mine.to_array())
        self._note_end(said, epoch, index)
        self._refuse_ended(epoch)
        return [_announced(one) for one in said]

    def _note_end(self, said: list[Said], epoch: int, index: int) -> None:
        ended = [rank for rank, one in enumerate(said) if one.state == State.ENDED]
        if not ended or epoch in self._over:
            return
        loaders = f"the loader{'s' * (len(ended) > 1)} of {name_ranks(ended)}"
        # Jobs come in the order of epochs: none asks about an earlier one any more.
        self._over = {
            epoch: f"rank {self.rank} trains micro-batch {index} of epoch {epoch} (counted from 0), but {loaders} "
            f"ended after {index}. All ranks must train as many micro-batches: use drop_last=True and a sampler that "
            "gives every rank as many, or stop each rank after the smallest number"
        }

    def _refuse_ended(self, epoch: int) -> None:
        """Where an epoch is over on some rank, no rank meets the others for it any more: all drop the rest together."""
        if epoch in self._over:
            raise EpochOverError(self._over[epoch])


def _announced(said: Said) -> Announcement:
    """A rank that has no further micro-batch attends for the others."""
    return Announcement.from_array(said.payload) if len(said.payload) else Announcement(LocalSegments.none(0))
