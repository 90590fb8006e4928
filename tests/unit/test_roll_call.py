"""Who is here: ranks that turn CAD on, and those that make something together.

A rank that cannot, or never comes, is an error on all, in time. One process plays them; test_roll_call_ranks.py in
tests/processes has real ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from deepspeed_cad.errors import CADError, CADPeerError
from deepspeed_cad.exchange import landing, nccl
from deepspeed_cad.exchange.failure import patience, roll_call
from deepspeed_cad.exchange.failure.roll_call import RollCall
from deepspeed_cad.exchange.failure.watchdog import Alarm
from deepspeed_cad.exchange.group import PeerGroup
from deepspeed_cad.exchange.landing import LandingArea, NoRoomError, grow_together
from deepspeed_cad.native import NativeCallError
from deepspeed_cad.notice import name_ranks
from deepspeed_cad.threads import run_aside

CPU = torch.device("cpu")


def on_ranks(run: Callable[[int], Any], ranks: int) -> list[Any]:
    """What each rank gives or raises, all at once."""
    with ThreadPoolExecutor(ranks) as pool:
        futures = [pool.submit(run, rank) for rank in range(ranks)]
        return [future.exception() or future.result() for future in futures]


def member(store: dist.Store, rank: int, members: list[int], timeout_s: float = 60.0) -> RollCall:
    return RollCall(store, np.array(members), rank, Alarm(members[rank], None, timeout_s))


def test_every_member_reads_the_words_of_all() -> None:
    store = dist.HashStore()
    both = [member(store, rank, [3, 5]) for rank in range(2)]
    for word in ("", "a b"):
        assert on_ranks(lambda rank, word=word: both[rank].call("it", f"{word}{rank}"), 2) == (
            [[f"{word}0", f"{word}1"]] * 2
        )  # fmt: skip
    assert RollCall(None, np.arange(1), 0, Alarm(0, None, 1.0)).call("it", "alone") == ["alone"]


def test_a_meeting_does_not_wait_for_ever_and_names_who_is_missing() -> None:
    one = member(dist.HashStore(), 1, [4, 6, 9], 0.2)
    with pytest.raises(CADPeerError, match=r"rank 6 waited for making it: ranks \[4, 9\] did not come within 0.2 s"):
        one.call("making it")


def test_a_meeting_ends_where_the_alarm_sounds() -> None:
    one = member(dist.HashStore(), 0, [0, 1])
    threading.Timer(0.1, lambda: one.alarm.stop("ranks differ")).start()
    with pytest.raises(CADPeerError, match="rank 0 stopped: ranks differ"):
        one.call("making it")


@pytest.fixture()
def gpus(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Symmetric memory that a rank may lack; threads are ranks."""
    state = SimpleNamespace(full={}, tries={}, emptied=[], met=[])

    def empty(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        rank = state.rank.number
        state.tries[rank] = state.tries.get(rank, 0) + 1
        if state.full.get(rank, 0) >= state.tries[rank]:
            raise torch.OutOfMemoryError("CUDA driver error: out of memory\nmore text")
        return torch.empty(size, dtype=dtype)

    def rendezvous(tensor: torch.Tensor, handle: object) -> SimpleNamespace:
        state.met.append(state.rank.number)
        return SimpleNamespace(buffer_ptrs=[tensor.data_ptr()] * 2, offset=0)

    state.rank = threading.local()
    memory = SimpleNamespace(empty=empty, rendezvous=rendezvous)
    monkeypatch.setattr(landing, "symmetric_memory", lambda: memory)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: state.emptied.append(state.rank.number))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 << 20, 80 << 20))
    return state


def grow(state: SimpleNamespace, store: dist.Store) -> Callable[[int], bool]:
    def run(rank: int) -> bool:
        state.rank.number = rank
        peers = PeerGroup(np.array([2, 7]), rank, "two ranks", store)
        area = LandingArea("out 0", peers, CPU, member(store, rank, [2, 7]))
        return grow_together([(area, np.array([100, 200]))]) and area.capacity == landing.GRAIN

    return run


def test_memory_that_one_rank_lacks_is_one_error_on_every_rank(gpus: SimpleNamespace) -> None:
    gpus.full = {1: 2}
    found = on_ranks(grow(gpus, dist.HashStore()), 2)
    assert [type(one) for one in found] == [NoRoomError, NoRoomError]
    assert str(found[0]) == str(found[1])
    for words in ("landing area out 0 failed on 1 of 2 ranks. rank 7: 8 MiB were wanted, 3 of 80 MiB are free",
                  "CUDA driver error: out of memory)"):  # fmt: skip
        assert words in str(found[0])
    assert gpus.emptied == [1] and not gpus.met, "nobody went on to map the others' memory"


def test_memory_that_torch_had_cached_is_given_back_and_used(gpus: SimpleNamespace) -> None:
    gpus.full = {0: 1}
    assert on_ranks(grow(gpus, dist.HashStore()), 2) == [True, True]
    assert gpus.emptied == [0] and sorted(gpus.met) == [0, 1]


