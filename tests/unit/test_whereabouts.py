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
        counts = (lambda: self.exchanges), (lambda: self.trained)
        self.at = Whereabouts(self.liveness, self.gatherer, self.worker, feeds, *counts, 400.0)
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
    ranks[0].gatherer.begun = 1
    for second in range(14, 24):
        ranks[0].look(second, BROADCAST)
    assert ranks[1].liveness.places([0]) == {}
    ranks[0].look(24, BROADCAST)
    assert ranks[1].liveness.places([0]) == {0: told}, "a collective behind it, it is there again"


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


@pytest.mark.parametrize("way, before, exchanges, named", [
    (torch.autograd.graph._engine_run_backward, 2, 8, False), (torch.autograd.graph._engine_run_backward, 2, 9, False),
    (torch.autograd.graph._engine_run_backward, 2, 7, True), (torch.autograd.graph._engine_run_backward, 8, 8, True),
    (torch.nn.Module._call_impl, 2, 8, True),
])  # fmt: skip
def test_who_is_done_is_not_why(ranks: Any, caplog: Any, way: Any, before: int, exchanges: int, named: bool) -> None:
    """As with a million tokens, where one GPU is 10 s behind. Who left the step after an error has started less, and
    where nothing is exchanged that cannot be seen."""
    backward = sight("in backward", chain=(way.__code__,))
    ranks[0].trained, ranks[0].exchanges, ranks[1].trained, ranks[1].exchanges = 1, before, 1, exchanges
    stand(ranks[1], BARRIER)
    ranks[0].look(0, backward)
    ranks[0].exchanges = 8
    stand(ranks[0], backward)
    assert bool(said(caplog)) == named


@pytest.mark.parametrize("count, end", [(11, APART), (12, "; and 1 more")])
def test_of_many_the_first_are_named(count: int, end: str, monkeypatch: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Rank 1 waits as well, and rank 2 is done with this micro-batch."""
    store = dist.HashStore()
    ranks = [Rank(store, rank, count, monkeypatch) for rank in range(count)]
    ranks[2].exchanges = 1
    for one, seen in zip(ranks[:3], (BROADCAST, BROADCAST, BARRIER)):
        stand(one, seen, 1)
    for one in ranks[3:]:
        one.at.leave("")
    for one, seen in zip(ranks[2::-1], (BARRIER, BROADCAST, BROADCAST)):
        stand(one, seen)
    line = said(caplog)[-1]
    assert line.startswith("rank 0, ") and line.count(" has left") == 8 and line.endswith(end) and "rank 2 " not in line


@pytest.mark.parametrize("mine, other, micro_batches", [
    (BROADCAST, BROADCAST, 4),  # both wait, for whoever it is
    (BROADCAST, sight("in forward", collective=False), 5),  # it is in the same forward, and slow
    (BARRIER, sight("at train.py:80", inside=False), 5),  # such as a rank that saves a checkpoint
    (sight("in linear", collective=False), BARRIER, 5),  # this one is slow itself
])  # fmt: skip
def test_who_may_be_slow_is_not_named(ranks: Any, caplog: Any, mine: Sight, other: Sight, micro_batches: int) -> None:
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
    begin = f"rank 1, which has begun 0 micro-batches, has waited 3 s {BROADCAST.text}"
    assert said(caplog) == [f"{begin}, and will in vain: {ranks[1].over}"]


@pytest.mark.parametrize("failed, exchange, collective, hopeless", [
    (False, 4, 0, False), (False, 5, 0, True), (False, 0, 9, False), (False, 0, 10, True), (True, 4, 0, True),
])  # fmt: skip
def test_what_was_begun_is_waited_for(ranks: Any, failed: Any, exchange: int, collective: int, hopeless: Any) -> None:
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


@pytest.mark.parametrize("module, forward, collective", [
    ("site-packages/torch.distributed.distributed_c10d", True, True), ("deepspeed_cad.exchange", True, True),
    ("site-packages/torch.distributed.distributed_c10d", False, True),
    ("site-packages/transformers.trainer", True, False),
])  # fmt: skip
def test_what_a_thread_is_in(module: str, forward: bool, collective: bool) -> None:
    """In a function of such a module that waits, called by a script or by nobody."""
    reached, go_on = threading.Event(), threading.Event()
    space: dict[str, Any] = {"__name__": module.rpartition("/")[2], "reached": reached, "go_on": go_on}
    exec(compile("def broadcast():\n    reached.set(); go_on.wait()", f"/x/{module}.py", "exec"), space)
    call, model = space["broadcast"], torch.nn.Module()
    model.forward = lambda: call()
    thread = threading.Thread(target=model if forward else call)
    thread.start()
    reached.wait()
    try:
        found = see(thread.ident or 0)
    finally:
        go_on.set()
        thread.join()
    assert (found.inside, found.collective) == (forward, collective) and call.__code__ in found.chain
    line = f"test_whereabouts.py:{model.forward.__code__.co_firstlineno}"
    assert found.text == (f"in broadcast, called at {line}" if forward else f"at {module.rpartition('/')[2]}.py:2")
    assert see(0) == Sight((), False, False, "at its end")
