"""Who is here: ranks that turn CAD on, and those that make something together.

A rank that cannot, or never comes, is an error on all, in time. One process plays them; test_deepspeed.py in
tests/processes has real ranks.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from deepspeed_cad.errors import CADError, CADPeerError, ServerLostError
from deepspeed_cad.exchange import landing, nccl
from deepspeed_cad.exchange.failure import board, patience, roll_call
from deepspeed_cad.exchange.failure.board import Liveness
from deepspeed_cad.exchange.failure.roll_call import RollCall
from deepspeed_cad.exchange.failure.watchdog import Alarm
from deepspeed_cad.exchange.group import OwnGroup, PeerGroup
from deepspeed_cad.exchange.landing import LandingArea, Lanes, NoRoomError
from deepspeed_cad.native import NativeCallError
from deepspeed_cad.threads import run_aside

CPU = torch.device("cpu")


def on_ranks(run: Callable[[int], Any], ranks: int) -> list[Any]:
    """What each rank gives or raises, all at once."""
    with ThreadPoolExecutor(ranks) as pool:
        futures = [pool.submit(run, rank) for rank in range(ranks)]
        return [future.exception() or future.result() for future in futures]


def member(store: dist.Store, rank: int, ranks: int, timeout_s: float = 60.0) -> RollCall:
    return RollCall(store, ranks, Alarm(rank, None, timeout_s))


def test_words_of_ranks_which_are_named_as_in_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ranks 1, 5 and 6 of the job, two have said this."""
    store = dist.HashStore()
    for rank, words in {1: ("=one", "=", "=no NCCL", "="), 2: ("=two", "=", "=")}.items():
        for call, word in enumerate(words, 1):
            store.set(f"{call}/{rank}", word)
    monkeypatch.setattr(board, "WORDS_S", 0.0)
    first = member(store, 0, 3, 0.5)
    first.alarm.liveness.watched = [1, 5, 6]
    assert first.call("making it", "zero") == ["zero", "one", "two"] and first.call("making it") == [""] * 3
    with pytest.raises(CADError, match="^making it failed on 1 of 3 ranks. rank 5: no NCCL$"):
        first.agree("making it", "")
    with pytest.raises(CADPeerError, match=r"First error here: ranks \[6\] did not come within 0.5 s$"):
        first.call("making it")


