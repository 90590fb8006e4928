"""The error board: which rank waits in vain, and why, also where two wait for each other; a store that is silent,
and how a rank waits for what others do."""

import math
import threading
import time
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from deepspeed_cad import threads
from deepspeed_cad.ahead import worker as worker_room
from deepspeed_cad.ahead.worker import Worker
from deepspeed_cad.errors import CADPeerError, in_one_line
from deepspeed_cad.exchange.failure import board as room
from deepspeed_cad.exchange.failure import patience
from deepspeed_cad.exchange.failure.board import LOST, WORDS_S, Liveness
from deepspeed_cad.exchange.failure.patience import LATE_S, LOOK_S, PatientStore, SilentStoreError, wait_until


@pytest.fixture()
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses take no time; its last element is now."""
    ticks = [0.0]
    monkeypatch.setattr(patience.time, "monotonic", lambda: ticks[-1])
    monkeypatch.setattr(patience.time, "sleep", lambda seconds: ticks.append(ticks[-1] + seconds))
    return ticks


def boards(ranks: int) -> list[Liveness]:
    store = dist.HashStore()
    return [Liveness(store, rank, ranks) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("dropped", "taken", "named"), [([3, 4], [2, 3, 4], 3), ([3], [2], None), ([], [2, 3], None), ([12], [1, 2], None)]
)
def test_a_rank_that_left_its_loop_is_named_by_those_who_wait(dropped: list, taken: list, named: int | None) -> None:
    mine, other = boards(2)
    for micro_batch in taken:
        mine.take(micro_batch)
    for part in dropped[:1], dropped[1:]:
        other.drop(part)
    said = mine.why_hopeless()
    assert said == "" if named is None else f"rank 1 left its loop before micro-batch {named}" in said


def test_a_rank_that_stopped_or_closed_is_named() -> None:
    board = boards(3)
    assert board[0].why_hopeless() == "" and board[0].stopped() == ""
    board[1].report("out of memory")
    board[2].started, board[2].begun = lambda: 4, lambda: 9
    board[2].close()
    board[2].leave("its process ended", failed=True)  # later, so that it says nothing new
    both = "rank 1 stopped: out of memory; rank 2 stopped: its session was closed"
    assert [board[0].why_hopeless(*there) for there in ((), (5,), (0, 10))] == [both] * 3
    for took_part in (4,), (0, 9), (1,), (0, 1):
        assert board[0].why_hopeless(*took_part) == both.split(";")[0]
    board[0].announce("a file is damaged")
    board[0].close()
    assert "rank 0 stopped: a file is damaged" in board[1].why_hopeless() and board[1].reason(0) == "a file is damaged"
    for one in board[1:]:
        one.stop("another exchange")
    assert board[0].why_hopeless() == "rank 1 stopped: out of memory; rank 2 stopped: another exchange"
    board[1].report("x" * 9999)
    board[0].report("x" * 9999)
    said = [board[1].stopped(), *map(board[0].reason, range(3))]
    assert said == ["another exchange", "x" * room.MOST, "out of memory", "another exchange"]


def test_ranks_with_other_shares_meet_in_collectives_only() -> None:
    """That one of them stopped ends exchanges, too: others of its replica are in these."""
    mine, beside = boards(2)
    mine.watched, mine.beside = [0], [1]
    beside.close()
    assert (mine.why_hopeless(5), mine.why_hopeless(0, 5)) == ("", "rank 1 stopped: its session was closed")
    beside.report("out of memory")
    assert mine.why_hopeless(5) == "rank 1 stopped: out of memory"


def test_a_board_is_that_of_one_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch numbers groups anew where it is initialised again, and a launcher's store lives on."""
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    group: Any = mock.Mock(group_name="1")
    for _ in range(2):
        board = [room.open_board(group, rank, 2, 60.0) for rank in range(2)]
        assert board[0].why_hopeless() == "" and board[0].store._limit_s == 30.0, "half of what ends all else"
        board[1].close()
        assert "rank 1 stopped: its session was closed" in board[0].why_hopeless()


def test_who_died_is_named_and_not_who_lost_it(clock: list[float]) -> None:
    board = boards(4)
    for rank in (0, 2):
        board[rank].report(f"{LOST} in the lengths")
    with pytest.raises(CADPeerError, match=r"rank 1 waited for the lengths: rank 3 died or hangs"):
        board[1].patiently(lambda: False, "the lengths")
    assert 2 * LOOK_S + WORDS_S < clock[-1] < 2 * LOOK_S + WORDS_S + 1.0
    board[3].report("out of memory")
    assert not board[1].only_lost()
    assert "lengths: rank 3 stopped: out of memory. First" in str(board[1].explain("the lengths", RuntimeError()))


