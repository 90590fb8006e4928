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
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from deepspeed_cad.errors import CADPeerError
from deepspeed_cad.exchange.failure.board import Liveness
from deepspeed_cad.layout import Ints
from deepspeed_cad.server.meeting import GIVEN_UP, LEFT
from deepspeed_cad.server.orders import FAILED, LEAVE, TO_TRAINERS
from deepspeed_cad.server.wire import MOST_REASON, Inbox, encode
from deepspeed_cad.threads import start_daemon

logger = logging.getLogger("deepspeed_cad")

LOOK_S = 0.2
"""Between two looks for servers that have come, or are silent."""


class ServerLink:
    """The servers of one trainer."""

    def __init__(
        self,
        rank: int,
        connections: dict[int, socket.socket],
        liveness: Liveness,
        silent_s: float,
        goes_on: bool = False,
    ) -> None:
        """The servers that the job began with.

        `silent_s`: a server that says nothing for so long hangs, and is lost. `goes_on`: the training goes on without
        a server that is lost.
        """
        self.rank, self.liveness, self.silent_s = rank, liveness, silent_s
        self.gone: dict[int, str] = {}
        """Where it does: servers that are lost, and why."""
        self.heard: Callable[[], None] = lambda: None
        """Called when one is."""
        self._goes_on, self._generation = goes_on, 0
        self.lost = ""
        """Why the servers cannot be counted on any more."""
        self._busy: dict[int, tuple[float, float]] = {}
        self._connections: dict[int, socket.socket] = {}
        self._crew = tuple(connections)
        """Who is told orders: not who has just come."""
        self._new: queue.SimpleQueue[tuple[int, Inbox]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        for server, connection in connections.items():
            self.add(server, connection)
        self._closing = False
        me = weakref.ref(self)
        # A forked data loader would hold the sockets open behind a trainer that died.
        os.register_at_fork(after_in_child=lambda: _drop(me()))
        start_daemon("servers", self._listen, None)

    def tell(self, head: dict[str, Any], arrays: tuple[Ints, ...] = (), generation: int = 0) -> None:
        """To every server of the crew, in this order; raises CADPeerError where one has died and that ends all.

        What is said to servers that have changed since `generation` is not sent.
        """
        frame = encode(head, arrays)
        with self._lock:
            if self.lost:
                raise CADPeerError(f"rank {self.rank}: {self.lost}")
            if generation != self._generation:
                return
            self._send(self._crew, frame)
            if self.lost:
                raise CADPeerError(f"rank {self.rank}: {self.lost}")

    def _send(self, servers: Iterable[int], frame: bytes) -> None:
        for server in servers:
            connection = self._connections.get(server)
            # To one that is lost a part of a frame may have gone out.
            if connection is not None and server not in self.gone:
                try:
                    connection.sendall(frame)
                except OSError as error:
                    self.lose(server, _in_words(error))

    def add(self, server: int, connection: socket.socket) -> None:
        """A server is there. It is told nothing before it belongs to the crew."""
        connection.settimeout(self.silent_s)
        with self._lock:
            self._connections[server] = connection
        self._new.put((server, Inbox(connection, f"server {server}", TO_TRAINERS)))

    def change(self, servers: tuple[int, ...], generation: int, head: dict[str, Any] | None) -> None:
        """From now on these are the servers, the crew. They are told `head`; connections to others end."""
        with self._lock:
            self._generation, self._crew = generation, servers
            if head is not None:
                self._send(servers, encode(head))
            for server in [server for server in self._connections if server not in servers]:
                self._close(server)

    def _close(self, server: int) -> None:
        with suppress(OSError):  # it has gone already
            # The thread that listens is to see its end, so that it forgets it.
            self._connections.pop(server).shutdown(socket.SHUT_RDWR)

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
            self._send(self._connections, encode({"do": LEAVE, "reason": reason[:MOST_REASON]}))
            for connection in self._connections.values():
                with suppress(OSError):  # of a server that ended before this trainer
                    connection.shutdown(socket.SHUT_WR)

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
        heard: dict[int, float] = {}
        with selectors.DefaultSelector() as waiting:
            while not self._closing:
                # Before the look: where this process stood still, what came meanwhile is read first.
                now = time.monotonic()
                while not self._new.empty():
                    server, inbox = self._new.get()
                    waiting.register(inbox.connection, selectors.EVENT_READ, (server, inbox))
                    heard[server] = now
                if not heard and not self._goes_on:
                    return
                for key, _ in waiting.select(LOOK_S):
                    server, inbox = key.data
                    heard[server] = now
                    if not self._hear(server, inbox):
                        waiting.unregister(inbox.connection)
                        del heard[server]
                for server in [server for server, last in heard.items() if now - last > self.silent_s]:
                    del heard[server]
                    hangs = "it hangs, or nothing reaches its host"
                    self.lose(server, f"it has said nothing for {self.silent_s:g} s: {hangs}")

    def _hear(self, server: int, inbox: Inbox) -> bool:
        """Whether more may come."""
        try:
            for frame in inbox.read():
                if frame.head["do"] == FAILED:
                    self.lose(server, frame.head["reason"])
                    return False
                if self.rank == 0:
                    self._busy[server] = frame.head["busy"], frame.head["total"]
            return True
        except OSError as error:
            self.lose(server, _in_words(error))
            return False

    def lose(self, server: int, reason: str) -> None:
        """A server is lost; only the first reason counts."""
        if self._closing or server in self.gone or (self.lost and not self._goes_on):
            return
        if self._goes_on:
            self.gone[server] = reason
        else:
            self.lost = f"server {server} ended: {reason}"
            # Said at once: a launcher may end this process before it meets the error itself.
            sys.stderr.write(f"deepspeed_cad: rank {self.rank}: {self.lost}\n")
            sys.stderr.flush()
        try:
            self.liveness.store.set(f"{GIVEN_UP if self._goes_on else 'error'}/{server}", reason[:MOST_REASON])
        except (RuntimeError, OSError) as error:
            logger.debug("the board is gone: %s", error)
        self.heard()


def _in_words(error: OSError) -> str:
    return "its process died" if isinstance(error, ConnectionError) else f"its connection is lost ({error})"


def _drop(link: ServerLink | None) -> None:
    if link is not None:
        link.drop()
