"""Trainers reach a server beside strangers, which are dropped unread; and where a server listens."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext

import pytest

from deepspeed_cad.errors import CADPeerError
from deepspeed_cad.server import sockets as handshake
from deepspeed_cad.server.sockets import GREETING, HALF, MOST_GUESTS, Door, Listener, connect_to, find_interface

HERE = "127.0.0.1:29500"


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


class Guests:
    """Whoever connects to a server."""

    def __init__(self, pool: ThreadPoolExecutor, trainers: int, limit_s: float = 30.0) -> None:
        listener = Listener(7, HERE)
        self.pool, self.door, self.open = pool, listener.door, list[socket.socket]()
        self.accepted: Future[dict[int, socket.socket]] = pool.submit(listener.accept, trainers, limit_s)

    def stranger(self, sends: bytes = b"") -> socket.socket:
        """A connection that sends something."""
        connection = socket.create_connection((self.door.address, self.door.port), timeout=10)
        connection.sendall(sends)
        self.open.append(connection)
        return connection

    def trainer(self, rank: int) -> Future[socket.socket]:
        """A connection with the token."""
        return self.pool.submit(connect_to, rank, "server 7", self.door)

    def talk(self, *trainers: Future[socket.socket]) -> None:
        """Each trainer's socket is the server's for its rank."""
        found = self.accepted.result(20)
        for rank, trainer in enumerate(trainers):
            connection = trainer.result(20)
            self.open += [connection, found[rank]]
            connection.sendall(bytes([rank]))
            assert found[rank].recv(10) == bytes([rank])


@pytest.fixture
def come(pool: ThreadPoolExecutor) -> Iterator[Callable[..., Guests]]:
    """Makes a server that listens."""
    made: list[Guests] = []
    yield lambda *given: made.append(Guests(pool, *given)) or made[-1]
    for guests in made:
        for connection in guests.open:
            connection.close()


def _ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(100) == b""
    except ConnectionResetError:
        return True


BAD = {
    "too little": bytes(8),
    "http": b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n" * 3,
    "another token": random.Random(5).randbytes(GREETING),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_stranger_is_dropped_with_one_line(
    come: Callable[..., Guests], bad: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = come(1)
    stranger = server.stranger()
    try:
        stranger.sendall(BAD[bad])
        stranger.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # dropped already
    assert _ended(stranger)
    server.talk(server.trainer(0))
    assert [r.message.startswith("server 7 dropped a connection from 127.0.0.1 port") for r in caplog.records] == [True]


def test_strangers_hold_up_no_trainer(come: Callable[..., Guests]) -> None:
    """Some send nothing, or not all, some more than is read, some go and come; trainers are through at once."""
    server = come(2)
    silent = [server.stranger(bytes(sent)) for sent in (0, GREETING - 1) for _ in range(20)]
    for sent in (GREETING, 1 << 16):
        for _ in range(10):
            server.stranger(bytes(sent)).close()
    began = time.monotonic()
    server.talk(server.trainer(0), server.trainer(1))
    assert time.monotonic() - began < handshake.GREET_S
    assert all(map(_ended, silent)), "when all trainers are here nobody else is"
    with pytest.raises(OSError):
        server.stranger()


def test_a_stranger_has_so_much_time_and_one_of_many_no_place(
    come: Callable[..., Guests], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "GREET_S", 60.0)
    server = come(1)
    first = [server.stranger() for _ in range(5)]
    for _ in range(MOST_GUESTS):
        server.stranger()
    assert all(map(_ended, first))
    monkeypatch.setattr(handshake, "GREET_S", 0.1)
    assert _ended(server.stranger(bytes(3)))
    server.talk(server.trainer(0))


def test_a_rank_that_does_not_train_and_a_trainer_that_comes_twice(come: Callable[..., Guests]) -> None:
    server = come(2)
    with pytest.raises(CADPeerError, match="trainer 2 does not reach server 7"):
        connect_to(2, "server 7", server.door)
    first = server.trainer(0).result(20)
    again = server.trainer(0)
    again.result(20)
    server.talk(again, server.trainer(1))
    assert _ended(first)


def test_trainers_that_do_not_come_are_named(come: Callable[..., Guests]) -> None:
    server = come(3, 0.5)
    trainer = server.trainer(1)
    server.stranger(bytes(5))
    with pytest.raises(CADPeerError, match=r"server 7: trainers \[0, 2\] did not connect to 127.0.0.1 port"):
        server.accepted.result(20)
    trainer.result(20).close()
    with pytest.raises(OSError):
        server.stranger()


@pytest.mark.parametrize(
    ("answer", "words"), [(b"", "closed before all of it"), (bytes(HALF), "somebody else answers"), (None, "timed out")]
)
def test_a_trainer_is_not_fooled_by_whoever_took_the_port(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, answer: bytes | None, words: str
) -> None:
    monkeypatch.setattr(handshake, "CONNECT_S", 1.0)

    def serve() -> None:
        connection, _ = stranger.accept()
        with connection:
            connection.sendall(b"x" if answer is None else answer)  # or never all that is waited for
            if answer is not None:
                connection.shutdown(socket.SHUT_WR)
            connection.recv(GREETING + 1, socket.MSG_WAITALL)

    with socket.create_server(("127.0.0.1", 0)) as stranger:
        served = pool.submit(serve)
        port = stranger.getsockname()[1]
        with pytest.raises(CADPeerError, match=f"server 7 at 127.0.0.1 port {port}: .*{words}"):
            connect_to(0, "server 7", Door("127.0.0.1", port, "00" * HALF + "ff" * HALF))
        served.exception(10)


# Where a server listens


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts: this one, whose own name leads to loopback, and another one."""
    ways = {"here": "127.0.1.1", "127.0.0.1": "127.0.0.1", "there": "10.0.0.2", "behind": "10.9.0.2"}
    own = {"127.0.1.1": "127.0.0.1", "127.0.0.1": "127.0.0.1", "10.0.0.2": "10.0.0.1", "10.9.0.2": "192.168.0.1"}

    def look_up(host: str, port: int, type: int) -> list:
        if host not in ways:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, type, 17, "", (ways[host], port))]

    class Probe(nullcontext):
        def __init__(self, family: int, kind: int) -> None:
            super().__init__(self)

        def connect(self, address: tuple[str, int]) -> None:
            self.getsockname = lambda: (own[address[0]], 1)

    monkeypatch.setattr(handshake.socket, "getaddrinfo", look_up)
    monkeypatch.setattr(handshake.socket, "socket", Probe)


@pytest.mark.parametrize(
    ("targets", "address"),
    [
        (["127.0.0.1"], "127.0.0.1"),
        (["here"], "127.0.0.1"),
        (["there"], "10.0.0.1"),
        (["behind", "there"], "192.168.0.1"),
        (["here", "unknown", "there"], "10.0.0.1"),
        (["127.0.0.1", "a container beside it"], "127.0.0.1"),
    ],
)
def test_the_interface_that_leads_to_the_rendezvous(network: None, targets: list[str], address: str) -> None:
    assert find_interface(*targets) == (socket.AF_INET, address)


@pytest.mark.parametrize(
    ("targets", "words"),
    [(["here", "unknown"], "to here, unknown, other than loopback: set"), (["unknown"], "to unknown, other")],
)
def test_no_way_to_the_trainers(network: None, targets: list[str], words: str) -> None:
    with pytest.raises(CADPeerError, match=words):
        find_interface(*targets)
