"""What a model's feed asks the other ranks and when it stops, with the collectives played by the test."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deepspeed_cad.ahead.documents import Announcement
from deepspeed_cad.ahead.feed import EpochOverError, Feed
from deepspeed_cad.ahead.gather import Said, State, Subject, What
from deepspeed_cad.ahead.step import StepAhead
from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADError
from deepspeed_cad.exchange.failure.identity import Identity
from deepspeed_cad.exchange.packed import ComparedFirst
from deepspeed_cad.layout import segments_from_cumulative
from deepspeed_cad.shares import Shares

MINE = Announcement(segments_from_cumulative(np.array([0, 3, 8]), 8))


class Worker:
    """Jobs run where they are submitted."""

    def submit(self, job: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(job())
        except CADError as error:
            future.set_exception(error)
        return future


class Two:
    """The collectives of two ranks; rank 1 says the same, until its loader has ended."""

    rank, ranks, shares = 0, 2, Shares.none(0, 2)

    def __init__(self) -> None:
        self.asked: list[Subject] = []
        self.ended = False
        self.reported: list[str] = []
        self.dropped: list[int] = []
        self.liveness: Any = SimpleNamespace(report=self.reported.append, drop=self.dropped.extend)

    def gather(self, subject: Subject, payload: Any, *, state: State, model: str) -> list[Said]:
        self.asked.append(subject)
        mine = Said(state, 0, np.zeros(0, np.int64) if payload is None else payload)
        return [mine, Said(State.ENDED, 0, np.zeros(0, np.int64)) if self.ended else mine]


def feed_of(two: Two) -> tuple[Feed, list[tuple[list[Announcement], Any]]]:
    """A feed, the second of its process, and what it let be planned."""
    opened: list[Any] = []

    def open_one(*given: Any) -> Any:
        opened.append(given)
        return SimpleNamespace(turn=len(opened) - 1)

    plans: Any = SimpleNamespace(
        gatherer=two, worker=Worker(), config=CADConfig(), abandoned="", open=open_one,
        crew=SimpleNamespace(ranks=two.ranks),
    )  # fmt: skip
    return Feed(plans, "a model", 1), opened


def test_micro_batches_are_gathered_under_their_epoch_and_number() -> None:
    two = Two()
    feed, opened = feed_of(two)
    feed.begin_epoch()
    feed.announce(MINE)
    feed.announce(MINE)
    feed.begin_epoch()
    feed.announce(MINE)
    assert two.asked == [Subject(What.LENGTHS, 1, epoch, index) for epoch, index in ((1, 0), (1, 1), (2, 0))]
    assert len(opened) == 3 and all(one.local.same_as(MINE.local) for said, *_ in opened for one in said)
    assert two.dropped == [0, 1], "announced, and not trained when the next epoch began"


def test_an_epoch_that_ended_on_one_rank_is_over_on_all() -> None:
    """The micro-batch with which that is heard is dropped, and later ones of the epoch are not gathered at all."""
    two = Two()
    feed, opened = feed_of(two)
    feed.begin_epoch()
    feed.announce(MINE)
    two.ended = True
    feed.announce(MINE)
    feed.announce(MINE)
    assert len(opened) == 1 and len(two.asked) == 2
    for _, future in list(feed._ahead)[1:]:
        with pytest.raises(EpochOverError, match="micro-batch 1 of epoch 1 .*the loader of rank 1 ended after 1"):
            future.result()
    two.ended = False
    feed.begin_epoch()
    feed.announce(MINE)
    assert len(opened) == 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_first_reason_for_stopping_is_told(ranks: int) -> None:
    two = Two()
    two.ranks = ranks
    feed, _ = feed_of(two)
    feed.abandon(CADError("out of memory"))
    feed.abandon(CADError("another"))
    assert two.reported == ["out of memory"] * (ranks > 1)
    assert feed.plans.abandoned == ("out of memory" if ranks > 1 else "")


def test_gloo_is_waited_for_with_an_eye_on_the_board() -> None:
    done: list[Any] = []
    liveness = SimpleNamespace(patiently=lambda *given, **named: done.append((*given[1:], named)))
    carrier = ComparedFirst(None, None, SimpleNamespace(liveness=liveness))  # type: ignore[arg-type]
    identity, work = Identity(7, 0), SimpleNamespace(wait=lambda: done.append("waited"), is_completed=lambda: True)
    carrier._wait([work], identity)  # type: ignore[arg-type]
    assert done == [(str(identity), 7, {"with_servers": True}), "waited"]


def test_documents_that_nobody_deals_out_for_want_of_a_loader_are_said_to_stay() -> None:
    feed, _ = feed_of(Two())
    feed.deals = True
    assert "no loader is read ahead" in feed.in_words
    StepAhead(feed)
    assert feed.in_words == ""
