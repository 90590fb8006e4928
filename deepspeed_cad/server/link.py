"""A trainer's side: a socket to each reserved server, for the leader's orders and as a sign of life both ways.

A socket closes with its process, however that ends, so nothing has to be sent to be known alive. In: orders. Out:
frames; and, from a thread that listens, word of every server that failed, died or hangs. That ends the training by the
error board, unless servers may change: then whoever asks learns from `gone` who is lost.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from deepspeed_cad.errors import CADPeerError
from deepspeed_cad.exchange.failure.board import Liveness
from deepspeed_cad.layout import Ints
from deepspeed_cad.server.meeting import GIVEN_UP, LEFT
from deepspeed_cad.server.orders import BUSY, LEAVE
from deepspeed_cad.server.wire import MOST_REASON, Frame, Inboxes, encode
from deepspeed_cad.threads import start_daemon

LOOK_S = 0.2
"""Between two looks for servers that have come, or are silent."""


class ServerLink:
    """The servers of one trainer."""

    def __init__(self, rank: int, connections: dict[int, socket.socket], liveness: Liveness, silent_s: float) -> None:
        """The servers that the job began with; one that says nothing for `silent_s` hangs, and is lost."""
        self.rank, self.liveness, self.silent_s = rank, liveness, silent_s
        self.gone: dict[int, str] = {}
        """Servers that are lost, and why; where that ends the training, the first one."""
        self._generation = 0
        self._busy: dict[int, tuple[float, float]] = {}
        self._connections: dict[int, socket.socket] = {}
        self._crew = tuple(connections)
        """Who is told orders: not who has just come."""
        self._new: queue.SimpleQueue[tuple[int, socket.socket]] = queue.SimpleQueue()
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
            self._check()
            if generation == self._generation:
                self._send(self._crew, frame)
                self._check()

    def _check(self) -> None:
        for server, reason in self.gone.items() if not self.liveness.may_change else ():
            raise CADPeerError(f"rank {self.rank}: server {server} ended: {reason}")

    def _send(self, servers: Iterable[int], frame: bytes) -> None:
        for server in servers:
            # To one that others go on without a part of a frame may have gone out.
            if server in self._connections and not (self.liveness.may_change and server in self.gone):
                try:
                    self._connections[server].sendall(frame)
                except OSError as error:
                    self.lose(server, _in_words(error))

    def add(self, server: int, connection: socket.socket) -> None:
        """A server has come. It is told nothing before it belongs to the crew."""
        with self._lock:
            connection.settimeout(self.silent_s)
            self._connections[server] = connection
        self._new.put((server, connection))

    def change(self, servers: tuple[int, ...], generation: int, head: dict[str, Any] | None) -> None:
        """From now on these are the servers, the crew. They are told `head`; connections to others end."""
        with self._lock:
            self._generation, self._crew = generation, servers
            if head is not None:
                self._send(servers, encode(head))
            for server in [server for server in self._connections if server not in servers]:
                # That its socket ends here says nothing of it.
                self.gone.setdefault(server, "a trainer lost it")
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
            if self.liveness.may_change:
                # Trainers that lose their servers because of this one ask the board who is left; and servers that came
                # later and wait to be asked in have no socket to this trainer yet.
                if reason:
                    self.liveness.report(reason)
                else:
                    self.liveness.close()
                self.liveness.write(LEFT, reason)
            self._closing = True
            self._send(self._connections, encode({"do": LEAVE, "reason": reason[:MOST_REASON]}))
            for connection in self._connections.values():
                with suppress(OSError):  # of a server that ended before this trainer
                    connection.shutdown(socket.SHUT_WR)

    def drop(self) -> None:
        self._closing = True
        for connection in self._connections.values():
            connection.close()

    def _listen(self) -> None:
        inboxes, heard = Inboxes(), dict[int, float]()
        while not self._closing:
            # Before the look: where this process stood still, what came meanwhile is read first.
            now = time.monotonic()
            while not self._new.empty():
                server, connection = self._new.get()
                inboxes.add(server, connection)
                heard[server] = now
            for server, item in inboxes.read(LOOK_S):
                if server in heard and (reason := self._why_lost(server, item)):
                    del heard[server]
                    self.lose(server, reason)
                elif server in heard:
                    heard[server] = now
            for server in [server for server, last in heard.items() if now - last > self.silent_s]:
                del heard[server]
                hangs = "it hangs, or nothing reaches its host"
                self.lose(server, f"it has said nothing for {self.silent_s:g} s: {hangs}")

    def _why_lost(self, server: int, item: Frame | OSError) -> str:
        """By what it says, or that it says nothing more; "" where it serves."""
        if isinstance(item, OSError):
            return _in_words(item)
        if item.head["do"] == BUSY and self.rank == 0:
            self._busy[server] = item.head["busy"], item.head["total"]
        return str(item.head.get("reason", ""))

    def lose(self, server: int, reason: str) -> None:
        """A server is lost; only the first reason counts. Where that ends all, only the first server: others may be
        lost with it."""
        if self._closing or server in self.gone:
            return
        if self.liveness.may_change:
            self.gone[server] = reason
            self.liveness.write(f"{GIVEN_UP}/{server}", reason)
        elif not self.gone:
            self.gone[server] = reason
            # Said at once: a launcher may end this process before it meets the error itself.
            sys.stderr.write(f"deepspeed_cad: rank {self.rank}: server {server} ended: {reason}\n")
            sys.stderr.flush()
            self.liveness.write(f"error/{server}", reason)


def _in_words(error: OSError) -> str:
    return "its process died" if isinstance(error, ConnectionError) else f"its connection is lost ({error})"


def _drop(link: ServerLink | None) -> None:
    if link is not None:
        link.drop()
