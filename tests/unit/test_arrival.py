"""Waits on the host for what comes on a GPU: without one, events and copies are small stand-ins. What a GPU does is
not shown here; when the host goes on, stops, or says that a server is lost is."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from deepspeed_cad import native
from deepspeed_cad.errors import CADPeerError, ServerLostError
from deepspeed_cad.exchange import nccl
from deepspeed_cad.exchange.failure import watchdog
from deepspeed_cad.exchange.failure.board import Liveness
from deepspeed_cad.exchange.failure.identity import Comparison, Flags, Identity
from deepspeed_cad.exchange.failure.roll_call import RollCall
from deepspeed_cad.exchange.failure.watchdog import Alarm, Watchdog
from deepspeed_cad.exchange.group import MemoryStore, OwnGroup
from deepspeed_cad.exchange.landed import LandingTransport
from deepspeed_cad.exchange.native_calls import NcclCalls
from deepspeed_cad.exchange.nccl import NcclTransport
from deepspeed_cad.native import NativeCallError
from deepspeed_cad.threads import run_aside


class Losses:
    """Says that a server is lost, once it is told so."""

    def __init__(self) -> None:
        self.reason = ""

    def why(self) -> str:
        return self.reason

    def wait(self) -> str:
        return self.reason


class Side:
    """One rank that goes on without a server."""

    def __init__(self, timeout_s: float = 30.0) -> None:
        self.losses = Losses()
        self.board = Liveness(dist.HashStore(), 0, 2)
        self.board.losses, self.board.watched = self.losses, range(1)
        self.alarm = Alarm(0, self.board, timeout_s)
        self.freed: list[float] = []
        self.dog = Watchdog(self.alarm, lambda: self.freed.append(time.monotonic()))

    def wait(self, reached: Callable[[], bool]) -> None:
        self.dog.wait_for(reached, Identity(7, 0))


class Ring:
    """Numbers of ranks in device memory; a copy of them takes a few looks."""

    under_way = False

    def __init__(self, numbers: list[int]) -> None:
        self.numbers, self.host, self.copies = numbers, torch.zeros(len(numbers), dtype=torch.int32), 0
        self.flags = object.__new__(Flags)
        self.flags._copy, self.flags.least = self, 0  # type: ignore[assignment]

    def begin(self) -> None:
        self.copies, self.under_way, self.looks = self.copies + 1, True, 2

    def is_there(self) -> bool:
        self.looks -= 1
        self.under_way = self.looks > 0
        if not self.under_way:
            # As a stream writes them: the last 32 bits.
            self.host.copy_(torch.tensor(self.numbers).to(torch.int32))
        return not self.under_way


def test_a_number_is_reached_when_the_last_rank_is_there() -> None:
    ring = Ring([3, 2])
    assert [ring.flags.reached(3) for _ in range(6)] == [False] * 6
    ring.numbers[1] = 3
    while not ring.flags.reached(3):
        assert ring.copies < 9
    copies = ring.copies
    assert ring.flags.reached(3) and ring.flags.reached(1) and ring.copies == copies, "known, so nothing is read"


@pytest.mark.parametrize("begin", [(1 << 31) - 3, (1 << 32) - 3, 5 * (1 << 31) - 3])
def test_numbers_come_round(begin: int) -> None:
    """After 2^31 exchanges they are less than nothing as 32 bits, after 2^32 they begin again."""
    ring = Ring([begin, begin - 1])
    for number in range(begin, begin + 6):
        assert [ring.flags.reached(number) for _ in range(6)] == [False] * 6
        ring.numbers[1] = number
        while not ring.flags.reached(number):
            assert ring.copies < 99
        ring.numbers[0] = number + 1


def test_a_server_that_is_lost_ends_the_wait_at_once() -> None:
    side, looks = Side(timeout_s=300.0), []

    def reached() -> bool:
        looks.append(1)
        if len(looks) == 3:
            side.losses.reason = "server 1 ended: its process died"
        return False

    with pytest.raises(ServerLostError, match="server 1 ended"):
        side.wait(reached)
    assert side.board.reason(0) is None, "this rank has not stopped"
    side.dog.abandon()


def test_what_is_there_counts_also_where_a_server_is_lost_meanwhile() -> None:
    side = Side()
    side.losses.reason = "server 1 ended"
    side.wait(lambda: True)


def test_a_rank_that_never_comes_is_an_error_in_time_as_on_streams() -> None:
    side = Side(timeout_s=0.4)
    with pytest.raises(CADPeerError, match=r"exchange 7.*no sign of it within 0.4 s") as caught:
        side.wait(lambda: False)
    assert not isinstance(caught.value, ServerLostError)
    side.dog.abandon()


def test_waits_end_by_force_and_not_because_all_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """To leave NCCL stops its kernel, and the event behind that is reached though nothing came."""
    monkeypatch.setattr(watchdog, "VAIN_S", 0.3)
    side = Side()
    side.dog.give_up = lambda: side.freed.append(time.monotonic())
    side.losses.reason = "server 1 ended"
    begin = time.monotonic()
    with side.dog.inside("a call of NCCL"):
        while not side.freed:
            time.sleep(0.01)
    assert time.monotonic() - begin > 0.25 and not side.alarm.sounded
    with pytest.raises(ServerLostError):
        side.wait(lambda: True)
    side.dog.abandon()


def test_a_call_that_fails_with_a_server_says_so() -> None:
    side = Side()
    assert not isinstance(side.alarm.explain("exchange 7", NativeCallError("remote error")), ServerLostError)
    side = Side()
    side.losses.reason = "server 1 ended"
    assert isinstance(side.alarm.explain("exchange 7", NativeCallError("remote error")), ServerLostError)
    side.alarm.stop("ranks differ")
    assert not isinstance(side.alarm.explain("exchange 7", NativeCallError("x")), ServerLostError)


def test_nobody_waits_for_a_lost_server_to_make_memory() -> None:
    side = Side(timeout_s=300.0)
    one = RollCall(dist.HashStore(), np.arange(2), 0, side.alarm)
    threading.Timer(0.1, lambda: setattr(side.losses, "reason", "server 1 ended")).start()
    with pytest.raises(ServerLostError):
        one.call("making it")


def test_nobody_waits_for_a_lost_server_to_join_nccl() -> None:
    late, left, side = threading.Event(), [], Side(timeout_s=300.0)
    calls = SimpleNamespace(leave=lambda: left.append(True))
    joined = run_aside("late", lambda: late.wait() and calls)
    side.losses.reason = "server 1 ended"
    with pytest.raises(ServerLostError, match="server 1"):
        nccl._in_time(joined, side.alarm)  # type: ignore[arg-type]
    late.set()
    while not left:
        time.sleep(0.01)
    assert left == [True], "what was made too late is left"


def test_a_communicator_is_left_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = object.__new__(NcclCalls)
    left: list[object] = []
    monkeypatch.setattr(native, "call", lambda name, *given: left.append(given))
    calls._leaving, calls._communicator = threading.Lock(), SimpleNamespace(value=17)  # type: ignore[assignment]
    threads = [threading.Thread(target=lambda: calls.leave()) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(left) == 1


def _gather(store: dist.Store, counter: int, rank: int) -> list[bytes]:
    """As torch's symmetric memory does on one of two ranks, in C++: keys by a counter of the process."""
    mine = dist.PrefixStore("group", store)
    mine.set(f"CUDASymmetricMemory/{counter}/{rank}", f"{rank}")
    keys = [f"CUDASymmetricMemory/{counter}/{one}" for one in range(2)]
    mine.wait(keys)
    return mine.multi_get(keys)


