"""The watchdog, one look at a time: waits of streams and of the host, over a real board and a clock that is played."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from scripts import ROOT

from deepspeed_cad import threads as daemons
from deepspeed_cad.errors import CADPeerError, ServerLostError
from deepspeed_cad.exchange.failure import board, watchdog
from deepspeed_cad.exchange.failure.board import Liveness
from deepspeed_cad.exchange.failure.identity import Comparison, Identity
from deepspeed_cad.exchange.failure.watchdog import AGAIN, AGAIN_S, LAST_S, VAIN_S, Alarm, Watchdog
from deepspeed_cad.threads import start_daemon


class FakeEvent:
    def __init__(self, done: bool) -> None:
        self.done = done

    def query(self) -> bool:
        return self.done


REACHED = FakeEvent(True)


class Watched:
    """The watchdog of one rank: nothing looks but `at`, and what is to let the GPU go on runs at once."""

    def __init__(self, timeout_s: float, store: dist.Store | None = None, rank: int = 0, ranks: int = 2,
                 comparison: Comparison | None = None) -> None:  # fmt: skip
        self.store = store or dist.HashStore()
        self.alarm = Alarm(rank, Liveness(self.store, rank, ranks), timeout_s)
        self.gave_up, self.ended_also, self.ended = list[float](), list[float](), list[str]()
        self.now = 0.0
        self.dog = Watchdog(self.alarm, lambda: self.gave_up.append(self.now), comparison=comparison)
        self.dog.end_messages = lambda: self.ended_also.append(self.now)
        self.dog.end_process = self.ended.append

    def at(self, *seconds: float) -> int:
        """Look at these times; how often it gave up so far."""
        for self.now in seconds:
            self.dog._pop()
            self.dog._look(self.now)
        return len(self.gave_up)


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    state = SimpleNamespace(stuck=False, now=0.0)

    def end(name: str, run: Callable[[], None], device: object) -> Future[None]:
        ended: Future[None] = Future()
        if not state.stuck:
            ended.set_result(run())
        return ended

    monkeypatch.setattr(watchdog, "start_daemon", lambda *_: SimpleNamespace(join=lambda timeout: None))
    monkeypatch.setattr(watchdog, "run_aside", end)
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: state.now))
    monkeypatch.setattr(board, "WORDS_S", 0.0)
    return state


@pytest.mark.parametrize("end", ["close", "abandon"])
def test_the_watchdogs_threads_have_ended_when_it_is_closed(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """They may be about to ask events of a device that is closed next."""
    monkeypatch.setattr(watchdog, "start_daemon", start_daemon)
    dog, frees = Watched(300.0).dog, Future[None]()
    dog.track(FakeEvent(False), FakeEvent(False), "exchange 1")
    thread, dog._freeing = dog._thread, [frees]
    assert thread is not None and thread.is_alive()
    if end == "close":
        threading.Timer(0.1, frees.set_result, [None]).start()
    getattr(dog, end)()
    assert frees.done() == (end == "close")
    thread.join(0.0 if end == "close" else 60.0)
    assert not thread.is_alive()


def test_what_arrived_last_is_compared_when_it_is_closed() -> None:
    arrived: list[str] = []
    looks = SimpleNamespace(look=lambda: "", finish=lambda: "ranks differ" if arrived else "")
    watched = Watched(30.0, comparison=looks)  # type: ignore[arg-type]
    watched.dog.track(REACHED, REACHED, "exchange 1", lambda: arrived.append("a number"))
    with pytest.raises(CADPeerError, match="rank 0 stopped: ranks differ"):
        watched.dog.close()
    assert watched.alarm.liveness.stopped() == "ranks differ"
    watched.dog.close()  # which has been said


def test_a_wait_that_does_not_end_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    watched, slow = Watched(10.0), FakeEvent(False)
    watched.dog.track(REACHED, REACHED, "exchange 1")
    watched.dog.track(FakeEvent(False), slow, "exchange 2")
    watched.dog.track(REACHED, FakeEvent(False), "exchange 3")
    assert not watched.at(0, 50), "a wait that its stream has not reached is not stuck"
    slow.done = True
    assert not watched.at(51, 60) and watched.at(61.5) == 1
    with pytest.raises(CADPeerError, match="rank 0 waited for exchange 3: rank 1 died.* no sign of it within 10 s"):
        watched.alarm.check()
    assert caplog.messages == ["exchange 3 did not end in time; a peer died or hangs"]


@pytest.mark.parametrize("frees", [False, True])
@pytest.mark.parametrize("at_host", [False, True])
def test_a_process_whose_wait_cannot_be_ended_ends(frees: bool, at_host: bool) -> None:
    """A peer that is alive may stop a stream again, so it is let go again before that. `at_host`: in a call of NCCL,
    which connects two hosts with their first message; not every NCCL lets go of that when it is aborted."""
    watched, wait = Watched(10.0), FakeEvent(False)
    with ExitStack() as host:
        if at_host:
            host.enter_context(watched.dog.inside("exchange 1"))
        else:
            watched.dog.track(REACHED, wait, "exchange 1")
        assert watched.at(0, 11, 11 + AGAIN_S / 2) == 1
        if frees:
            wait.done = True
            host.close()
        again = [11.5 + one * 1.1 * AGAIN_S for one in range(1, AGAIN + 2)]
        assert watched.at(*again) == (1 if frees else AGAIN) and not watched.ended
        watched.at(watched.gave_up[-1] + LAST_S + 0.1)
    assert bool(watched.ended) != frees and watched.ended_also == watched.gave_up
    if not frees:
        assert watched.ended[0].startswith("rank 0 waited for exchange 1: rank 1 died or hangs")
        assert f"The {'training thread' if at_host else 'GPU'} could not be freed" in watched.ended[0]


def test_a_process_that_ends_says_why_and_where(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setattr(watchdog.os, "_exit", lambda code: print(code == watchdog.EXIT_CODE))
    watchdog._end_process("it hangs")
    out, said = capfd.readouterr()
    assert out == "True\n" and "most recent call first" in said and said.endswith("_cad: it hangs\n")


def test_a_driver_that_lets_no_call_through_does_not_keep_the_process(threads: SimpleNamespace) -> None:
    """What is to free the GPU waits for it too, and has not come back even where the stream stands no more."""
    watched, wait = Watched(10.0), FakeEvent(False)
    watched.dog.track(REACHED, wait, "exchange 1")
    threads.stuck = True
    watched.at(0, 11)
    wait.done = True
    watched.at(13, 11 + LAST_S + 0.1)
    assert "could not be freed" in watched.ended[0] and watched.dog._given_up == 1
    stops, over = iter([False, True]), list[int]()
    watched.dog.track(REACHED, REACHED, "exchange 2", lambda: over.append(2))
    watched.dog._freeing[0].set_result(None)
    watched.dog._stop.wait = lambda timeout: next(stops)  # type: ignore[method-assign, assignment]
    watched.dog._run()
    assert not over, "nothing is asked of it while one of both still frees"


def test_a_rank_that_timed_out_is_not_taken_for_the_one_that_died(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of three waits for rank 2, and its training thread is stuck with the GPU: the watchdog tells rank 1."""
    first = Watched(10.0, ranks=3)
    second = Watched(60.0, first.store, 1, 3)
    for watched in (first, second):
        watched.dog.track(REACHED, FakeEvent(False), "exchange 1")
        assert not watched.at(0, 9)
    assert first.at(11) == second.at(11) == 1
    with pytest.raises(CADPeerError, match=r"rank 1 waited for exchange 1: rank 2 died or hangs.*rank 0 stopped"):
        second.alarm.check()
    monkeypatch.setattr(board, "WORDS_S", 1e6)  # for which a process that ends has no time
    assert second.alarm.why().startswith("rank 1 waited for exchange 1: rank 2 died or hangs")


