"""How a trainer and a server come to a socket between them, although strangers may reach the server's port.

A server listens on one interface and only while trainers are on their way. Where, and a token, it leaves in the job's
store. A trainer sends the first half of the token and its rank, a server answers with the second half. Until then so
many bytes are read and no more, and none is interpreted. So whoever can read the job's store is trusted, nobody else.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import queue
import secrets
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from deepspeed_cad.errors import CADPeerError
from deepspeed_cad.server.wire import keep_alive
from deepspeed_cad.threads import start_daemon

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
"""Between two looks."""


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
        self._socket.settimeout(LOOK_S)
        self.door = Door(address, int(self._socket.getsockname()[1]), secrets.token_hex(2 * HALF))
        self._guests: list[socket.socket] = []
        """That have not yet shown the token, oldest first."""
        self._greeted: queue.SimpleQueue[tuple[int, socket.socket]] = queue.SimpleQueue()

    def accept(
        self, trainers: int, timeout_s: float, look: Callable[[], None] = lambda: None
    ) -> dict[int, socket.socket]:
        """A connection from every trainer; from then on nobody reaches this server any more.

        Connections are read side by side, so that no stranger holds up a trainer. CADPeerError where one does not come.
        `look` is called now and then; it may raise.
        """
        found: dict[int, socket.socket] = {}
        end = time.monotonic() + timeout_s
        with self._socket:
            while len(found) < trainers:
                look()
                if time.monotonic() > end:
                    missing = [rank for rank in range(trainers) if rank not in found]
                    raise CADPeerError(
                        f"server {self._server}: trainers {missing} did not connect to {self.door.address} port "
                        f"{self.door.port} within {timeout_s:g} s. Look at routes and firewalls between the hosts"
                    )
                with suppress(OSError):  # nobody came, or whoever came has gone already
                    connection, peer = self._socket.accept()
                    self._guests.append(connection)
                    start_daemon("greets", partial(self._greet, connection, peer, trainers), None)
                for guest in self._guests[:-MOST_GUESTS]:
                    _hang_up(guest)
                while not self._greeted.empty():
                    rank, connection = self._greeted.get()
                    if rank in found:
                        found[rank].close()
                    found[rank] = connection
        for guest in list(self._guests):
            _hang_up(guest)
        for connection in found.values():
            connection.settimeout(None)
            keep_alive(connection)
        return found

    def _greet(self, connection: socket.socket, peer: tuple[str, int], trainers: int) -> None:
        """A thread of its own: whoever it is shows the token, or goes."""
        shown, answer = self.door.halves
        rank = None
        try:
            greeting = _receive(connection, GREETING, GREET_S)
            said = int.from_bytes(greeting[HALF:], "big")
            if not hmac.compare_digest(greeting[:HALF], shown) or said >= trainers:
                raise ConnectionRefusedError("it does not have the job's token")
            connection.sendall(answer)
            rank = said
        except OSError as error:
            logger.warning("server %d dropped a connection from %s port %d: %s", self._server, *peer[:2], error)
            connection.close()
        self._guests.remove(connection)
        if rank is not None:
            self._greeted.put((rank, connection))


def _hang_up(guest: socket.socket) -> None:
    """Its thread closes it."""
    with suppress(OSError):
        guest.shutdown(socket.SHUT_RDWR)


def _receive(connection: socket.socket, size: int, seconds: float) -> bytes:
    """So many bytes, and no more. Raises OSError where they do not all come in time."""
    end, found = time.monotonic() + seconds, b""
    while len(found) < size:
        connection.settimeout(max(end - time.monotonic(), 1e-3))
        if not (part := connection.recv(size - len(found))):
            raise ConnectionResetError("it was closed before all of it came")
        found += part
    return found


def connect_to(trainer: int, server: str, door: Door) -> socket.socket:
    """A trainer's connection to a server; raises CADPeerError where it does not answer in time."""
    shown, expected = door.halves
    try:
        connection = socket.create_connection((door.address, door.port), timeout=CONNECT_S)
        connection.sendall(shown + trainer.to_bytes(GREETING - HALF, "big"))
        if not hmac.compare_digest(_receive(connection, HALF, CONNECT_S), expected):
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
