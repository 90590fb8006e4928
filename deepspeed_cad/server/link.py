"""A trainer's side: a socket to each reserved server, for the leader's orders and as a sign of life both ways.

A socket closes with its process, however that ends, so nothing has to be sent to be known alive. In: orders. Out:
frames; and, from a thread that listens, word of every server that failed or died: on the error board where that ends
the training, else to whoever asks.
"""

from __future__ import annotations

import logging
import os
import queue
import selectors
import socket
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from deepspeed_cad.errors import CADPeerError
from deepspeed_cad.exchange.liveness import Liveness
from deepspeed_cad.layout import Ints
from deepspeed_cad.server.meeting import LEFT
from deepspeed_cad.server.orders import DROPPED
from deepspeed_cad.server.rendezvous import Hello
from deepspeed_cad.server.wire import BUSY, encode, keep_alive, receive
from deepspeed_cad.threads import start_daemon

logger = logging.getLogger("deepspeed_cad")

CONNECT_S = 10.0
"""For each address of a server."""
LOOK_S = 0.2
"""Between two looks for servers that have come."""


class ServerLink:
    """The servers of one trainer."""

    def __init__(
        self, rank: int, connections: dict[int, socket.socket], liveness: Liveness, goes_on: bool = False
    ) -> None:
        """`goes_on`: the training goes on without a server that is lost."""
        self.rank, self.liveness = rank, liveness
        self.gone: dict[int, str] = {}
        """Where it does: servers that are lost, and why."""
        self.heard: Callable[[], None] = lambda: None
        """Called when one is."""
        self._goes_on, self._generation = goes_on, 0
        self.lost = ""
        """Why the servers cannot be counted on any more."""
        self._busy: dict[int, tuple[float, float]] = {}
        self._connections = connections
        self._new: queue.SimpleQueue[tuple[int, socket.socket]] = queue.SimpleQueue()
        for one in connections.items():
            self._new.put(one)
        self._lock = threading.Lock()
        self._closing = False
        me = weakref.ref(self)
        # A forked data loader would hold the sockets open behind a trainer that died.
        os.register_at_fork(after_in_child=lambda: _drop(me()))
        start_daemon("servers", self._listen, None)

    def tell(self, head: dict[str, Any], arrays: tuple[Ints, ...] = (), generation: int = 0) -> None:
        """To every server, in this order; raises CADPeerError where one has died and that ends all.

        What is said to servers that have changed since `generation` is not sent.
        """
        frame = encode(head, arrays)
        with self._lock:
            if self.lost:
                raise CADPeerError(f"rank {self.rank}: {self.lost}")
            if generation != self._generation:
                return
            for server, connection in list(self._connections.items()):
                try:
                    connection.sendall(frame)
                except OSError as error:
                    self._lose(server, f"its connection is lost ({error})")
                    if not self._goes_on:
                        raise CADPeerError(f"rank {self.rank}: {self.lost}") from error

    def add(self, server: int, connection: socket.socket) -> None:
        """A server that has come later."""
        with self._lock:
            self._connections[server] = connection
        self._new.put((server, connection))

    def change(self, servers: tuple[int, ...], generation: int, head: dict[str, Any] | None) -> None:
        """From now on these are the servers; they are told `head`, others that they are dropped."""
        with self._lock:
            self._generation = generation
            for server, connection in list(self._connections.items()):
                word = head if server in servers else {"do": DROPPED, "reason": self.gone.get(server, "")}
                try:
                    if word is not None:
                        connection.sendall(encode(word))
                except OSError as error:
                    if server in servers:
                        self._lose(server, f"its connection is lost ({error})")
                if server not in servers:
                    self._close(server)

    def _close(self, server: int) -> None:
        connection = self._connections.pop(server)
        try:
            # The thread that listens is to see its end, so that it forgets it.
            connection.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            logger.debug("server %d has gone: %s", server, error)

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
            if self._goes_on:
                self._tell_the_board(reason)
            frame = encode({"do": "leave", "reason": reason})
            for connection in self._connections.values():
                try:
                    connection.sendall(frame)
                    connection.shutdown(socket.SHUT_WR)
                except OSError as error:
                    logger.debug("a server has ended before this trainer: %s", error)

    def _tell_the_board(self, reason: str) -> None:
        """Trainers that lose their servers because of this one ask there who is left; and servers that came later and
        wait to be asked in have no socket to this trainer yet."""
        if reason:
            self.liveness.report(reason)
        else:
            self.liveness.close()
        try:
            self.liveness.store.set(LEFT, reason)
        except (RuntimeError, OSError) as error:
            logger.debug("the board is gone: %s", error)

    def drop(self) -> None:
        """Close the sockets of this process."""
        self._closing = True
        for connection in self._connections.values():
            connection.close()

    def _listen(self) -> None:
        with selectors.DefaultSelector() as waiting:
            while not self._closing:
                while not self._new.empty():
                    server, came = self._new.get()
                    waiting.register(came, selectors.EVENT_READ, server)
                if not waiting.get_map() and not self._goes_on:
                    return
                for key, _ in waiting.select(LOOK_S):
                    connection = key.fileobj
                    assert isinstance(connection, socket.socket)
                    if not self._hear(key.data, connection):
                        waiting.unregister(connection)

    def _hear(self, server: int, connection: socket.socket) -> bool:
        try:
            frame = receive(connection)
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
        if self._goes_on:
            self.gone.setdefault(server, reason)
            self.heard()
            return
        if not self.lost:
            self.lost = f"server {server} ended: {reason}"
            # Said at once: a launcher may end this process before it meets the error itself.
            sys.stderr.write(f"deepspeed_cad: rank {self.rank}: {self.lost}\n")
            sys.stderr.flush()
        try:
            self.liveness.store.set(f"error/{server}", reason[:2000])
        except (RuntimeError, OSError) as error:
            logger.debug("the board is gone: %s", error)


def connect(rank: int, servers: list[Hello], liveness: Liveness, host: str, goes_on: bool = False) -> ServerLink:
    """Connect to every server. Raises CADPeerError, naming what does not answer. `goes_on`: see ServerLink."""
    return ServerLink(rank, {server.rank: connect_to(rank, server, host) for server in servers}, liveness, goes_on)


def connect_to(rank: int, server: Hello, host: str) -> socket.socket:
    """A connection to one server; raises CADPeerError where it does not answer."""
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
