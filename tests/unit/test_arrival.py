"""Waits on the host for what comes on a GPU: without one, events and copies are small stand-ins. What a GPU does is
not shown here; when the host goes on, stops, or says that a server is lost is."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from deepspeed_cad.errors import CADPeerError, ServerLostError
from deepspeed_cad.exchange.failure import patience, watchdog
from deepspeed_cad.exchange.failure.board import Liveness
from deepspeed_cad.exchange.failure.identity import Flags, Identity
from deepspeed_cad.exchange.failure.roll_call import RollCall
from deepspeed_cad.exchange.failure.watchdog import Alarm, Watchdog
from deepspeed_cad.exchange.group import MemoryStore
from deepspeed_cad.exchange.packed import ComparedFirst, GroupTransfer


class Losses:
    reason = ""

    def why(self) -> str:
        return self.reason

    wait = why


class Side:
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


@pytest.mark.parametrize("begin", [3, (1 << 31) - 3, (1 << 32) - 3, 5 * (1 << 31) - 3])
def test_a_number_is_reached_when_the_last_rank_is_there(begin: int) -> None:
    """After 2^31 exchanges numbers are less than nothing as 32 bits, after 2^32 they begin again."""
    ring = Ring([begin, begin - 1])
    for number in range(begin, begin + 6):
        assert [ring.flags.reached(number) for _ in range(6)] == [False] * 6
        ring.numbers[1] = number
        while not ring.flags.reached(number):
            assert ring.copies < 99
        copies = ring.copies
        assert ring.flags.reached(number) and ring.copies == copies, "known, so nothing is read"
        ring.numbers[0] = number + 1


def test_a_server_that_is_lost_ends_the_wait_at_once() -> None:
    side = Side(timeout_s=300.0)
    looks = iter([False, False])

    def reached() -> bool:
        if not next(looks, True):
            return False
        side.losses.reason = "server 1 ended: its process died"
        return False

    with pytest.raises(ServerLostError, match="server 1 ended"):
        side.wait(reached)
    assert side.board.reason(0) is None, "this rank has not stopped"
    side.wait(lambda: True)  # what is there counts all the same
    side.dog.abandon()


def test_a_server_that_dies_while_data_move_is_lost() -> None:
    side, work = Side(), Mock(**{"wait.side_effect": RuntimeError("connection closed by peer")})
    side.losses.reason = "server 1 ended"
    with pytest.raises(ServerLostError, match="server 1 ended"):
        ComparedFirst(Mock(), torch.device("cpu"), side.alarm)._receive(GroupTransfer(Identity(1, 0), [], [], [work]))


def test_a_rank_that_never_comes_is_an_error_in_time_as_on_streams() -> None:
    side = Side(timeout_s=0.4)
    with pytest.raises(CADPeerError, match=r"exchange 7.*no sign of it within 0.4 s") as caught:
        side.wait(lambda: False)
    assert not isinstance(caught.value, ServerLostError)
    side.dog.abandon()


def test_who_left_before_this_exchange_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    side, asked, pauses = Side(), list[tuple[int, ...]](), list[float]()
    monkeypatch.setattr(patience, "LOOK_S", 0.01)
    monkeypatch.setattr(patience.time, "sleep", pauses.append)
    monkeypatch.setattr(side.board, "why_hopeless", lambda *numbers: asked.append(numbers) or "")
    side.wait(lambda: len(asked) > 1)
    assert asked == [(7, 0)] * 2 and max(pauses) <= 1e-4, "what is queued behind it starts late by so much"


def test_waits_end_by_force_and_not_because_all_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """To leave NCCL stops its kernel, and the event behind that is reached though nothing came."""
    monkeypatch.setattr(watchdog, "VAIN_S", 0.3)
    side = Side()
    side.losses.reason = "server 1 ended"
    with side.dog.inside("a call of NCCL"):
        while not side.freed:
            time.sleep(0.01)
    assert not side.alarm.sounded
    with pytest.raises(ServerLostError):
        side.wait(lambda: True)
    side.dog.abandon()


def _gather(store: dist.Store, counter: int, rank: int) -> list[bytes]:
    """As torch's symmetric memory does on one of two ranks, in C++: keys by a counter of the process."""
    mine = dist.PrefixStore("group", store)
    mine.set(f"CUDASymmetricMemory/{counter}/{rank}", f"{rank}")
    keys = [f"CUDASymmetricMemory/{counter}/{one}" for one in range(2)]
    mine.wait(keys)
    return mine.multi_get(keys)


def test_memory_is_mapped_beside_ranks_that_came_later() -> None:
    shared, counters = dist.HashStore(), ([17, 18, 40], [0, 1, 2])
    stores = [MemoryStore(shared, Side().alarm) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda rank: [_gather(stores[rank], counter, rank) for counter in counters[rank]], range(2))
        assert list(found) == [[[b"0", b"1"]] * 3] * 2
    assert stores[0].check(["CUDASymmetricMemory/41/1"]) is False, "the next ones have not met yet"
    with pytest.raises(CADPeerError, match=r"waited 0.2 s for .*3/1"):
        _gather(MemoryStore(dist.HashStore(), Side(timeout_s=0.2).alarm), 3, 0)


@pytest.mark.parametrize("what", ["a meeting", "memory", "a rank's word"])
def test_nobody_waits_for_a_lost_server_to_make_memory(what: str) -> None:
    side = Side(timeout_s=300.0)
    threading.Timer(0.1, lambda: setattr(side.losses, "reason", "server 1 ended")).start()
    with pytest.raises(ServerLostError, match="server 1"):
        if what == "memory":
            _gather(MemoryStore(dist.HashStore(), side.alarm), 3, 0)
        elif what == "a rank's word":
            MemoryStore(dist.HashStore(), side.alarm).get("CUDASymmetricMemory/3/1")
        else:
            RollCall(dist.HashStore(), 2, side.alarm).call("making it")
