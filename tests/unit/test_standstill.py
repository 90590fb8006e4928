"""Which rank waits for which, where one waits for lengths and another one in an exchange."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from deepspeed_cad.ahead import worker as worker_room
from deepspeed_cad.ahead.gather import Gatherer, Said, Subject, What
from deepspeed_cad.ahead.worker import Worker
from deepspeed_cad.errors import CADPeerError
from deepspeed_cad.exchange.failure import board as liveness_room
from deepspeed_cad.exchange.failure import patience
from deepspeed_cad.exchange.failure.board import Liveness
from deepspeed_cad.exchange.failure.roll_call import Meeting
from deepspeed_cad.exchange.failure.watchdog import Alarm


def boards(ranks: int = 2, idle_after: int | None = 8) -> list[Liveness]:
    """The last rank is blocked before exchange 5, in collective 9; the others have begun `idle_after` collectives."""
    store = dist.HashStore()
    made = [Liveness(store, rank, ranks) for rank in range(ranks)]
    for one in made[:-1]:
        one.idle_after = lambda: idle_after
    made[-1].started = lambda: 4
    made[-1].block(9, "document lengths at the forward number 3")
    return made


@pytest.mark.parametrize(
    ("exchange", "idle_after", "hopeless"),
    [
        (5, 8, True),
        (6, 0, True),
        (4, 8, False),  # which the blocked rank has started
        (5, 9, False),  # the collective that it is in, or was in when it wrote that
        (5, 12, False),
        (5, None, False),  # the look-ahead thread is on its way
        (0, 8, False),  # what waits is a look-ahead thread
    ],
)
def test_who_waits_in_an_exchange_is_told_who_waits_for_it(exchange: int, idle_after: int, hopeless: bool) -> None:
    said = boards(idle_after=idle_after)[0].why_hopeless(exchange)
    assert bool(said) == hopeless
    if hopeless:
        assert "rank 1 waits for the other ranks' document lengths at the forward number 3 before it starts" in said
        assert "exchange 5, which rank 0 started without asking for that" in said
        assert "exception that the script caught" in said


def test_a_rank_that_stopped_is_the_first_reason() -> None:
    made = boards(3)
    made[1].report("out of memory")
    assert made[0].why_hopeless(5) == "rank 1 stopped: out of memory"
    assert made[2].why_hopeless(7) == "rank 1 stopped: out of memory", "what it said of itself is no reason"


def test_a_rank_does_not_wait_for_itself() -> None:
    made = boards()
    made[1].idle_after = lambda: 8
    assert made[1].why_hopeless(5) == ""


class Never:
    """Communication that does not end."""

    def is_completed(self) -> bool:
        return False


def test_both_ranks_stop_and_name_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness_room, "LOOK_S", 0.02)
    made = boards()
    threads, errors = [], {}

    def wait(rank: int, *what: Any) -> None:
        with pytest.raises(CADPeerError) as caught:
            made[rank].patiently(Never(), *what)  # type: ignore[arg-type]
        errors[rank] = str(caught.value)

    for given in ((0, "exchange 5", 5), (1, "the other ranks' lengths")):
        threads.append(threading.Thread(target=wait, args=given))
        threads[-1].start()
    for one in threads:
        one.join(10)
    assert errors[0].startswith("rank 0 waited for exchange 5: rank 1 waits for the other ranks' document lengths")
    assert errors[1].startswith("rank 1 waited for the other ranks' lengths: rank 0 stopped: waited for exchange 5 in")
    assert "rank 1 waits for the other ranks' document lengths at the forward number 3" in errors[1]


def test_a_meeting_before_an_exchange_ends_as_the_exchange_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "LOOK_S", 0.02)
    made = boards()
    made[0].started = lambda: 3
    early = Meeting(dist.HashStore(), np.arange(2), 0, Alarm(0, made[0], 0.3))
    monkeypatch.setattr(liveness_room, "PATIENCE_S", 0.1)
    with pytest.raises(CADPeerError, match=r"ranks \[1\] did not come within 0.3 s"):
        early.hold("growing")
    made = boards()
    made[0].started = lambda: 4
    with pytest.raises(CADPeerError, match="rank 0 stopped: waited for growing: rank 1 waits for the other ranks' doc"):
        Meeting(dist.HashStore(), np.arange(2), 0, Alarm(0, made[0], 30.0)).hold("growing")


# What this rank knows of itself


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


def test_jobs_that_failed_are_over_too() -> None:
    worker = Worker()
    for error in (CADPeerError("planted"), TimeoutError("of the job's own")):
        with pytest.raises(type(error), match=str(error)):
            worker.run(lambda error=error: (_ for _ in ()).throw(error))
    worker.submit(lambda: None)
    worker.close()
    assert worker.is_idle


def test_a_job_that_does_not_end_is_waited_for_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_room, "GRACE_S", 0.0)
    worker, may_end = Worker(timeout_s=0.1), threading.Event()
    job = worker.submit(may_end.wait)
    with pytest.raises(CADPeerError, match="waited 0 s for lengths"):
        worker.wait(job, "lengths")
    assert not worker.is_idle
    may_end.set()
    worker.close()


def test_collectives_are_counted_as_they_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    gatherer, seen = Gatherer(None, 0, 1, None), []
    monkeypatch.setattr(gatherer, "_all", lambda values, what: (seen.append(gatherer.inside), [values])[1])
    subjects = [Subject(What.LENGTHS, epoch=1), Subject(What.PLAN)]
    for subject in subjects:
        found = gatherer.gather(subject, np.arange(3))
        assert isinstance(found[0], Said) and gatherer.inside is None
    assert seen == [(1, subjects[0])] * 2 + [(2, subjects[1])] * 2 and gatherer.begun == 2
    gatherer._give_up(CADPeerError("ranks are apart"))
    with pytest.raises(CADPeerError):
        gatherer.gather(subjects[0])
    assert gatherer.begun == 2, "nobody met"


def test_ranks_without_a_board_have_nothing_to_watch() -> None:
    assert Alarm(0, None, 1.0).in_vain() == ""
    seen: list[int] = []
    board = SimpleNamespace(why_hopeless=lambda exchange: seen.append(exchange) or "", started=lambda: 6)
    alarm = Alarm(0, board, 1.0)  # type: ignore[arg-type]
    assert (alarm.in_vain(4), alarm.in_vain(0), alarm.in_vain()) == ("", "", "") and seen == [4, 0, 7]