@pytest.mark.parametrize("exchanges, words", [
    (4, "making it: rank 1 stopped: its session was closed$"),
    (5, r"making it: rank 1 stopped: .* First error here: ranks \[1\] did not come within 0.5 s$"),
])  # fmt: skip
def test_who_left_before_the_next_exchange_is_not_waited_for(exchanges: int, words: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(patience, "LOOK_S", 0.01)
    store = dist.HashStore()
    mine, other = (Liveness(store, rank, 2) for rank in range(2))
    mine.started, other.started = lambda: 4, lambda: exchanges
    other.close()
    with pytest.raises(CADPeerError, match=words):
        RollCall(store, 2, Alarm(0, mine, 0.5 if exchanges == 5 else 60.0)).call("making it")


@pytest.fixture()
def gpus(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Symmetric memory of which a rank has only `most` bytes; threads are ranks."""
    state = SimpleNamespace(rank=threading.local(), most={0: 1 << 40, 1: 20 << 20}, has={0: 0, 1: 0}, cached=0)
    state.emptied, state.met = [], []

    def empty(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        rank = state.rank.number
        state.has[rank] += size
        if state.has[rank] > state.most[rank]:
            state.has[rank] = 0  # what was allocated is dropped before the next try
            raise torch.OutOfMemoryError("CUDA driver error: out of memory\nmore text")
        return torch.empty(size, dtype=dtype)

    def rendezvous(tensor: torch.Tensor, handle: object) -> SimpleNamespace:
        state.met.append(state.rank.number)
        if state.rank.number:
            return SimpleNamespace(buffer_ptrs=[tensor.data_ptr() - 64] * 2, offset=64)
        return SimpleNamespace(buffer_ptrs=[tensor.data_ptr()] * 2)  # as an older torch has it

    def empty_cache() -> None:
        state.emptied.append(state.rank.number)
        state.most[1] += state.cached

    monkeypatch.setattr(landing, "symmetric_memory", lambda: SimpleNamespace(empty=empty, rendezvous=rendezvous))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 << 20, 80 << 20))
    return state


@pytest.mark.parametrize("cached", [0, 8 << 20])
def test_areas_grow_together_or_all_keep_what_they_had(gpus: SimpleNamespace, cached: int) -> None:
    """A third of what rank 1 asks for is there once torch gave back its cache. If not, all ranks get one error."""
    store, gpus.cached = dist.HashStore(), cached

    def run(rank: int) -> str:
        gpus.rank.number = rank
        peers, calls = PeerGroup(np.arange(2), rank, "two ranks"), member(store, rank, 2)
        lanes, areas = Lanes(peers, CPU, calls), [LandingArea(f"lane {lane}") for lane in range(3)]
        needed, words = [(area, np.array([100, 200])) for area in areas], ""
        try:
            assert lanes.grow(needed)
        except NoRoomError as error:
            words = str(error)
            assert not gpus.met and not any(area.capacity for area in areas)
            gpus.has[rank] = 0
            calls.call("all have looked")
            assert lanes.grow(needed[:2])
        assert [area.capacity for area in areas] == [landing.GRAIN] * 2 + [landing.GRAIN if cached else 0]
        assert not lanes.grow([(area, np.array([landing.GRAIN, 1])) for area in areas[:2]]), "they hold that"
        return words

    said = on_ranks(run, 2)
    assert gpus.emptied == [1] and len(gpus.met) == (6 if cached else 4)
    assert said[0] == said[1]
    for words in () if cached else (
        "landing areas lane 0, lane 1, lane 2 failed on 1 of 2 ranks. rank 1: 24 MiB were wanted, 3 of 80 MiB are free",
        "CUDA driver error: out of memory)", '"memory"',
    ):  # fmt: skip
        assert words in said[0]


def test_a_rank_without_nccl_is_named_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> int:
        if next(turns):
            raise NativeCallError("no NCCL library")
        return 0

    def join(rank: int) -> Any:
        return nccl.join_ranks(OwnGroup(rank, 2, "own", store, mock.Mock()), CPU, Alarm(rank, None, 60.0))

    turns, store = iter([False, True]), dist.HashStore()
    monkeypatch.setattr(nccl, "open_nccl", missing)
    monkeypatch.setattr(nccl, "new_unique_id", lambda: b"the id")
    for error in on_ranks(join, 2):
        assert isinstance(error, CADError) and "opening NCCL failed on 1 of 2 ranks" in str(error), error


@pytest.mark.parametrize("lost", [False, True])
def test_joining_ends_in_time_and_what_comes_too_late_is_left(lost: bool) -> None:
    may_join, left, alarm = threading.Event(), [], Alarm(0, None, 60.0 if lost else 0.1)
    late = SimpleNamespace(leave=lambda: left.append(True))
    joined = run_aside("late", lambda: may_join.wait() and late)
    words = "within 0.1 s, though all of them were there.*NCCL_SOCKET_IFNAME"
    if lost:
        words, alarm.liveness.losses = "server 1 ended", SimpleNamespace(why=lambda: "server 1 ended")
    with pytest.raises(ServerLostError if lost else NativeCallError, match=words):
        nccl._in_time(joined, alarm)  # type: ignore[arg-type]
    assert not left
    may_join.set()
    while not left:
        time.sleep(0.01)
    assert type(run_aside("fails", lambda: 1 // 0).exception(60.0)) is ZeroDivisionError


@pytest.fixture()
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """The store of a job of four ranks, of which this is rank 0."""
    store = dist.HashStore()
    monkeypatch.setattr(roll_call, "_store", lambda: store)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    return store


@pytest.mark.parametrize("world, others, named", [
    (2, [], "rank 1"), (3, [2], "rank 1"), (4, [2], "ranks 1, 3"), (2, [1], ""), (1, [], ""),
])  # fmt: skip
def test_who_joins_without_cad_is_named(store: Any, world: int, others: Any, named: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(roll_call, "LATE_S", 0.0)
    monkeypatch.setattr(dist, "get_world_size", lambda: world)
    with roll_call.together():
        pass
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    absent = pytest.raises(CADPeerError, match=f"^CAD is on on rank 0 and not on {named}: ") if named else nullcontext()
    with absent, roll_call.together():
        for rank in others:
            store.set(f"has/{rank}", "1")
    assert store.check(["has/0"]) == (world > 1)


@pytest.mark.parametrize("ranks, named", [
    ([2], "ranks 1, 3"), ([0, 1, 2, 3, 1, 2], "rank 3"),  # whose second session has not come
    ([1, 2, 3], ""),
])  # fmt: skip
def test_those_who_never_came_are_named(store: Any, ranks: Any, named: str, monkeypatch: Any, caplog: Any) -> None:
    """In a warning, too, before time is up."""
    monkeypatch.setattr(patience, "LATE_S", 0.01)
    for rank in ranks:
        store.add(f"arrived/{store.add(f'sessions/{rank}', 1)}", 1)
    words = f"rank 0 waited 0 s for {named} to turn CAD on: .*AUTOLOAD=0"
    with pytest.raises(CADPeerError, match=words) if named else nullcontext():
        roll_call.call_roll(0.02)
    assert (f"rank 0 has waited 0 s for {named} to turn CAD on" in caplog.text) == bool(named)