def test_areas_grow_together_or_all_keep_what_they_had(gpus: SimpleNamespace) -> None:
    """The third of what rank 7 asks for is not there, also on the second try: nothing is mapped, and less is tried."""
    store = dist.HashStore()
    most = {0: 1 << 40, 1: 20 << 20}
    gpus.has = {}

    def empty(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        rank = gpus.rank.number
        gpus.has[rank] = gpus.has.get(rank, 0) + size
        if gpus.has[rank] > most[rank]:
            gpus.has[rank] = 0  # what was allocated is dropped before the next try
            raise torch.OutOfMemoryError("CUDA driver error: out of memory")
        return torch.empty(size, dtype=dtype)

    landing.symmetric_memory().empty = empty

    def run(rank: int) -> Any:
        gpus.rank.number = rank
        peers, calls = PeerGroup(np.array([2, 7]), rank, "two ranks", store), member(store, rank, [2, 7])
        areas = [LandingArea(f"lane {lane}", peers, CPU, calls) for lane in range(3)]
        with pytest.raises(NoRoomError) as error:
            grow_together([(area, np.array([100, 200])) for area in areas])
        assert not gpus.met and all(area.capacity == 0 for area in areas)
        gpus.has[rank] = 0
        calls.call("all have looked")
        assert grow_together([(area, np.array([100, 200])) for area in areas[:2]])
        assert [area.capacity for area in areas] == [landing.GRAIN] * 2 + [0]
        assert not grow_together([(area, np.array([landing.GRAIN, 1])) for area in areas[:2]]), "they hold that"
        return str(error.value)

    said = on_ranks(run, 2)
    assert said[0] == said[1] and '"memory"' in said[0]
    assert "rank 7: 24 MiB were wanted, 3 of 80 MiB are free" in said[0]
    assert "areas lane 0, lane 1, lane 2" in said[0] and gpus.emptied == [1] and len(gpus.met) == 4


class Nccl:
    """In place of NCCL."""

    def __init__(self, unique_id: bytes, ranks: int, rank: int) -> None:
        self.given = (unique_id, ranks, rank)


@pytest.fixture()
def joining(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    store = dist.HashStore()
    monkeypatch.setattr(nccl, "open_store", lambda group, what: dist.PrefixStore(what, store))
    monkeypatch.setattr(dist, "get_rank", lambda group: group.rank)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(nccl, "NcclCalls", Nccl)
    monkeypatch.setattr(nccl, "open_nccl", lambda: 0)
    monkeypatch.setattr(nccl, "new_unique_id", lambda: b"the id")
    return monkeypatch


def join(rank: int, timeout_s: float = 60.0) -> Any:
    alarm = Alarm(rank, None, timeout_s)
    return nccl.join_ranks(SimpleNamespace(rank=rank), CPU, alarm)  # type: ignore[arg-type]


def test_ranks_join_by_the_id_of_the_first(joining: pytest.MonkeyPatch) -> None:
    assert [one.given for one in on_ranks(join, 2)] == [(b"the id", 2, 0), (b"the id", 2, 1)]


def test_a_rank_without_nccl_is_named_by_all(joining: pytest.MonkeyPatch) -> None:
    def missing() -> int:
        if threading.current_thread() is not threading.main_thread() and next(turns):
            raise NativeCallError("no NCCL library")
        return 0

    turns = iter([False, True])
    joining.setattr(nccl, "open_nccl", missing)
    for error in on_ranks(join, 2):
        assert isinstance(error, CADError) and "opening NCCL failed on 1 of 2 ranks" in str(error), error


def test_joining_ends_in_time_and_what_comes_too_late_is_left() -> None:
    may_join, left = threading.Event(), []
    late = SimpleNamespace(leave=lambda: left.append(True))
    joined = run_aside("late", lambda: may_join.wait() and late)
    with pytest.raises(NativeCallError, match="within 0.1 s, though all of them were there.*NCCL_SOCKET_IFNAME"):
        nccl._in_time(joined, Alarm(0, None, 0.1))  # type: ignore[arg-type]
    assert not left
    may_join.set()
    while not left:
        time.sleep(0.01)


@pytest.fixture()
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """The store of a job of four ranks, of which this is rank 0."""
    store = dist.HashStore()
    monkeypatch.setattr(roll_call, "_store", lambda: store)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    return store


def arrive(store: dist.Store, *ranks: int) -> None:
    for rank in ranks:
        turn = store.add(f"sessions/{rank}", 1)
        store.add(f"arrived/{turn}", 1)


def test_those_who_never_came_are_named(store: dist.Store) -> None:
    arrive(store, 2)
    with pytest.raises(CADPeerError, match="rank 0 waited 0 s for ranks 1, 3 to turn CAD on: .*AUTOLOAD=0"):
        roll_call.call_roll(0.01)


def test_a_second_session_waits_for_second_sessions(store: dist.Store) -> None:
    arrive(store, 0, 1, 2, 3, 1, 2)
    with pytest.raises(CADPeerError, match="for rank 3 to turn CAD on"):
        roll_call.call_roll(0.01)


def test_the_awaited_are_named_in_a_warning_first(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(patience, "LATE_S", 0.01)
    arrive(store, 1, 2)
    with pytest.raises(CADPeerError):
        roll_call.call_roll(0.02)
    assert "rank 0 has waited 0 s for rank 3 to turn CAD on" in caplog.text


@pytest.mark.parametrize(
    ("count", "named"),
    [(1, "rank 0"), (2, "ranks 0, 1"), (17, "ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 and 1 more")],
)
def test_names_of_ranks(count: int, named: str) -> None:
    assert name_ranks(range(count)) == named
