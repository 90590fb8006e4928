"""Where ranks are: what one tells while it trains nothing, and whom it names while it waits.

The board is real, time and the stack of the training thread are played.
"""

import logging
import threading
from types import CodeType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed_cad.ahead import whereabouts as room
from deepspeed_cad.ahead.gather import APART
from deepspeed_cad.ahead.whereabouts import Sight, Whereabouts, see
from deepspeed_cad.errors import CADPeerError
from deepspeed_cad.exchange.failure.board import Liveness, Place

CODE = see.__code__


def sight(text: str, inside: bool = True, collective: bool = True, chain: tuple[CodeType, ...] = (CODE,)) -> Sight:
    return Sight(chain, inside, collective, text)


class Rank:
    """A rank whose counts and whose stack the test sets; nothing looks but `look`."""

    def __init__(self, store: dist.Store, rank: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.liveness, self.trained, self.exchanges, self.over = Liveness(store, rank, ranks), 0, 0, ""
        self.gatherer: Any = SimpleNamespace(begun=0, inside=None)
        self.worker: Any = SimpleNamespace(is_idle=True, training_thread=0)
        monkeypatch.setattr(room, "start_daemon", lambda *_: threading.Thread())
        feeds: Any = [SimpleNamespace(over=""), self]
        self.at = Whereabouts(
            self.liveness, self.gatherer, self.worker, feeds, lambda: self.exchanges, lambda: self.trained, 400.0
        )
        self.monkeypatch = monkeypatch

    def look(self, second: float, seen: Sight) -> None:
        self.monkeypatch.setattr(room, "see", lambda thread: seen)
        self.at.look(second)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[Rank]:
    store = dist.HashStore()
    return [Rank(store, rank, 3, monkeypatch) for rank in range(3)]


BARRIER = sight("in barrier, called at train.py:57", inside=False, chain=(CODE, CODE))
BROADCAST = sight("in broadcast, called at train.py:41")


def stand(rank: Rank, seen: Sight, seconds: int = 12) -> None:
    for second in range(seconds):
        rank.look(second, seen)


def test_a_rank_that_trains_nothing_tells_where_it_is_until_it_trains_again(ranks: list[Rank]) -> None:
    ranks[0].trained = 3
    stand(ranks[0], BARRIER, 9)
    assert ranks[1].liveness.places([0]) == {}
    stand(ranks[0], BARRIER)
    assert ranks[1].liveness.places([0])[0] == Place(3, False, False, "in barrier, called at train.py:57")
    ranks[0].look(13, BROADCAST)
    told = ranks[1].liveness.places([0])[0]
    assert told.text == BROADCAST.text and told.inside and not told.waits, "it only just came there"
    ranks[0].trained = 4
    ranks[0].look(14, BROADCAST)
    assert ranks[1].liveness.places([0]) == {}


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]


def test_who_waits_names_who_is_elsewhere_once(ranks: list[Rank], caplog: pytest.LogCaptureFixture) -> None:
    ranks[0].trained = ranks[1].trained = 3
    stand(ranks[1], BARRIER)
    ranks[2].at.leave("")
    stand(ranks[0], BROADCAST, 30)
    for rank in ranks[:2]:  # and again at the next checkpoint
        rank.trained = 8
        stand(rank, BARRIER if rank is ranks[1] else BROADCAST, 30)
    assert said(caplog) == [
        "rank 0, which has begun 3 micro-batches, has waited 10 s in broadcast, called at train.py:41. Meanwhile rank "
        "1 is in barrier, called at train.py:57, after 3 micro-batches; rank 2 has left: its process ended without an "
        f"error after 0 micro-batches. {APART}"
    ]


@pytest.mark.parametrize("before, exchanges, named", [(2, 8, False), (2, 9, False), (2, 7, True), (8, 8, True)])
def test_who_is_done_with_a_backward_is_not_why_it_takes_long(
    ranks: list[Rank], caplog: pytest.LogCaptureFixture, before: int, exchanges: int, named: bool
) -> None:
    """As with a million tokens, where one GPU is 10 s behind. Who left the step after an error has started less, and
    where nothing is exchanged that cannot be seen."""
    backward = sight("in backward", chain=(torch.autograd.graph._engine_run_backward.__code__,))
    ranks[0].trained, ranks[0].exchanges, ranks[1].trained, ranks[1].exchanges = 3, before, 3, exchanges
    stand(ranks[1], BARRIER)
    ranks[0].look(0, backward)
    ranks[0].exchanges = 8
    stand(ranks[0], backward)
    assert bool(said(caplog)) == named


