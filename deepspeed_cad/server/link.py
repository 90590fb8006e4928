"""A trainer's side: a socket to each reserved server, for the leader's orders and as a sign of life both ways.

A socket closes with its process, however that ends, so nothing has to be sent to be known alive. In: orders. Out:
frames; and, from a thread that listens, word on the error board of every server that failed or died.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import sys
import threading
import weakref
from typing import Any

from deepspeed_cad.errors import CADPeerError
from deepspeed_cad.exchange.liveness import Liveness
from deepspeed_cad.layout import Ints
from deepspeed_cad.server.rendezvous import Hello
from deepspeed_cad.server.wire import BUSY, encode, keep_alive, receive
from deepspeed_cad.threads import start_daemon

logger = logging.getLogger("deepspeed_cad")

CONNECT_S = 10.0
"""For each address of a server."""


class ServerLink:
    """The servers of one trainer."""

    def __init__(self, rank: int, connections: dict[int, socket.socket], liveness: Liveness) -> None:
        self.rank, self.liveness = rank, liveness
        self.lost = ""
        """Why the servers cannot be counted on any more."""
        self._busy: dict[int, tuple[float, float]] = {}
        self._connections = connections
        self._lock = threading.Lock()
        self._closing = False
        me = weakref.ref(self)
        # A forked data loader would hold the sockets open behind a trainer that died.
        os.register_at_fork(after_in_child=lambda: _drop(me()))
        start_daemon("servers", self._listen, None)

    def tell(self, head: dict[str, Any], arrays: tuple[Ints, ...] = ()) -> None:
        """To every server, in this order; raises CADPeerError where one has died."""
        frame = encode(head, arrays)
        with self._lock:
            if self.lost:
                raise CADPeerError(f"rank {self.rank}: {self.lost}")
            for server, connection in self._connections.items():
                try:
                    connection.sendall(frame)
                except OSError as error:
                    self._lose(server, f"its connection is lost ({error})")
                    raise CADPeerError(f"rank {self.rank}: {self.lost}") from error

    def busy(self) -> tuple[float, float]:
        """Seconds that servers attended and that they are up, summed over servers, as they last told the leader."""
        told = list(self._busy.values())
        return sum(busy for busy, _ in told), sum(total for _, total in told)

    def leave(self, reason: str) -> None:
        """This trainer needs no server any more; `reason` is empty where it ended well."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            frame = encode({"do": "leave", "reason": reason})
            for connection in self._connections.values():
                try:
                    connection.sendall(frame)
                    connection.shutdown(socket.SHUT_WR)
                except OSError as error:
                    logger.debug("a server has ended before this trainer: %s", error)

    def drop(self) -> None:
        """Close the sockets of this process."""
        self._closing = True
        for connection in self._connections.values():
            connection.close()

    def _listen(self) -> None:
        with selectors.DefaultSelector() as waiting:
            for server, connection in self._connections.items():
                waiting.register(connection, selectors.EVENT_READ, server)
            while waiting.get_map() and not self._closing:
                for key, _ in waiting.select(0.5):
                    if not self._hear(key.data):
                        waiting.unregister(key.fileobj)

    def _hear(self, server: int) -> bool:
        try:
            frame = receive(self._connections[server])
        except OSError:
            frame = None
        if self._closing:
            return False
        if frame is not None and frame.head["do"] == BUSY:
            self._busy[server] = float(frame.head["busy"]), float(frame.head["total"])
            return True
        self._lose(server, "its process died" if frame is None else str(frame.head["reason"]))
        return False

    def _lose(self, server: int, reason: str) -> None:
        if not self.lost:
            self.lost = f"server {server} ended: {reason}"
            # Said at once: a launcher may end this process before it meets the error itself.
            sys.stderr.write(f"deepspeed_cad: rank {self.rank}: {self.lost}\n")
            sys.stderr.flush()
        try:
            self.liveness.store.set(f"error/{server}", reason[:2000])
        except (RuntimeError, OSError) as error:
            logger.debug("the board is gone: %s", error)


def connect(rank: int, servers: list[Hello], liveness: Liveness, host: str) -> ServerLink:
    """Connect to every server. Raises CADPeerError, naming what does not answer."""
    return ServerLink(rank, {server.rank: _connect(rank, server, host) for server in servers}, liveness)


def _connect(rank: int, server: Hello, host: str) -> socket.socket:
    tried = []
    for address in (("127.0.0.1",) if server.host == host else ()) + server.addresses:
        try:
            connection = socket.create_connection((address, server.port), timeout=CONNECT_S)
            connection.sendall(encode({"rank": rank, "token": server.token}))
            answer = receive(connection)
        except OSError as error:
            tried.append(f"{address}:{server.port} ({error})")
            continue
        if answer is not None and answer.head == {"rank": server.rank}:
            connection.settimeout(None)
            keep_alive(connection)
            return connection
        connection.close()
        tried.append(f"{address}:{server.port} (somebody else answers)")
    raise CADPeerError(f"trainer {rank} does not reach {server.what}: {'; '.join(tried)}")


def _drop(link: ServerLink | None) -> None:
    if link is not None:
        link.drop()