def test_what_a_rank_sent_before_it_stopped_may_still_come(clock: list[float]) -> None:
    mine, other = boards(2)
    other.started = lambda: 4  # what is waited for is none of these
    other.leave("out of memory", failed=False)
    assert mine.patiently(lambda: False, "the lengths", timeout_s=0.9 * LOOK_S) is False
    with pytest.raises(CADPeerError, match="^rank 0 waited for the lengths: rank 1 stopped: out of memory$"):
        mine.patiently(lambda: False, "the lengths")
    assert clock[-1] > 2.9 * LOOK_S and max(after - before for before, after in zip(clock, clock[1:])) < 1.1e-3
    assert other.reason(0) == "waited for the lengths in vain: rank 1 stopped: out of memory"
    other.close()
    with pytest.raises(CADPeerError, match="^rank 1 waited for the lengths: the session was closed$"):
        other.patiently(lambda: False, "the lengths")


@pytest.mark.parametrize("with_servers", [True, False])
def test_a_lost_server_is_to_blame_where_servers_take_part(clock: list[float], with_servers: bool) -> None:
    mine, other = boards(2)
    mine.losses = mock.Mock(**{"why.return_value": "", "wait.return_value": "server 1 ended"})
    other.report(f"{LOST} in an exchange")
    words = "^server 1 ended$" if with_servers else "^rank 0 waited for it: every rank lost the connection. First"
    with pytest.raises(CADPeerError, match=words):
        mine.patiently(lambda: False, "it", **({"with_servers": True} if with_servers else {}))
    assert (mine.reason(0) is None) == with_servers, "where a server is lost this rank has not stopped"
    cases: Any = (mine, RuntimeError, words), (mine, CADPeerError, "^x$"), (None, RuntimeError, "^it failed: x$")
    for board, kind, said in cases:
        with pytest.raises(CADPeerError, match=said), Liveness.watch(board, "it", with_servers):
            raise kind("x")


def blocked(idle_after: int | None = 8) -> list[Liveness]:
    """The second rank is blocked before exchange 5, in collective 9; the first has begun `idle_after` collectives."""
    first, second = boards(2)
    first.idle_after, second.started = lambda: idle_after, lambda: 4
    second.block(9, "document lengths at the forward number 3")
    return [first, second]


@pytest.mark.parametrize("exchange, idle_after, hopeless", [
    (5, 8, True),
    (6, 0, True),
    (4, 8, False),  # which the blocked rank has started
    (5, 9, False),  # the collective that it is in, or was in when it wrote that
    (5, 12, False),
    (5, None, False),  # the look-ahead thread is on its way
    (0, 8, False),  # what waits is a look-ahead thread
])  # fmt: skip
def test_who_waits_in_an_exchange_is_told_who_waits_for_it(exchange: int, idle_after: int, hopeless: bool) -> None:
    said = blocked(idle_after)[0].why_hopeless(exchange)
    assert bool(said) == hopeless
    if hopeless:
        assert "rank 1 waits for the other ranks' document lengths at the forward number 3 before it starts" in said
        assert "exchange 5, which rank 0 started without asking for that" in said
        assert "exception that the script caught" in said


def test_a_job_that_does_not_end_is_waited_for_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_room, "GRACE_S", 0.0)
    worker, may_end = Worker(timeout_s=0.1), threading.Event()
    job = worker.submit(may_end.wait)
    with pytest.raises(CADPeerError, match="waited 0 s for lengths"):
        worker.wait(job, "lengths")
    assert not worker.is_idle
    may_end.set()
    worker.close()


class Lost:
    """A store behind a link that can die, and come back."""

    def __init__(self) -> None:
        self.inner, self.alive = dist.HashStore(), threading.Event()
        self.alive.set()

    def __getattr__(self, name: str) -> object:
        def ask(*given: object) -> object:
            self.alive.wait()
            return getattr(self.inner, name)(*given)

        return ask


