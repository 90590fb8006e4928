"""Sockets between trainers and servers: trainers reach a server beside strangers, which are dropped unread; frames; and
both ends, in this process: who is told what, and who is given up."""

import gc
import json
import os
import random
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from deepspeed_cad.errors import CADPeerError
from deepspeed_cad.exchange.failure import board
from deepspeed_cad.exchange.failure.board import Liveness
from deepspeed_cad.layout import Layout
from deepspeed_cad.server import links as links_room
from deepspeed_cad.server import process, sockets
from deepspeed_cad.server.links import ServerLink, TrainerLinks
from deepspeed_cad.server.orders import BUSY, FAILED, LEAVE, OPEN, PLAN, REGROUP, RELEASE, Leader
from deepspeed_cad.server.process import _Server
from deepspeed_cad.server.sockets import Door, Frame, Inbox, Listener, encode

Pair = tuple[socket.socket, socket.socket]
HERE = "127.0.0.1:29500"
ALIVE = (socket.TCP_NODELAY, socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


class Guests:
    def __init__(self, pool: ThreadPoolExecutor, trainers: int, limit_s: float = 30.0, *look: Any) -> None:
        listener = Listener(7, HERE)
        self.pool, self.door, self.open = pool, listener.door, list[socket.socket]()
        self.accepted: Future[dict[int, socket.socket]] = pool.submit(listener.accept, trainers, limit_s, *look)

    def stranger(self, sends: bytes = b"") -> socket.socket:
        connection = socket.create_connection((self.door.address, self.door.port), timeout=10)
        connection.sendall(sends)
        self.open.append(connection)
        return connection

    def trainer(self, rank: int) -> Future[socket.socket]:
        return self.pool.submit(sockets.connect_to, rank, "server 7", self.door)

    def talk(self, *trainers: Future[socket.socket]) -> None:
        found = self.accepted.result(20)
        for rank, trainer in enumerate(trainers):
            connection = trainer.result(20)
            self.open += [connection, found[rank]]
            connection.sendall(bytes([rank]))
            assert found[rank].recv(10) == bytes([rank])
            for one in connection, found[rank]:
                at_once, idle, pause, times = (one.getsockopt(socket.IPPROTO_TCP, name) for name in ALIVE)
                assert one.gettimeout() is None and at_once and one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                assert idle + pause * times == 10, "seconds until it is noticed that a host vanished"


Come = Callable[..., Guests]
"""A server opens its door: to so many trainers, for so many seconds."""


@pytest.fixture
def come(pool: ThreadPoolExecutor) -> Iterator[Come]:
    made: list[Guests] = []
    yield lambda *given: made.append(Guests(pool, *given)) or made[-1]
    for guests in made:
        for connection in guests.open:
            connection.close()


def _ended(connection: socket.socket) -> bool:
    with suppress(ConnectionResetError):
        return connection.recv(100) == b""
    return True


BAD = {
    "too little": bytes(8), "http": b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n" * 3,
    "another token": random.Random(5).randbytes(sockets.GREETING), "the token, and no trainer's number": None,
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD)
def test_a_stranger_is_dropped_with_one_line(come: Come, bad: str, caplog: pytest.LogCaptureFixture) -> None:
    server = come(1)
    stranger = server.stranger()
    with suppress(OSError):  # dropped already
        stranger.sendall(BAD[bad] or server.door.halves[0] + (1).to_bytes(4, "big"))
        stranger.shutdown(socket.SHUT_WR)
    assert _ended(stranger)
    server.talk(server.trainer(0))
    assert [r.message.startswith("server 7 dropped a connection from 127.0.0.1 port") for r in caplog.records] == [True]


def test_strangers_hold_up_no_trainer(come: Come) -> None:
    """Some send nothing, or not all, some more than is read, some go and come; trainers are through at once."""
    server = come(2)
    first = server.trainer(0).result(20)  # which connects again: the newest connection counts
    silent = [server.stranger(bytes(sent)) for sent in (0, sockets.GREETING - 1) for _ in range(20)]
    for sent in (sockets.GREETING, 1 << 16):
        for _ in range(10):
            server.stranger(bytes(sent)).close()
    began = time.monotonic()
    server.talk(server.trainer(0), server.trainer(1))
    assert time.monotonic() - began < sockets.GREET_S
    assert all(map(_ended, [first, *silent])), "when all trainers are here nobody else is"
    with pytest.raises(OSError):
        server.stranger()


def test_trainers_that_do_not_come_are_named(come: Come) -> None:
    server = come(3, 0.5)
    trainer = server.trainer(1)
    server.stranger(bytes(5))
    with pytest.raises(CADPeerError, match=r"server 7: trainers \[0, 2\] did not connect to 127.0.0.1 port"):
        server.accepted.result(20)
    trainer.result(20).close()
    with pytest.raises(OSError):
        server.stranger()
    with pytest.raises(CADPeerError, match="trainer 0 stopped"):
        come(1, 30.0, mock.Mock(side_effect=[None, CADPeerError("trainer 0 stopped")])).accepted.result(20)


@pytest.mark.parametrize(
    ("answer", "words"), [(b"", "closed before all of it"), (bytes(32), "somebody else answers"), (None, "timed out")]
)
def test_a_trainer_is_not_fooled_by_whoever_took_the_port(pool: Any, monkeypatch: Any, answer: Any, words: str) -> None:
    monkeypatch.setattr(sockets, "CONNECT_S", 1.0)

    def serve() -> None:
        connection, _ = stranger.accept()
        with connection:
            connection.sendall(b"x" if answer is None else answer)  # or never all that is waited for
            if answer is not None:
                connection.shutdown(socket.SHUT_WR)
            connection.recv(sockets.GREETING + 1, socket.MSG_WAITALL)

    with socket.create_server(("127.0.0.1", 0)) as stranger:
        served = pool.submit(serve)
        port = stranger.getsockname()[1]
        with pytest.raises(CADPeerError, match=f"server 7 at 127.0.0.1 port {port}: .*{words}"):
            sockets.connect_to(0, "server 7", Door("127.0.0.1", port, "00" * sockets.HALF + "ff" * sockets.HALF))
        served.exception(10)


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts: this one, whose own name leads to loopback, and another one."""
    ways = {"here": "127.0.1.1", "127.0.0.1": "127.0.0.1", "there": "10.0.0.2", "behind": "10.9.0.2"}
    ways |= {"localhost": "127.0.0.1", "by IPv6": "fe80::2%eth0"}
    own = {"127.0.1.1": "127.0.0.1", "127.0.0.1": "127.0.0.1", "10.0.0.2": "10.0.0.1", "10.9.0.2": "192.168.0.1"}

    def look_up(host: str, port: int, type: int) -> list:
        if host not in ways:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET6 if ":" in ways[host] else socket.AF_INET, type, 17, "", (ways[host], port))]

    class Probe(nullcontext):
        def __init__(self, family: int, kind: int) -> None:
            super().__init__(self)
            if kind != socket.SOCK_DGRAM:
                raise OSError

        def connect(self, address: tuple[str, int]) -> None:
            self.getsockname = lambda: (own.get(address[0], "fe80::1%eth0"), 1)

    monkeypatch.setattr(sockets.socket, "getaddrinfo", look_up)
    monkeypatch.setattr(sockets.socket, "socket", Probe)


@pytest.mark.parametrize("targets, address", [
    (["127.0.0.1"], "127.0.0.1"), (["here"], "127.0.0.1"), (["there"], "10.0.0.1"),
    (["behind", "there"], "192.168.0.1"), (["here", "unknown", "there"], "10.0.0.1"),
    (["127.0.0.1", "a container beside it"], "127.0.0.1"), (["here", "unknown"], None), (["unknown"], None),
    (["localhost", "there"], "127.0.0.1"), (["here", "by IPv6"], "fe80::1%eth0"),
])  # fmt: skip
def test_the_interface_that_leads_to_the_rendezvous(network: None, targets: list[str], address: str | None) -> None:
    if address is not None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        assert sockets.find_interface(*targets) == (family, address)
        return
    with pytest.raises(CADPeerError, match=f"to {', '.join(targets)}, other than loopback: set"):
        sockets.find_interface(*targets)


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_frames(pair: Pair) -> None:
    ours, theirs = pair
    arrays = np.arange(6).reshape(2, 3), np.zeros((0, 6), int), np.array([-1, 2**62])
    inbox = Inbox(theirs)
    sent, frames = encode({"do": "plan", "scale": 0.1 + 0.2}, arrays) * 2, []
    for begin in range(0, len(sent), 7):
        ours.sendall(sent[begin : begin + 7])
        frames += inbox.read()
    for frame in frames:
        assert frame.head == {"do": "plan", "scale": 0.1 + 0.2}
        assert [one.tolist() for one in frame.arrays] == [one.tolist() for one in arrays]
        assert [one.shape for one in frame.arrays] == [one.shape for one in arrays]
    assert len(frames) == 2
    for larger in (0, 0), (1, 0), (0, 1):
        ours.sendall(struct.pack("!II", sockets.MOST_TEXT + larger[0], sockets.MOST_RAW + larger[1]))
        with pytest.raises(OSError, match="none of our frames") if any(larger) else nullcontext():
            assert list(Inbox(theirs).read()) == []
    ours.close()
    with pytest.raises(ConnectionError):
        list(inbox.read())


@pytest.mark.parametrize("head, raw, words", [
    (b"", 0, "Expecting value"), ([], 0, "as an integer"), ({"do": RELEASE}, 0, "shapes"),
    ({"do": PLAN, "shapes": [[1, 1]]}, 16, "cannot reshape"),
    ({"do": PLAN, "shapes": [["a", "b"]]}, 8, "can't multiply"),
    ({"do": PLAN, "shapes": [[1]]}, 7, "buffer size must be a multiple"), (b"[" * 100_000, 0, "recursion"),
])  # fmt: skip
def test_what_is_no_frame_ends_the_connection_with_the_reason(pair: Pair, head: Any, raw: int, words: str) -> None:
    ours, theirs = pair
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    inbox = Inbox(theirs)
    ours.sendall(encode({"do": LEAVE}))
    assert [frame.head for frame in inbox.read()] == [{"do": LEAVE}]
    ours.sendall(len(text).to_bytes(4, "big") + raw.to_bytes(4, "big") + text + bytes(raw))
    with pytest.raises(OSError, match=f"{8 + len(text) + raw} bytes came that are none of our frames: .*({words})"):
        while True:
            assert list(inbox.read()) == []


def test_a_micro_batch_is_over_when_no_call_of_it_is_left() -> None:
    heads: list[dict[str, Any]] = []
    leader = Leader(lambda head, arrays: heads.append(head))
    layout = Layout.from_rank_lengths([[3], []])
    first = leader.open(0, layout, None)
    held = [first]
    del first
    leader.open(1, layout, None)
    gc.collect()
    leader.open(2, layout, None)
    assert [head["do"] for head in heads] == [OPEN, OPEN, RELEASE, OPEN]
    assert heads[2] == {"do": RELEASE, "turns": [1]}
    held.clear()
    gc.collect()
    leader.tell({"do": OPEN})
    assert sorted(heads[-2]["turns"]) == [0, 2]
    leader._over = mock.MagicMock(**{"__len__.return_value": 2, "popleft.side_effect": [3, IndexError]})
    leader.tell({"do": OPEN})  # another thread took the other one
    assert heads[-2]["turns"] == [3]


SILENT_S = 0.4


class Ends:
    def __init__(self, store: dist.Store) -> None:
        self.store = store
        self.trainer, self.server = socket.socketpair()

    def link(self, goes_on: bool = True, silent_s: float = 30.0, begun: bool = True) -> ServerLink:
        board = Liveness(self.store, 0, 2)
        board.may_change, board.losses = goes_on, mock.Mock() if goes_on and begun else None
        return ServerLink(0, {1: self.trainer}, board, silent_s)

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


@pytest.mark.parametrize("goes_on, begun", [(True, True), (True, False), (False, False)])
def test_a_server_that_says_nothing_is_lost_by_name(ends: Ends, goes_on: bool, begun: bool) -> None:
    """Where training has not opened all end: nobody goes on without it yet, and whoever opens a group with it looks at
    the board."""
    link = ends.link(goes_on, SILENT_S, begun)
    wait_for(lambda: link.gone)
    assert link.gone[1].endswith("it has said nothing for 0.4 s: it hangs, or nothing reaches its host")
    if not begun:
        wait_for(Liveness(ends.store, 0, 2).why_hopeless)
        assert "rank 1 stopped: it has said nothing" in Liveness(ends.store, 0, 2).why_hopeless()
    if not goes_on:
        with pytest.raises(CADPeerError, match="rank 0: server 1 ended: it has said nothing"):
            link.tell({"do": RELEASE, "turns": []})


@pytest.mark.parametrize("reason, key", [("", "closed/0"), ("x" * 4001, "error/0")])
def test_a_server_that_ends_behind_its_trainer_is_not_lost(ends: Ends, reason: str, key: str) -> None:
    before = set(threading.enumerate())
    link, inbox = ends.link(), Inbox(ends.server)
    (listens,) = set(threading.enumerate()) - before
    link.leave(reason)
    link.leave("again")
    assert [frame.head for frame in inbox.read()] == [{"do": LEAVE, "reason": reason[:4000]}]
    assert [*link.liveness.store.read(["left", "closed/0", "error/0"])] == ["left", key]
    ends.server.close()
    wait_for(lambda: not listens.is_alive())
    assert not link.gone


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
    link.lose(1, "only the first reason counts")
    link.change((), 1, None)
    links = ends.links()
    assert links.wait_for_reason(10).startswith("the trainers go on without it: it has said nothing for 0.4 s")
    assert Liveness(ends.store, 1, 2).why_hopeless() == "" and Liveness(ends.store, 0, 2).why_hopeless() == ""


@pytest.mark.parametrize("cut", [0, 5])
def test_a_trainer_whose_connection_is_cut_ends_a_server_with_its_name(ends: Ends, cut: int) -> None:
    links = ends.links()
    ends.trainer.sendall(encode({"do": RELEASE, "turns": [1, 2, 3]})[:cut])
    ends.trainer.close()
    assert links.wait_for_reason(10) == "the process of trainer 0 died, or ended by os._exit"


def test_all_hear_of_a_trainer_that_died_behind_one_that_ended_well(ends: Ends, pair: Pair) -> None:
    links = TrainerLinks(2, {0: ends.server, 1: pair[1]}, Liveness(ends.store, 2, 3))
    pair[0].sendall(encode({"do": LEAVE, "reason": ""}))
    pair[0].settimeout(10), pair[0].shutdown(socket.SHUT_WR)
    wait_for(lambda: links._left and not links.why())
    ends.trainer.close()
    reason = "the process of trainer 0 died, or ended by os._exit (trainers 1 had ended well before: look for a loop"
    assert links.wait_for_reason(10) == f"{reason} that is shorter)" and links.wait() == "the trainers have ended"
    told, inbox = list[dict](), Inbox(pair[0])
    while {"do": FAILED, "reason": links.reason} not in told:
        told += [frame.head for frame in inbox.read()]
    said = ["its process died", f"lost its trainers: {links.reason}"]
    assert [*map(links.liveness.look_up, ("error/0", "error/2"))] == said


def test_of_trainers_that_stopped_the_one_that_did_so_by_itself_is_named(ends: Ends, pair: Pair) -> None:
    Liveness(ends.store, 0, 3).report("lost its connection in the lengths")
    Liveness(ends.store, 1, 3).report("ValueError: no more data")
    links = TrainerLinks(2, {0: ends.server, 1: pair[1]}, Liveness(ends.store, 2, 3))
    assert links.wait_for_reason(10) == "trainer 1 stopped: ValueError: no more data"


@pytest.mark.parametrize("learns", [True, False])
def test_a_trainer_that_lost_others_may_learn_and_say_which(ends: Ends, monkeypatch: Any, learns: bool) -> None:
    """It waits for the word of all ranks, this one too."""
    monkeypatch.setattr(board, "WORDS_S", 30.0 if learns else 0.0)
    Liveness(ends.store, 0, 2).report(f"{board.LOST} in the lengths")
    links = ends.links()
    wait_for(lambda: Liveness(ends.store, 0, 2).look_up("error/1"))
    if learns:
        assert not links.ended.wait(0.3), "longer than it has to say a reason of its own"
        ends.trainer.sendall(encode({"do": LEAVE, "reason": "rank 5 did not come"}))
    expected = "trainer 0 ended: rank 5 did not come" if learns else "trainer 0 stopped: lost its peers in the lengths"
    assert links.wait_for_reason(10) == expected


def test_a_forked_process_holds_no_connection(ends: Ends) -> None:
    """As a data loader's worker: servers see that a trainer died when its own end is closed."""
    link = ends.link()
    child = os.fork()
    if child == 0:
        os._exit(ends.trainer.fileno() != -1)
    assert os.waitpid(child, 0)[1] == 0 and ends.trainer.fileno() != -1
    link.leave("")


def test_who_has_just_come_is_told_nothing_before_the_change(ends: Ends) -> None:
    """The look-ahead thread plans for the present servers while the training thread lets one in."""
    link = ServerLink(0, {}, Liveness(ends.store, 0, 1), 30.0)
    link.add(3, ends.trainer)
    link.tell({"do": OPEN, "turn": 7}, (np.zeros((0, 5), int), np.zeros(1, int), np.zeros(0, int)), generation=0)
    link.change((3,), 1, {"do": REGROUP, "generation": 1, "servers": [3], "exchanges": 0})
    links = ends.links(3)
    first = links.orders.get(timeout=10)
    assert isinstance(first, Frame) and first.head["do"] == REGROUP and links.why() == "servers have changed"
    link.tell({"do": OPEN}, generation=0)
    link.change((), 2, {"do": REGROUP})
    assert link.gone == {3: "a trainer lost it"} and links.orders.get(timeout=10) is None
    link.leave("")


def test_orders_to_a_server_that_does_not_read_hold_nobody_up(ends: Ends, pair: Pair) -> None:
    """Its buffers are full: who tells it gives up, and tells the others."""
    link = ends.link(silent_s=5 * SILENT_S)
    here, there = pair
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


def test_a_stranger_has_so_much_time_and_one_of_many_no_place(come: Come, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "GREET_S", 60.0)
    server = come(1)
    first = [server.stranger() for _ in range(5)]
    for _ in range(sockets.MOST_GUESTS + 1):  # and a place for each trainer
        server.stranger()
    assert all(map(_ended, first))
    for seconds in 0.1, -1.0:  # the next one has its place; and where time is up already that is all that is wrong
        with pytest.raises(TimeoutError):
            sockets._receive(server.open[5], 1, seconds)
    monkeypatch.setattr(sockets, "GREET_S", 0.1)
    assert _ended(server.stranger(bytes(3)))
    server.talk(server.trainer(0))


def test_a_server_that_fails_says_what_ended_its_trainers_or_itself(ends: Ends, capfd: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(process, "FAREWELL_S", 0.0)
    link, links = ends.link(goes_on=False), ends.links()
    server = mock.Mock(_links=links, liveness=links.liveness, device="cpu", **{"split.rank": 1, "loop.held": 3 << 20})
    reason = "server 1 has no memory left on cpu (3 MiB held for backwards): 2 GiB. Reserve more servers, or use"
    assert _Server._explain(server, torch.OutOfMemoryError("2 GiB")) == f"{reason} smaller micro-batches"
    wait_for(lambda: link.gone), link.lose(2, "only the first one counts")
    assert [*link.gone] == [1] and reason in link.gone[1] and links.liveness.look_up("error/1") == link.gone[1]
    assert capfd.readouterr().err == f"deepspeed_cad: rank 0: server 1 ended: {link.gone[1]}\n"
    server = mock.Mock(_links=(links := mock.Mock(reason="trainer 1 died")))
    assert _Server._explain(server, ValueError("of it")) == "trainer 1 died" and not server.liveness.report.called
    links.reason = ""
    assert _Server._explain(server, ValueError("of it")) == "ValueError: of it"
    assert server.liveness.report.call_args == links.fail.call_args == mock.call("ValueError: of it")
    links.wait_for_reason.return_value = "trainer 0 stopped"
    assert _Server._explain(server, CADPeerError("lost")) == "trainer 0 stopped" and links.fail.call_count == 1
