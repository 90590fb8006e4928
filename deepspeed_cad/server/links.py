"""Both ends of the sockets between trainers and reserved servers.

A trainer has a socket to each server, for the leader's orders and as a sign of life both ways: a socket closes with its
process, however that ends, so nothing has to be sent to be known alive. A thread listens for word of every server that
failed, died or hangs. That ends the training by the error board, unless servers may change: then whoever asks learns
from `gone` who is lost. A server has a socket from each trainer: the leader's orders in a queue, and why it should end.
"""

import logging
import math
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
from deepspeed_cad.exchange.failure import board
from deepspeed_cad.exchange.failure.board import Liveness
from deepspeed_cad.exchange.failure.patience import wait_until
from deepspeed_cad.layout import Ints
from deepspeed_cad.server.meeting import GIVEN_UP, LEFT
from deepspeed_cad.server.orders import BUSY, FAILED, LEAVE, REGROUP
from deepspeed_cad.server.sockets import MOST_REASON, Frame, Inboxes, encode
from deepspeed_cad.threads import start_daemon

logger = logging.getLogger("deepspeed_cad")

LOOK_S = 0.2
"""Between two looks for servers that have come, or are silent."""


class ServerLink:
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

        What is said to servers that have changed since `generation` is not sent."""
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
                self.lose(server, f"it has said nothing for {self.silent_s:g} s: it hangs, or nothing reaches its host")

    def _why_lost(self, server: int, item: Frame | OSError) -> str:
        """By what it says, or that it says nothing more; "" where it serves."""
        if isinstance(item, OSError):
            return _in_words(item)
        if item.head["do"] == BUSY and self.rank == 0:
            self._busy[server] = item.head["busy"], item.head["total"]
        return str(item.head.get("reason", ""))

    def lose(self, server: int, reason: str) -> None:
        """A server is lost; only the first reason counts. Where that ends all, as it does until training has opened its
        transport, only the first server counts."""
        if self._closing or server in self.gone:
            return
        if self.liveness.losses is not None:
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


# A server's end

WORD_S = 0.5
"""Between two looks at the error board, and between two words to trainers."""
SEND_S = 1.0
"""For a word to go out: a trainer that does not read must not keep others from hearing of this server."""
GRACE_S = 1.5
"""For a trainer that stopped or died to say why: on the board, or as the word with which it ends."""


class TrainerLinks:
    """The trainers of one server; to its exchanges, also what says that servers have changed (Losses)."""

    def __init__(self, rank: int, connections: dict[int, socket.socket], liveness: Liveness) -> None:
        self.rank, self.liveness = rank, liveness
        self.generation = 0
        """Of this server's group."""
        self.called = 0
        """Of the newest group that the leader has called for."""
        self.orders: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        """Of the leader; None when there is nothing more to serve."""
        self.reason = ""
        """Why trainers cannot go on; empty where they ended well."""
        self.ended = threading.Event()
        self.busy = (0.0, 0.0)
        """Seconds in which this server attended, and since its first micro-batch."""
        self._connections = connections
        self._reached = dict(connections)
        """Trainers to which all that was sent went out in time."""
        for connection in connections.values():
            connection.settimeout(SEND_S)
        self._sending = threading.Lock()
        self._left: dict[int, str] = {}
        """Trainers that ended, and why; empty where they did well."""
        self._stopped = math.inf
        """When the first of them was seen to have stopped."""
        start_daemon("trainers", self._listen, None)

    def fail(self, reason: str) -> None:
        self._send({"do": FAILED, "reason": reason[:MOST_REASON]})

    def _send(self, head: dict[str, Any]) -> None:
        frame = encode(head)
        with self._sending:
            for trainer, connection in list(self._reached.items()):
                try:
                    connection.sendall(frame)
                except OSError as error:
                    logger.debug("trainer %d is told nothing more: %s", trainer, error)
                    del self._reached[trainer]

    def why(self) -> str:
        if self.called > self.generation:
            return "servers have changed"
        return "the trainers have ended" if self.ended.is_set() else ""

    def wait(self) -> str:
        """See exchange.failure.board.Losses: whoever is to blame, trainers agree on it, or end."""
        return wait_until(self.why, math.inf)

    def wait_for_reason(self, seconds: float) -> str:
        self.ended.wait(seconds)
        return self.reason

    def _listen(self) -> None:
        inboxes, looked = Inboxes(), 0.0
        for trainer, connection in self._connections.items():
            inboxes.add(trainer, connection)
        while not self.ended.is_set():
            for trainer, item in inboxes.read(WORD_S):
                if not isinstance(item, OSError):
                    self._take(trainer, item)
                elif trainer not in self._left:
                    self._explain(trainer, item)
            if time.monotonic() - looked > WORD_S:
                looked = time.monotonic()
                # Trainers take a server that says nothing for one that hangs.
                self._send({"do": BUSY, "busy": self.busy[0], "total": self.busy[1]})
                self._look()

    def _take(self, trainer: int, frame: Frame) -> None:
        if frame.head["do"] != LEAVE:
            if frame.head["do"] == REGROUP:
                self.called = frame.head["generation"]
            self.orders.put(frame)
            return
        reason = self._left[trainer] = frame.head["reason"]
        if reason or len(self._left) == len(self._connections):
            self._end(f"trainer {trainer} ended: {reason}" if reason else "")

    def _look(self) -> None:
        """Trainers go on without this server, or one stopped: it says so, and its process may go on for a while."""
        if self._is_given_up() or self.ended.is_set():
            return
        words = {trainer: text for trainer in sorted(self._connections) if (text := self._said(trainer))}
        # Some stopped because of others, and are about to say which.
        own = [trainer for trainer, text in words.items() if not text.startswith(("lost its", "waited for"))]
        if words and not own:  # they wait for the word of all ranks, this one too
            self.liveness.report(f"{board.LOST}, its trainers")
        now = time.monotonic()
        self._stopped = min(self._stopped, now) if words else math.inf
        if words and now - self._stopped >= GRACE_S + (0.0 if own else board.WORDS_S):
            for trainer in own or words:
                self._end(f"trainer {trainer} stopped: {words[trainer]}")

    def _is_given_up(self) -> bool:
        if reason := self.liveness.look_up(f"{GIVEN_UP}/{self.rank}"):
            self._end(f"the trainers go on without it: {reason}", for_all=False)
        return bool(reason)

    def _explain(self, trainer: int, error: OSError) -> None:
        said = wait_until(lambda: self._is_given_up() or self._said(trainer), GRACE_S)
        if isinstance(said, str) and said:
            return self._end(f"trainer {trainer} stopped: {said}")
        if said:
            return  # given up
        died = isinstance(error, ConnectionError)
        # For the others, which may wait for it too.
        text = "its process died" if died else f"the connection to it is lost ({error})"
        self.liveness.write(f"error/{trainer}", text)
        how = "died, or ended by os._exit" if died else f"is not reached any more ({error})"
        self._end(f"the process of trainer {trainer} {how}")

    def _said(self, trainer: int) -> str:
        return self.liveness.look_up(f"error/{trainer}")

    def _end(self, reason: str, for_all: bool = True) -> None:
        """`for_all`: the reason ends the trainers too. Only the first reason counts."""
        if self.ended.is_set():
            return
        well = sorted(trainer for trainer, why in self._left.items() if not why)
        if reason and for_all and well:
            reason += f" (trainers {', '.join(map(str, well))} had ended well before: look for a loop that is shorter)"
        self.reason = reason
        if reason and for_all:
            # For ranks that wait for everyone's word before they call a silent one dead.
            self.liveness.report(f"lost its trainers: {reason}")
            self.fail(reason)
        self.ended.set()
        self.orders.put(None)
