"""Frames of plain data on a socket: a JSON head and arrays of whole numbers. What came is never run, only read."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any, NamedTuple

import numpy as np

from deepspeed_cad.layout import Ints

_SIZES = struct.Struct("!II")
BUSY = "busy"
"""What a server tells the leader beside its end: how long it attended."""
MOST_BYTES = 1 << 30
"""Of one frame: more is no frame of ours."""


class Frame(NamedTuple):
    """One message."""

    head: dict[str, Any]
    arrays: list[Ints]


def encode(head: dict[str, Any], arrays: tuple[Ints, ...] = ()) -> bytes:
    """The bytes of a frame. Arrays travel as int64 in the byte order of x86 and ARM."""
    text = json.dumps({**head, "shapes": [array.shape for array in arrays]}, separators=(",", ":")).encode()
    raw = b"".join(np.ascontiguousarray(array, "<i8").tobytes() for array in arrays)
    return _SIZES.pack(len(text), len(raw)) + text + raw


def receive(connection: socket.socket) -> Frame | None:
    """The next frame; None where the other side has ended. Raises OSError where the connection is lost."""
    sizes = _read(connection, _SIZES.size)
    if sizes is None:
        return None
    text_size, raw_size = _SIZES.unpack(sizes)
    if max(text_size, raw_size) > MOST_BYTES:
        raise OSError(f"a frame of {text_size + raw_size} bytes: what sends here is not deepspeed_cad")
    body = _read(connection, text_size + raw_size)
    if body is None:
        return None
    head = json.loads(body[:text_size])
    values, at, arrays = np.frombuffer(body, "<i8", offset=text_size) if raw_size else np.zeros(0, "<i8"), 0, []
    for shape in head.pop("shapes"):
        count = int(np.prod(shape, dtype=np.int64))
        arrays.append(values[at : at + count].reshape(shape).astype(np.int64))
        at += count
    return Frame(head, arrays)


def _read(connection: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(min(size - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)


def keep_alive(connection: socket.socket) -> None:
    """Small frames go out at once, and a host that vanished is noticed within about 10 s."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