@pytest.mark.parametrize("mine, other, micro_batches", [
    (BROADCAST, BROADCAST, 4),  # both wait, for whoever it is
    (BROADCAST, sight("in forward", collective=False), 5),  # it is in the same forward, and slow
    (BARRIER, sight("at train.py:80", inside=False), 5),  # such as a rank that saves a checkpoint
    (sight("in linear", collective=False), BARRIER, 5),  # this one is slow itself
])  # fmt: skip
def test_ranks_that_may_only_be_slow_are_not_named(
    ranks: list[Rank], caplog: pytest.LogCaptureFixture, mine: Sight, other: Sight, micro_batches: int
) -> None:
    ranks[1].trained, ranks[2].trained = 5, micro_batches
    stand(ranks[2], other)
    stand(ranks[1], mine, 30)
    assert said(caplog) == []


def test_a_micro_batch_beyond_the_end_is_known_at_once(ranks: list[Rank], caplog: pytest.LogCaptureFixture) -> None:
    """This rank's look-ahead thread has heard of the end; its forward, which would raise it, is not reached."""
    ranks[1].over = "rank 1 trains micro-batch 3 of epoch 1, but the loader of rank 0 ended after 3"
    stand(ranks[1], sight("at train.py:50", inside=False), 9)
    assert said(caplog) == [], "it may leave its loop"
    stand(ranks[1], BROADCAST, 6)
    assert said(caplog) == [
        f"rank 1, which has begun 0 micro-batches, has waited 3 s {BROADCAST.text}, and will in vain: {ranks[1].over}"
    ]


@pytest.mark.parametrize("failed, exchange, collective, hopeless", [
    (False, 4, 0, False), (False, 5, 0, True), (False, 0, 9, False), (False, 0, 10, True), (True, 4, 0, True),
])  # fmt: skip
def test_what_a_rank_had_begun_is_waited_for(
    ranks: list[Rank], failed: bool, exchange: int, collective: int, hopeless: bool
) -> None:
    """It left after exchange 4 and collective 9: a slow rank is not told that those will not end."""
    ranks[1].exchanges, ranks[1].gatherer.begun = 4, 9
    ranks[1].at.leave("KeyError: 'labels'" if failed else "")
    found = ranks[0].liveness.why_hopeless(exchange, collective)
    ranks[0].gatherer.begun, idle_after = 7, ranks[0].liveness.idle_after
    assert idle_after() == 7
    ranks[0].worker.is_idle = False
    assert idle_after() is None, "a job is under way"
    how = "with KeyError: 'labels'" if failed else "without an error"
    assert bool(found) == hopeless and (not found or f"rank 1 stopped: its process ended {how} after 0" in found)


def test_a_rank_that_ends_with_an_error_says_who_had_left(ranks: list[Rank], caplog: pytest.LogCaptureFixture) -> None:
    ranks[0].gatherer.begun = 9
    ranks[0].at.leave("")
    assert not caplog.records and list(ranks[1].liveness._last_words([0])) == [0], "whatever it took part in"
    ranks[1].at.leave("RuntimeError: Connection closed by peer")
    assert caplog.records[0].getMessage().startswith(
        "rank 1 ends with RuntimeError: Connection closed by peer. Before that rank 0 had left: its process ended "
        "without an error after 0 micro-batches. Every rank must train as many micro-batches"
    )  # fmt: skip
    ranks[2].at.leave("; ".join(ranks[2].liveness._hopeless(0, 0)))
    assert len(caplog.records) == 1, "the error says it"


def test_who_did_not_come_is_told_from_who_died(ranks: list[Rank]) -> None:
    ranks[1].trained = 3
    stand(ranks[1], BARRIER)
    error = ranks[0].liveness.explain("the lengths", RuntimeError("timed out"), patience_s=0.0)
    assert isinstance(error, CADPeerError) and str(error) == (
        "rank 0 waited for the lengths: rank 2 died or hangs; rank 1 did not come: it was last seen in barrier, called "
        "at train.py:57, after 3 micro-batches. First error here: timed out"
    )


def _call_in(module: str, wait: Any) -> Any:
    """A function of a module of that name, which waits."""
    space = {"__name__": module, "wait": wait}
    exec(compile("def broadcast():\n    wait()", f"/x/site-packages/{module}.py", "exec"), space)
    return space["broadcast"]


@pytest.mark.parametrize("module, forward, inside, collective", [
    ("torch.distributed.distributed_c10d", True, True, True),
    ("torch.distributed.distributed_c10d", False, False, True),
    ("transformers.trainer", True, True, False),
])  # fmt: skip
def test_what_a_thread_is_in(module: str, forward: bool, inside: bool, collective: bool) -> None:
    reached, go_on = threading.Event(), threading.Event()
    call = _call_in(module, lambda: (reached.set(), go_on.wait()))

    class Model(torch.nn.Module):
        def forward(self) -> None:
            call()

    thread = threading.Thread(target=Model() if forward else call)
    thread.start()
    reached.wait()
    try:
        found = see(thread.ident or 0)
    finally:
        go_on.set()
        thread.join()
    assert (found.inside, found.collective) == (inside, collective) and CODE not in found.chain
    assert found.text.startswith(("in <lambda>", "in broadcast", "at test_whereabouts.py:"))
    assert see(0) == Sight((), False, False, "at its end")
