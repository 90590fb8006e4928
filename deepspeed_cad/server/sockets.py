"""A socket between a trainer and a server: how they come to it, although strangers may reach the server's port, and the
frames on it.

A server listens on one interface and only while trainers are on their way. Where, and a token, it leaves in the job's
store. A trainer sends the first half of the token and its rank, a server answers with the second half. Until then so
many bytes are read and no more, and none is interpreted. So whoever can read the job's store is trusted, nobody else.

Frames are plain data: a JSON head and arrays of whole numbers, only read and never run. All else ends a connection.
"""

import hmac
import ipaddress
import json
import logging
import math
import queue
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from deepspeed_cad.errors import CADPeerError
from deepspeed_cad.layout import Ints
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
"""Connections that have not yet greeted, beside those of all trainers; of more, the oldest go."""
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
        `look` is called now and then; it may raise."""
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
                for guest in self._guests[: -(MOST_GUESTS + trainers)]:
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
    leads to loopback here, because it is this one."""
    for target in (rendezvous, *others):
        with suppress(OSError):
            for family, kind, _, _, address in socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM):
                with suppress(OSError), socket.socket(family, kind) as probe:
                    probe.connect(address)  # sends nothing: only asks which interface would
                    own = str(probe.getsockname()[0])
                    only = not others or target == "localhost" or target == own
                    if only or not ipaddress.ip_address(own).is_loopback:
                        return family, own
    raise CADPeerError(
        f"no network leads from {socket.gethostname()} to {', '.join((rendezvous, *others))}, other than loopback: set "
        "MASTER_ADDR to an address that all hosts reach"
    )


# Frames

_SIZES = struct.Struct("!II")
MOST_TEXT, MOST_RAW = 1 << 20, 1 << 30
"""Bytes of the head and of the arrays of one frame: where more are announced, its end is not found either."""
MOST_REASON = 4000
"""Characters of a reason, in a frame or on the board."""


class Frame(NamedTuple):
    head: dict[str, Any]
    arrays: list[Ints]


def encode(head: dict[str, Any], arrays: tuple[Ints, ...] = ()) -> bytes:
    """The bytes of a frame. Arrays travel as int64 in the byte order of x86 and ARM."""
    text = json.dumps({**head, "shapes": [array.shape for array in arrays]}, separators=(",", ":")).encode()
    raw = b"".join(np.ascontiguousarray(array, "<i8").tobytes() for array in arrays)
    return _SIZES.pack(len(text), len(raw)) + text + raw


class Inbox:
    def __init__(self, connection: socket.socket) -> None:
        self.connection, self._bytes = connection, bytearray()

    def read(self) -> Iterator[Frame]:
        """The frames that are complete with what is there now; call it when there is something, so it does not wait.

        Raises OSError where the connection has ended, or what came is no frame."""
        if not (part := self.connection.recv(1 << 16)):
            raise ConnectionResetError("closed by its other end")
        self._bytes += part
        while len(self._bytes) >= _SIZES.size:
            text_size, raw_size = _SIZES.unpack_from(self._bytes)
            if text_size > MOST_TEXT or raw_size > MOST_RAW:
                raise OSError(f"a frame of {text_size} and {raw_size} bytes was announced, none of our frames")
            end = _SIZES.size + text_size + raw_size
            if len(self._bytes) < end:
                return
            body = bytes(self._bytes[_SIZES.size : end])
            del self._bytes[:end]
            try:
                frame = _decode(body, text_size)
            except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
                raise OSError(f"{end} bytes came that are none of our frames: {error}") from error
            yield frame


class Inboxes:
    """What arrives on several connections, each known by the number of who is at its other end."""

    def __init__(self) -> None:
        self._waiting = selectors.DefaultSelector()

    def add(self, number: int, connection: socket.socket) -> None:
        self._waiting.register(connection, selectors.EVENT_READ, (number, Inbox(connection)))

    def read(self, seconds: float) -> Iterator[tuple[int, Frame | OSError]]:
        """What comes within so many seconds; an OSError where a connection ends, which is listened to no more."""
        for key, _ in self._waiting.select(seconds):
            number, inbox = key.data
            try:
                for frame in inbox.read():
                    yield number, frame
            except OSError as error:
                self._waiting.unregister(key.fileobj)
                yield number, error


def _decode(body: bytes, text_size: int) -> Frame:
    head = json.loads(body[:text_size])
    shapes = head.pop("shapes")
    values = np.frombuffer(body, "<i8", offset=text_size)
    parts = np.split(values, np.cumsum([math.prod(shape) for shape in shapes])[:-1])
    return Frame(head, [part.reshape(shape).astype(np.int64) for part, shape in zip(parts, shapes)])


def keep_alive(connection: socket.socket) -> None:
    """Small frames go out at once, and a host that vanished is noticed within about 10 s."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
