"""A trainer's and a server's end of their sockets, both in this process: who is told what, and who is given up."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch.distributed as dist

from deepspeed_cad.errors import CADPeerError
from deepspeed_cad.exchange.failure.board import Liveness
from deepspeed_cad.server import links as links_room
from deepspeed_cad.server.links import ServerLink, TrainerLinks
from deepspeed_cad.server.orders import BUSY, OPEN, PLAN, REGROUP, RELEASE
from deepspeed_cad.server.sockets import Frame, encode

SILENT_S = 0.4


class Ends:
    """The sockets of one connection, and the board."""

    def __init__(self, store: dist.Store) -> None:
        self.store = store
        self.trainer, self.server = socket.socketpair()

    def link(self, goes_on: bool = True, silent_s: float = 30.0, server: int = 1) -> ServerLink:
        board = Liveness(self.store, 0, 2)
        board.may_change = goes_on
        return ServerLink(0, {server: self.trainer}, board, silent_s)

    def links(self, rank: int = 1) -> TrainerLinks:
        return TrainerLinks(rank, {0: self.server}, Liveness(self.store, rank, 2))


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    for name, seconds in {"LOOK_S": 0.02, "WORD_S": 0.02, "GRACE_S": 0.2}.items():
        monkeypatch.setattr(links_room, name, seconds)
    made = Ends(dist.HashStore())
    with made.trainer, made.server:
        yield made


def wait_for(what: Callable[[], object]) -> None:
    end = time.monotonic() + 10
    while not what():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_who_has_just_come_is_told_nothing_before_the_change(ends: Ends) -> None:
    """The look-ahead thread plans for the present servers while the training thread lets one in."""
    link = ServerLink(0, {}, Liveness(ends.store, 0, 1), 30.0)
    link.add(3, ends.trainer)
    link.tell({"do": OPEN, "turn": 7}, (np.zeros((0, 5), int), np.zeros(1, int), np.zeros(0, int)), generation=0)
    link.change((3,), 1, {"do": REGROUP, "generation": 1, "servers": [3], "exchanges": 0})
    links = ends.links(3)
    first = links.orders.get(timeout=10)
    assert isinstance(first, Frame) and first.head["do"] == REGROUP and links.called == 1
    link.leave("")


def test_orders_arrive_and_the_end_behind_them(ends: Ends) -> None:
    link, links = ends.link(goes_on=False), ends.links()
    links.busy = (1.5, 2.0)
    link.tell({"do": RELEASE, "turns": [3]})
    wait_for(lambda: link.busy() == (1.5, 2.0))
    link.leave("")
    items = [links.orders.get(timeout=10) for _ in range(2)]
    assert items[0] == Frame({"do": RELEASE, "turns": [3]}, []) and items[1] is None and not links.reason


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_server_that_says_nothing_is_lost_by_name(ends: Ends, goes_on: bool) -> None:
    link = ends.link(goes_on, SILENT_S)
    wait_for(lambda: link.gone)
    assert link.gone[1].endswith("it has said nothing for 0.4 s: it hangs, or nothing reaches its host")
    if not goes_on:
        wait_for(Liveness(ends.store, 0, 2).why_hopeless)
        assert "rank 1 stopped: it has said nothing" in Liveness(ends.store, 0, 2).why_hopeless()
        with pytest.raises(CADPeerError, match="rank 0: server 1 ended: it has said nothing"):
            link.tell({"do": RELEASE, "turns": []})


def test_a_trainer_that_stood_still_does_not_blame_its_servers(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was stopped in its look for what has come: that is read before anybody is called silent."""
    stands = threading.Event()

    class Selector(selectors.DefaultSelector):
        def select(self, timeout: float | None = None) -> list:
            if stands.is_set():
                stands.clear()
                time.sleep(3 * SILENT_S)
                ends.server.sendall(encode({"do": BUSY, "busy": 0, "total": 0}))
            return super().select(timeout)

    monkeypatch.setattr(selectors, "DefaultSelector", Selector)
    link = ends.link(silent_s=SILENT_S)
    stands.set()
    wait_for(lambda: link._busy)
    assert not link.gone
    link.leave("")


def test_a_server_that_wakes_hears_that_it_was_given_up_and_blames_nobody(ends: Ends) -> None:
    """Its sockets have closed meanwhile, which must not look like trainers that died."""
    link = ends.link(silent_s=SILENT_S)
    wait_for(lambda: link.gone)
    link.change((), 1, None)
    links = ends.links()
    assert links.wait_for_reason(10).startswith("the trainers go on without it: it has said nothing for 0.4 s")
    assert Liveness(ends.store, 1, 2).why_hopeless() == "" and Liveness(ends.store, 0, 2).why_hopeless() == ""


def test_orders_to_a_server_that_does_not_read_hold_nobody_up(ends: Ends) -> None:
    """Its buffers are full: who tells it gives up, and tells the others."""
    link = ends.link(silent_s=5 * SILENT_S)
    here, there = socket.socketpair()
    with here, there:
        link.add(2, here)
        link.change((1, 2), 1, None)
        there_inbox = TrainerLinks(2, {0: there}, Liveness(ends.store, 2, 3))
        large = np.zeros((1 << 18, 5), int)
        link.tell({"do": PLAN, "turn": 0, "key": [], "nano_batch": 0, "cut": []}, (large,), generation=1)
        link.tell({"do": RELEASE, "turns": [1]}, generation=1)
        assert list(link.gone) == [1]
        told = [there_inbox.orders.get(timeout=10) for _ in range(2)]
        assert [isinstance(one, Frame) and one.head["do"] for one in told] == [PLAN, RELEASE]
        link.leave("")


@pytest.mark.parametrize("cut", [0, 5])
def test_a_trainer_whose_connection_is_cut_ends_a_server_with_its_name(ends: Ends, cut: int) -> None:
    links = ends.links()
    ends.trainer.sendall(encode({"do": RELEASE, "turns": [1, 2, 3]})[:cut])
    ends.trainer.close()
    assert links.wait_for_reason(10) == "the process of trainer 0 died, or ended by os._exit"