def test_memory_is_mapped_beside_ranks_that_came_later() -> None:
    shared, sides = dist.HashStore(), [Side(), Side()]
    stores = [MemoryStore(shared, side.alarm) for side in sides]
    found: list[list[list[bytes]]] = [[], []]

    def meet(rank: int, counters: list[int]) -> None:
        for counter in counters:
            found[rank].append(_gather(stores[rank], counter, rank))

    threads = [threading.Thread(target=meet, args=args) for args in ((0, [17, 18, 40]), (1, [0, 1, 2]))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == [[[b"0", b"1"]] * 3] * 2
    assert stores[0].check(["CUDASymmetricMemory/41/1"]) is False, "the next ones have not met yet"


def test_mapping_memory_ends_where_a_server_is_lost_or_never_comes() -> None:
    side = Side()
    threading.Timer(0.1, lambda: setattr(side.losses, "reason", "server 1 ended")).start()
    with pytest.raises(ServerLostError, match="server 1"):
        _gather(MemoryStore(dist.HashStore(), side.alarm), 3, 0)
    with pytest.raises(CADPeerError, match=r"waited 0.2 s for .*3/1"):
        _gather(MemoryStore(dist.HashStore(), Side(timeout_s=0.2).alarm), 3, 0)


class Queue(nccl.Messenger):
    """Notes what it is to send, with events that are reached at once."""

    def __init__(self, alarm: Alarm) -> None:
        event = SimpleNamespace(record=lambda stream: None, query=lambda: True)
        self.device, self.alarm, self.rank, self.ranks = torch.device("cpu"), alarm, 1, 4
        self.stream = SimpleNamespace(wait_stream=lambda other: None, record_event=lambda: event)
        self._numbers, self.queued = torch.zeros(nccl.RING, dtype=torch.int64), list[np.ndarray]()

    def _queue(self, identity: object, table: np.ndarray, dog: Watchdog) -> None:
        self.queued.append(table)


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("moves", [False, True])
def test_who_may_lose_a_server_hears_of_all_ranks_in_every_exchange(
    monkeypatch: pytest.MonkeyPatch, goes_on: bool, moves: bool
) -> None:
    for name, fake in (
        ("current_stream", lambda *_: None), ("device", lambda _: threading.Lock()),
        ("stream", lambda _: threading.Lock()),
        ("Event", lambda **_: SimpleNamespace(record=lambda stream: None, query=lambda: True)),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, fake)
    side = Side()
    side.board.losses = side.losses if goes_on else None
    ring = torch.zeros(nccl.RING, 4, dtype=torch.int64)
    comparison = object.__new__(Comparison)
    comparison.ring, arrived = ring, []
    comparison.arrived = lambda identity, peers: arrived.append(peers)  # type: ignore[method-assign]
    queue, table = (
        Queue(side.alarm),
        np.array([[1, 2, 64, 8], [0, 2, 128, 8]] if moves else [], np.int64).reshape(-1, 4),
    )
    dog = SimpleNamespace(track=lambda before, after, label, then=None: None if then is None else then())
    done = queue.exchange(SimpleNamespace(index=5, number=9), table, comparison, dog)  # type: ignore[arg-type]
    others = [0, 2, 3] if goes_on else [2]
    if not goes_on and not moves:
        assert done is None and not queue.queued
        return
    assert done is not None and arrived == [others]
    numbers = queue.queued[0]
    for way in (0, 1):
        assert sorted(numbers[numbers[:, 0] == way, 1].tolist()) == others
    assert [len(one) for one in queue.queued[1:]] == ([2] if moves else [])


@pytest.mark.parametrize("goes_on", [False, True])
def test_no_stream_waits_for_flags_where_a_server_may_be_lost(goes_on: bool) -> None:
    side, ring = Side(), Ring([7, 7])
    side.board.losses = side.losses if goes_on else None
    nvlink, queued = object.__new__(LandingTransport), list[tuple[object, ...]]()
    nvlink._alarm, nvlink._watchdog, nvlink._seen = side.alarm, side.dog, ring.flags
    nvlink.calls = SimpleNamespace(wait=lambda *given: queued.append(given))  # type: ignore[assignment]
    way: Any = SimpleNamespace(own_flags=np.arange(2))
    nvlink._out = nvlink._back = way
    nvlink.exchanges = nvlink._pushed = 7
    nvlink._wait_for_flags(SimpleNamespace(cuda_stream=3), way, 7, Identity(7, 0))  # type: ignore[arg-type]
    assert bool(queued) != goes_on and bool(ring.copies) == goes_on
    side.dog.abandon()


class Given(OwnGroup):
    """A group that notes that it is given up."""

    def __init__(self, said: list[str]) -> None:
        object.__setattr__(self, "abandon", lambda: said.append("group"))


def test_memory_of_copies_is_released_when_trainers_go_on() -> None:
    nvlink, side, said = object.__new__(LandingTransport), Side(), list[str]()
    nvlink.group, nvlink._watchdog, nvlink._tables = Given(said), side.dog, {}  # type: ignore[assignment]
    copied = SimpleNamespace(synchronize=lambda: said.append("copied"))
    way = SimpleNamespace(stream=SimpleNamespace(record_event=lambda: copied))
    nvlink._out = nvlink._back = way  # type: ignore[assignment]
    nvlink._lanes = SimpleNamespace(release=lambda: said.append("memory"))  # type: ignore[assignment]
    nvlink.peers = SimpleNamespace(forget=lambda: said.append("name"))  # type: ignore[assignment]
    release = nvlink.abandon()
    assert said == ["group"] and side.dog._stop.is_set(), "nobody is met, and nothing is waited for"
    release()
    assert said == ["group", "copied", "copied", "memory", "name"]


def test_nccl_is_left_beside_and_its_buffers_stay_until_then() -> None:
    nccl, side, said = object.__new__(NcclTransport), Side(), list[str]()
    nccl.group, nccl._watchdog, nccl.device = Given(said), side.dog, torch.device("cpu")
    stuck = threading.Event()
    way = SimpleNamespace(stream=SimpleNamespace(synchronize=lambda: said.append("drained")))

    def leave() -> None:
        stuck.wait(20)
        said.append("left")

    nccl.messages = SimpleNamespace(leave=leave, out=way, back=way)  # type: ignore[assignment]

    class UnderWay: ...

    one = UnderWay()
    nccl._unfinished, held = {one}, weakref.ref(one)  # type: ignore[arg-type]
    del one
    nccl.abandon()()
    gc.collect()
    assert said == ["group"] and held() is not None, "a kernel of NCCL may still write into them"
    stuck.set()
    while held() is not None:
        time.sleep(0.01)
    assert said == ["group", "left", "drained", "drained"]