def test_whoever_asks_goes_on_in_time_and_again_when_it_is_back() -> None:
    lost = Lost()
    store = PatientStore(lost, 0.2)  # type: ignore[arg-type]
    lost.alive.clear()
    with pytest.raises(SilentStoreError, match="did not answer within 0.2 s"):
        store.set("key", "value")
    with pytest.raises(SilentStoreError, match="has not answered for more than 0.2 s"):  # the second fails at once
        store.check(["key"])
    lost.alive.set()
    while True:
        try:
            assert store.read(["key"]) == {"key": "value"}
            break
        except SilentStoreError:
            time.sleep(0.01)


def test_a_process_that_ends_asks_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    shared, refuse = dist.HashStore(), mock.Mock(side_effect=RuntimeError("can't create new thread at shutdown"))
    with monkeypatch.context() as ending:
        ending.setattr(threads, "start_daemon", refuse)
        Liveness(shared, 1, 2).leave("its process ended", failed=False)
    assert Liveness(shared, 0, 2).why_hopeless() == "rank 1 stopped: its process ended"


def test_a_board_that_does_not_answer_ends_waits() -> None:
    lost = Lost()
    board = Liveness(lost, 1, 2)  # type: ignore[arg-type]
    assert board.why_hopeless() == ""
    lost.alive.clear()
    board.store._limit_s = 0.1
    assert "did not answer within 0.1 s: the host that holds it" in board.why_hopeless()
    board.report("stopped")
    assert "the host that holds it" in str(board.explain("an exchange", RuntimeError("timed out")))
    lost.alive.set()
    board.store = mock.Mock(**{"read.side_effect": RuntimeError("Broken pipe")})
    assert board.why_hopeless().startswith("the job's store is gone") and not board.only_lost() and not board.stopped()


@pytest.mark.parametrize(("there_s", "longest_pause_s"), [(0.0, 0.25), (1e-4, 0.25), (60.0, 0.25), (0.1, 1e-3)])
def test_nobody_waits_much_longer_than_is_needed(clock: list[float], there_s: float, longest_pause_s: float) -> None:
    assert wait_until(lambda: clock[-1] >= there_s, math.inf, longest_pause_s=longest_pause_s)
    assert clock[-1] - there_s <= min(max(there_s / 8, 20e-6), longest_pause_s) + 1e-9


def test_it_looks_around_now_and_then_and_says_once_that_it_is_late(clock: list[float]) -> None:
    looked, late = [0.0], []

    def look_around() -> None:
        looked.append(clock[-1])
        if clock[-1] > 2 * LATE_S:
            raise LookupError

    with pytest.raises(LookupError):
        wait_until(lambda: False, math.inf, look_around, when_late=late.append)
    assert all(LOOK_S <= after - before < 2 * LOOK_S for before, after in zip(looked, looked[1:]))
    assert len(late) == 1 and LATE_S < late[0] < LATE_S + 0.3


@pytest.mark.parametrize("trains", [True, False])
def test_only_a_training_thread_that_waits_tells_so(monkeypatch: pytest.MonkeyPatch, trains: bool) -> None:
    """A loader on a thread of its own may wait while this rank goes on to train."""
    monkeypatch.setattr(worker_room, "TELL_S", 0.02)
    worker, told = Worker(), []
    heard = threading.Event()
    worker.while_blocked = lambda: (told.append(worker.is_idle), heard.set())
    if trains:
        worker.trains_here()
    assert worker.is_idle
    assert worker.run(lambda: heard.wait(None if trains else 0.2)) is trains
    assert bool(told) == trains and not any(told)
    told.clear()
    monkeypatch.setattr(worker_room, "TELL_S", 60.0)
    assert worker.run(lambda: "quick") == "quick" and not told
    worker.close()
    assert not worker._thread.is_alive() and worker.is_idle


NCCL_SAID = (
    "NCCL error in: ProcessGroupNCCL.cpp:4257, unhandled system error, NCCL version "
    "2.28.9\nncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. \n"
    "Last error:\nsocketPollConnect: connect to 10.0.0.2<41003> returned Connection refused"
)


@pytest.mark.parametrize("text, kept", [
    (NCCL_SAID, NCCL_SAID.splitlines()[0] + ": " + NCCL_SAID.splitlines()[3]),
    (NCCL_SAID.rpartition("\n")[0], NCCL_SAID.splitlines()[0]),
    ("\nConnection reset by peer\nC++ CapturedCallStack:\n#0 a\n", "Connection reset by peer"),
    ("", "RuntimeError"),
])  # fmt: skip
def test_a_line_says_what_nccl_said(text: str, kept: str) -> None:
    assert in_one_line(RuntimeError(text)) == kept
