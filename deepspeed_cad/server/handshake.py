"""How a trainer and a server come to a socket between them, although strangers may reach the server's port.

A server listens on one interface and only while trainers are on their way. Where, and a token, it leaves in the job's
store. A trainer sends the first half of the token and its rank, a server answers with the second half. Until then so
many bytes are read and no more, and none is interpreted. So whoever can read the job's store is trusted, nobody else.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from deepspeed_cad.errors import CADPeerError
from deepspeed_cad.server.wire import keep_alive

logger = logging.getLogger("deepspeed_cad")

HALF = 32
"""Bytes of half a token."""
GREETING = HALF + 4
"""Bytes that a trainer sends first."""
CONNECT_S = 10.0
"""For a trainer to reach a server that listens."""
GREET_S = 5.0
"""For a connection to send the greeting: a trainer does so at once."""
MOST_GUESTS = 64
"""Connections that have not yet greeted; of more, the oldest go."""
LOOK_S = 0.2
"""Between two looks for connections that are late."""


@dataclass(frozen=True)
class Door:
    address: str
    port: int
    token: str

    @property
    def halves(self) -> tuple[bytes, bytes]:
        """What a trainer shows, and what the server answers."""
        both = bytes.fromhex(self.token)
        return both[:HALF], both[HALF:]


class Listener:
    def __init__(self, server: int, rendezvous: str, hosts: Iterable[str] = ()) -> None:
        """`rendezvous`: HOST:PORT of the job's store. `hosts`: of trainers that are not on this one."""
        self._server = server
        family, address = find_interface(rendezvous.rpartition(":")[0], *hosts)
        self._socket = socket.create_server((address, 0), family=family)
        self._socket.setblocking(False)
        self.door = Door(address, int(self._socket.getsockname()[1]), secrets.token_hex(2 * HALF))
        self._waiting = selectors.DefaultSelector()
        self._guests: list[_Guest] = []
        """That have not yet shown the token, oldest first."""

    def accept(
        self, trainers: int, timeout_s: float, look: Callable[[], None] = lambda: None
    ) -> dict[int, socket.socket]:
        """A connection from every trainer; from then on nobody reaches this server any more.

        Connections are read side by side, so that no stranger holds up a trainer. CADPeerError where one does not come.
        `look` is called now and then; it may raise.
        """
        found: dict[int, socket.socket] = {}
        end = time.monotonic() + timeout_s
        with self._socket, self._waiting:
            self._waiting.register(self._socket, selectors.EVENT_READ)
            while len(found) < trainers:
                look()
                if (now := time.monotonic()) > end:
                    missing = [rank for rank in range(trainers) if rank not in found]
                    raise CADPeerError(
                        f"server {self._server}: trainers {missing} did not connect to {self.door.address} port "
                        f"{self.door.port} within {timeout_s:g} s. Look at routes and firewalls between the hosts"
                    )
                for key, _ in self._waiting.select(min(LOOK_S, end - now)):
                    if key.data is None:
                        self._let_in(now)
                    elif (rank := self._read(key.data, trainers)) is not None:
                        if rank in found:
                            found[rank].close()
                        found[rank] = key.data.connection
                surplus = len(self._guests) - MOST_GUESTS
                for guest in [guest for i, guest in enumerate(self._guests) if i < surplus or now > guest.end]:
                    self._dismiss(guest, "it did not show the job's token in time")
            for guest in list(self._guests):
                self._dismiss(guest, "all trainers are here")
        for connection in found.values():
            connection.setblocking(True)
            keep_alive(connection)
        return found

    def _let_in(self, now: float) -> None:
        with suppress(OSError):  # it may have gone already
            connection, peer = self._socket.accept()
            connection.setblocking(False)
            self._guests.append(_Guest(connection, f"{peer[0]} port {peer[1]}", now + GREET_S))
            self._waiting.register(connection, selectors.EVENT_READ, self._guests[-1])

    def _read(self, guest: _Guest, trainers: int) -> int | None:
        """The rank of a trainer that has shown the token."""
        shown, answer = self.door.halves
        try:
            part = guest.connection.recv(GREETING - len(guest.greeting))
            guest.greeting += part
            if len(guest.greeting) < GREETING:
                if part:
                    return None
                raise ConnectionResetError("it ended before it had shown the job's token")
            rank = int.from_bytes(guest.greeting[HALF:], "big")
            if not hmac.compare_digest(guest.greeting[:HALF], shown) or rank >= trainers:
                raise ConnectionRefusedError("it does not have the job's token")
            guest.connection.sendall(answer)
        except OSError as error:
            self._dismiss(guest, error)
            return None
        self._forget(guest)
        return rank

    def _dismiss(self, guest: _Guest, reason: object) -> None:
        logger.warning("server %d dropped a connection from %s: %s", self._server, guest.name, reason)
        self._forget(guest)
        guest.connection.close()

    def _forget(self, guest: _Guest) -> None:
        self._waiting.unregister(guest.connection)
        self._guests.remove(guest)


@dataclass(eq=False)
class _Guest:
    connection: socket.socket
    name: str
    end: float
    """Until when it may."""
    greeting: bytes = b""


def connect_to(trainer: int, server: str, door: Door) -> socket.socket:
    """A trainer's connection to a server; raises CADPeerError where it does not answer in time."""
    end = time.monotonic() + CONNECT_S
    shown, expected = door.halves
    try:
        connection = socket.create_connection((door.address, door.port), timeout=CONNECT_S)
        connection.sendall(shown + trainer.to_bytes(GREETING - HALF, "big"))
        answer = b""
        while len(answer) < HALF:
            connection.settimeout(max(end - time.monotonic(), 1e-3))
            if not (part := connection.recv(HALF - len(answer))):
                raise ConnectionResetError("it was closed before an answer came")
            answer += part
        if not hmac.compare_digest(answer, expected):
            raise ConnectionRefusedError("somebody else answers")
    except OSError as error:
        raise CADPeerError(
            f"trainer {trainer} does not reach {server} at {door.address} port {door.port}: {error}. Look at routes "
            "and firewalls between the hosts; servers listen on the network that leads to MASTER_ADDR"
        ) from error
    connection.settimeout(None)
    keep_alive(connection)
    return connection


def find_interface(rendezvous: str, *others: str) -> tuple[socket.AddressFamily, str]:
    """The address of this host on the way to another one. CADPeerError where no way leads there.

    `rendezvous`: the host of the job's store. `others`: of trainers; they count where a name of the rendezvous' host
    leads to loopback here, because it is this one.
    """
    for target in (rendezvous, *others):
        with suppress(OSError):
            for family, kind, _, _, address in socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM):
                with suppress(OSError), socket.socket(family, kind) as probe:
                    probe.connect(address)  # sends nothing: only asks which interface would
                    own = str(probe.getsockname()[0])
                    only = not others or target == "localhost" or target == own
                    if only or not ipaddress.ip_address(own.partition("%")[0]).is_loopback:
                        return family, own
    raise CADPeerError(
        f"no network leads from {socket.gethostname()} to {', '.join((rendezvous, *others))}, other than loopback: set "
        "MASTER_ADDR to an address that all hosts reach"
    )
