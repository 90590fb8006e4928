"""Frames of plain data on a socket: a JSON head and arrays of whole numbers. What came is never run, only read.

Whoever sends them has shown the job's token (handshake.py) and has the same version. What is no frame all the same ends
its connection.
"""

from __future__ import annotations

import json
import math
import selectors
import socket
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from deepspeed_cad.layout import Ints

_SIZES = struct.Struct("!II")
MOST_TEXT, MOST_RAW = 1 << 20, 1 << 30
"""Bytes of the head and of the arrays of one frame: where more are announced, its end is not found either."""

MOST_REASON = 4000
"""Characters of a reason, in a frame or on the board."""


class Frame(NamedTuple):
    """One message."""

    head: dict[str, Any]
    arrays: list[Ints]


def encode(head: dict[str, Any], arrays: tuple[Ints, ...] = ()) -> bytes:
    """The bytes of a frame. Arrays travel as int64 in the byte order of x86 and ARM."""
    text = json.dumps({**head, "shapes": [array.shape for array in arrays]}, separators=(",", ":")).encode()
    raw = b"".join(np.ascontiguousarray(array, "<i8").tobytes() for array in arrays)
    return _SIZES.pack(len(text), len(raw)) + text + raw


class Inbox:
    """What arrives on one connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self._bytes = connection, bytearray()

    def read(self) -> Iterator[Frame]:
        """The frames that are complete with what is there now; call it when there is something, so it does not wait.

        Raises OSError where the connection has ended, or what came is no frame.
        """
        part = self.connection.recv(1 << 16)
        if not part:
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
        """Listen to one more."""
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