def test_a_wait_is_in_vain_where_a_rank_has_stopped() -> None:
    """But not at once: what was sent before may still come."""
    watched = Watched(60.0)
    other = Liveness(watched.store, 1, 2)
    other.started = lambda: 4  # what is waited for is none of these
    other.close()
    watched.dog.track(REACHED, FakeEvent(False), "a broadcast")
    assert not watched.at(1, 1 + 0.9 * VAIN_S) and watched.at(2 + VAIN_S) == 1
    with pytest.raises(CADPeerError, match="waited for a broadcast: rank 1 stopped: its session was closed$"):
        watched.alarm.check()


@pytest.mark.parametrize(("at_host", "exchange", "ends"), [(True, 5, True), (False, 5, True), (False, 4, False)])
def test_a_wait_is_in_vain_where_a_rank_waits_elsewhere(at_host: bool, exchange: int, ends: bool) -> None:
    watched, identity = Watched(60.0), Identity(exchange, 0)
    other = Liveness(watched.store, 1, 2)
    watched.alarm.liveness.idle_after, other.started = lambda: 8, lambda: 4
    other.block(9, "document lengths")
    if not at_host:
        watched.dog.track(REACHED, FakeEvent(False), identity)
    with watched.dog.inside(identity) if at_host else nullcontext():
        assert watched.at(*(look / 5 for look in range(10))) == ends, "it asks less often than it looks"
    if ends:
        with pytest.raises(CADPeerError, match=f"waited for core-attention exchange {exchange}: .* rank 1 waits for"):
            watched.alarm.check()


