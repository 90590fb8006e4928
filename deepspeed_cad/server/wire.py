"""Frames of plain data on a socket: a JSON head and arrays of whole numbers. What came is never run, only read.

Whoever sends them has shown the job's token (handshake.py). What is no frame all the same is dropped with a line in the
log: nothing that arrives raises in the thread that listens, but for OSError where the connection is of no use any more.
"""

from __future__ import annotations

import json
import logging
import math
import selectors
import socket
import struct
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from deepspeed_cad.layout import Ints

logger = logging.getLogger("deepspeed_cad")

_SIZES = struct.Struct("!II")
MOST_TEXT, MOST_RAW = 1 << 20, 1 << 30
"""Bytes of the head and of the arrays of one frame: where more are announced, its end is not found either."""

MOST_REASON = 4000
"""Characters of a reason, in a frame or on the board."""


class Frame(NamedTuple):
    """One message."""

    head: dict[str, Any]
    arrays: list[Ints]


class Form(NamedTuple):
    """What a frame of some kind must have; it may have more."""

    fields: dict[str, type | tuple[type, ...]]
    dimensions: tuple[int, ...] = ()
    """Of each of its arrays."""


def encode(head: dict[str, Any], arrays: tuple[Ints, ...] = ()) -> bytes:
    """The bytes of a frame. Arrays travel as int64 in the byte order of x86 and ARM."""
    text = json.dumps({**head, "shapes": [array.shape for array in arrays]}, separators=(",", ":")).encode()
    raw = b"".join(np.ascontiguousarray(array, "<i8").tobytes() for array in arrays)
    return _SIZES.pack(len(text), len(raw)) + text + raw


class Inbox:
    """What arrives on one connection."""

    def __init__(self, connection: socket.socket, sender: str, forms: Mapping[str, Form]) -> None:
        """`sender`: in messages. `forms`: of the frames that it may send, by what their heads say under "do"."""
        self.connection, self.sender, self._forms = connection, sender, forms
        self._bytes = bytearray()

    def read(self) -> Iterator[Frame]:
        """The frames that are complete with what is there now; call it when there is something, so it does not wait.

        Raises OSError where the connection has ended, or announces more than a frame may have.
        """
        part = self.connection.recv(1 << 16)
        if not part:
            raise ConnectionResetError("closed by its other end")
        self._bytes += part
        while len(self._bytes) >= _SIZES.size:
            text_size, raw_size = _SIZES.unpack_from(self._bytes)
            if text_size > MOST_TEXT or raw_size > MOST_RAW:
                raise OSError(f"a frame of {text_size} and {raw_size} bytes was announced, which is none of ours")
            end = _SIZES.size + text_size + raw_size
            if len(self._bytes) < end:
                return
            body = bytes(self._bytes[_SIZES.size : end])
            del self._bytes[:end]
            try:
                frame = _decode(body, text_size, self._forms)
            except (ValueError, TypeError, RecursionError) as error:
                logger.warning("dropped a frame of %d bytes from %s: %s", len(body), self.sender, error)
            else:
                yield frame


class Inboxes:
    """What arrives on several connections, each known by the number of who is at its other end."""

    def __init__(self, who: str, forms: Mapping[str, Form]) -> None:
        """`who`: "trainer" or "server", for messages. `forms`: as of an Inbox."""
        self._who, self._forms, self._waiting = who, forms, selectors.DefaultSelector()

    def add(self, number: int, connection: socket.socket) -> None:
        """Listen to one more."""
        inbox = Inbox(connection, f"{self._who} {number}", self._forms)
        self._waiting.register(connection, selectors.EVENT_READ, (number, inbox))

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


def _decode(body: bytes, text_size: int, forms: Mapping[str, Form]) -> Frame:
    """Raises ValueError, TypeError or RecursionError where it is no frame of these forms."""
    head = json.loads(body[:text_size])
    if not isinstance(head, dict):
        raise ValueError(f"its head is a {type(head).__name__}")
    form, shapes = forms.get(str(head.get("do"))), head.pop("shapes", None)
    if form is None:
        raise ValueError(f"nobody here does {head.get('do')!r:.40}")
    for name, kind in form.fields.items():
        if not isinstance(head.get(name), kind):
            raise ValueError(f'its field "{name}" is {head.get(name)!r:.40}')
    if not isinstance(shapes, list) or [len(shape) for shape in shapes] != list(form.dimensions):
        raise ValueError(f"its arrays have the shapes {shapes!r:.40}")
    sizes = [math.prod(shape) for shape in shapes]
    if any(length < 0 for shape in shapes for length in shape) or 8 * sum(sizes) != len(body) - text_size:
        raise ValueError(f"its arrays have the shapes {shapes!r:.40} and {len(body) - text_size} bytes")
    values = np.frombuffer(body, "<i8", offset=text_size) if sum(sizes) else np.zeros(0, "<i8")
    parts = np.split(values, np.cumsum(sizes)[:-1]) if sizes else []
    return Frame(head, [part.reshape(shape).astype(np.int64) for part, shape in zip(parts, shapes)])


def keep_alive(connection: socket.socket) -> None:
    """Small frames go out at once, and a host that vanished is noticed within about 10 s."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