def test_what_differs_stops_a_rank_and_tells_the_others() -> None:
    arrived: list[str] = []
    looks = SimpleNamespace(look=lambda: "ranks differ" if arrived else "", finish=lambda: "")
    watched = Watched(30.0, comparison=looks)  # type: ignore[arg-type]
    assert not watched.at(0)
    watched.dog.track(REACHED, REACHED, "exchange 1", lambda: arrived.append("a number"))
    assert watched.at(1) == 1
    other = Watched(30.0, watched.store, 1)
    assert not other.at(0), "it waits for nobody"
    other.dog.track(REACHED, FakeEvent(False), "exchange 1")
    assert other.at(1) == 1
    for rank, one in enumerate((watched, other)):
        with pytest.raises(CADPeerError, match=f"rank {rank} stopped: ranks differ"):
            one.alarm.check()


def test_a_server_that_is_lost_is_no_error(threads: SimpleNamespace) -> None:
    """The wait of a stream lasts until the transport is given up, however long trainers take to agree."""
    watched = Watched(10.0)
    with watched.dog.inside("a call of NCCL"):
        assert not watched.at(0, 9) and not watched.alarm.goes_on
        watched.alarm.liveness.losses = SimpleNamespace(why=lambda: "server 1 ended", wait=lambda: "server 1 ended")
        assert not watched.at(9.5, 9.5 + 0.9 * VAIN_S) and watched.alarm.goes_on
    watched.dog.track(REACHED, FakeEvent(False), "exchange 7")
    assert not watched.at(11, 22, 100) and not watched.dog.freed
    threads.now = 100.0
    with watched.dog.inside("a call of NCCL"):
        assert not watched.at(100.5, 100.0 + 0.9 * VAIN_S)
        assert watched.at(100.0 + VAIN_S) == 1 and watched.dog.freed, "a call of the host does not come back by itself"
    watched.alarm.liveness.losses.why = lambda: ""  # others have come in its place: time begins anew
    assert not watched.alarm.sounded and watched.at(102, 111) == 1 and not watched.alarm.sounded and not watched.ended
    assert type(watched.alarm.explain("it", RuntimeError())) is ServerLostError and not watched.alarm.told
    for wait in ("exchange 7", "exchange 8"):
        watched.alarm.time_out(wait)
    watched.alarm.stop("ranks differ")
    with pytest.raises(CADPeerError, match=r"exchange 7: rank 1 died.* no sign of it within 10 s") as caught:
        watched.alarm.check()
    assert type(caught.value) is CADPeerError and watched.alarm.told, "its own reason, the first"


def test_what_the_driver_says_of_an_event_and_of_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, calls = {7: 0, 8: 600, 9: 700}, list[str]()
    driver = SimpleNamespace(
        cuEventQuery=lambda event: answers[event.value],
        cuDevicePrimaryCtxRetain=lambda context, device: calls.append(f"retain {device}") or device,
        cuCtxSetCurrent=lambda context: calls.append("enter"),
    )
    monkeypatch.setattr(daemons, "_cuda_driver", lambda: driver)
    events = [SimpleNamespace(cuda_event=at, query=lambda: "never recorded") for at in (0, 7, 8, 9)]
    assert [*map(daemons.is_over, events[:3])] == ["never recorded", True, False]
    with pytest.raises(RuntimeError, match="700"):
        daemons.is_over(events[3])
    for index in (0, 1):
        daemons._enter_context(SimpleNamespace(index=index))
    assert calls == ["retain 0", "enter", "retain 1"], "a call that failed leaves the thread as it is"
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(f"set {device.index}"))
    for kind in None, "cpu", "cuda":
        daemons.start_daemon("asks", lambda: calls.append("asks"), kind and SimpleNamespace(type=kind, index=1)).join()
    assert calls[3:] == ["asks", "asks", "set 1", "retain 1", "asks"], "else a thread is on GPU 0"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    daemons._enter_context(SimpleNamespace(index=0))
    assert daemons.is_over(events[3]) == "never recorded" and len(calls) == 8, "GPUs of AMD are torch's"


SCRIPT = """
import ctypes, logging, sys, threading, time
from datetime import timedelta
import torch.distributed as dist
from deepspeed_cad.threads import start_daemon

class EndsSlowly:
    # While modules are taken down: by then no other thread may enter the interpreter.
    def __del__(self, sleep=time.sleep):
        sleep(1.5)

def rendezvous():
    # The other rank never comes: an exception after a second, on its way back into Python.
    dist.ProcessGroupGloo(dist.HashStore(), 0, 2, timedelta(seconds=1))

sys.ends_slowly = EndsSlowly()
start_daemon("opens a group", rendezvous, None)
time.sleep(0.3)
print("last words", end="")
"""


@pytest.mark.parametrize(("ending", "code"), [("sys.exit(3)", 3), ("raise ValueError('no more data')", 1)])
def test_a_thread_in_a_rendezvous_changes_neither_code_nor_words(ending: str, code: int) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT + ending], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (code, "last words"), done.stderr
    assert "terminate" not in done.stderr and ("no more data" in done.stderr) == (code == 1)
