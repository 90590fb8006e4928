"""A server's side: sockets from all trainers, the leader's orders in a queue, and why the server should end.

In: what trainers send, that a socket closes, and the error board. Out: orders for the loop; then one `End`.
"""

from __future__ import annotations

import logging
import math
import queue
import selectors
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

from deepspeed_cad.exchange.failure.board import Liveness
from deepspeed_cad.exchange.failure.patience import wait_until
from deepspeed_cad.server.meeting import GIVEN_UP
from deepspeed_cad.server.orders import BUSY, FAILED, LEAVE, REGROUP, TO_SERVERS
from deepspeed_cad.server.wire import MOST_REASON, Frame, Inbox, encode
from deepspeed_cad.threads import start_daemon

logger = logging.getLogger("deepspeed_cad")

LOOK_S = 0.5
"""Between two looks at the error board, and between two words to trainers."""
SEND_S = 1.0
"""For a word to go out: a trainer that does not read must not keep others from hearing of this server."""
GRACE_S = 1.5
"""For a trainer that stopped or died to say why: on the board, or as the word with which it ends."""


@dataclass(frozen=True)
class End:
    """There is nothing more to serve; `reason` is empty where all trainers ended well."""

    reason: str = ""


class TrainerLinks:
    """The trainers of one server; to its exchanges, also what says that servers have changed (Losses)."""

    def __init__(self, rank: int, connections: dict[int, socket.socket], liveness: Liveness) -> None:
        self.rank, self.liveness = rank, liveness
        self.generation = 0
        """Of this server's group."""
        self.called = 0
        """Of the newest group that the leader has called for."""
        self.items: queue.SimpleQueue[Frame | End] = queue.SimpleQueue()
        """The leader's orders, then the end."""
        self.reason = ""
        """Why trainers cannot go on."""
        self.ended = threading.Event()
        self.busy = (0.0, 0.0)
        """Seconds in which this server attended, and since its first micro-batch."""
        self._connections = connections
        self._reached = dict(connections)
        """Trainers to which all that was sent went out in time."""
        for connection in connections.values():
            connection.settimeout(SEND_S)
        self._sending = threading.Lock()
        self._left: set[int] = set()
        self._failed: set[int] = set()
        """Of those that left: who said why."""
        start_daemon("trainers", self._listen, None)

    def fail(self, reason: str) -> None:
        """Tell every trainer that this server ends, and why."""
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
        """See exchange.failure.board.Losses."""
        if self.called > self.generation:
            return "servers have changed"
        return "the trainers have ended" if self.ended.is_set() else ""

    def wait(self) -> str:
        """See exchange.failure.board.Losses: whoever is to blame, trainers agree on it, or end."""
        return wait_until(self.why, math.inf)

    def wait_for_reason(self, seconds: float) -> str:
        """Why trainers cannot go on, as far as it is known by then."""
        self.ended.wait(seconds)
        return self.reason

    def _listen(self) -> None:
        looked = 0.0
        with selectors.DefaultSelector() as waiting:
            for trainer, connection in self._connections.items():
                inbox = Inbox(connection, f"trainer {trainer}", TO_SERVERS)
                waiting.register(connection, selectors.EVENT_READ, (trainer, inbox))
            while not self.ended.is_set():
                for key, _ in waiting.select(LOOK_S):
                    if not self._hear(*key.data):
                        waiting.unregister(key.fileobj)
                if time.monotonic() - looked > LOOK_S:
                    looked = time.monotonic()
                    # Trainers take a server that says nothing for one that hangs.
                    self._send({"do": BUSY, "busy": self.busy[0], "total": self.busy[1]})
                    self._look()

    def _hear(self, trainer: int, inbox: Inbox) -> bool:
        """Whether more may come."""
        try:
            for frame in inbox.read():
                self._take(trainer, frame)
            return True
        except OSError as error:
            if trainer not in self._left:
                self._explain(trainer, error)
            return False

    def _take(self, trainer: int, frame: Frame) -> None:
        if frame.head["do"] != LEAVE:
            if frame.head["do"] == REGROUP:
                self.called = frame.head["generation"]
            self.items.put(frame)
            return
        self._left.add(trainer)
        if frame.head["reason"]:
            self._failed.add(trainer)
            self._end(f"trainer {trainer} ended: {frame.head['reason']}")
        elif len(self._left) == len(self._connections):
            self._end("")

    def _look(self) -> None:
        """Trainers go on without this server, or one stopped: it says so, and its process may go on for a while."""
        if self._is_given_up():
            return
        stopped = [trainer for trainer in self._connections if self._said(trainer)]
        if stopped and not self.ended.is_set():
            time.sleep(GRACE_S)
            self._end(self._first_cause(stopped))

    def _is_given_up(self) -> bool:
        reason = self.liveness.look_up(f"{GIVEN_UP}/{self.rank}")
        if reason:
            self._end(f"the trainers go on without it: {reason}", for_all=False)
        return bool(reason)

    def _explain(self, trainer: int, error: OSError) -> None:
        """The connection to a trainer has ended."""
        said = wait_until(lambda: self._is_given_up() or self._said(trainer), GRACE_S)
        if isinstance(said, str) and said:
            return self._end(f"trainer {trainer} stopped: {said}")
        if said:
            return  # given up
        died = isinstance(error, ConnectionError)
        try:
            # For the others, which may wait for it too.
            text = "its process died" if died else f"the connection to it is lost ({error})"
            self.liveness.store.set(f"error/{trainer}", text)
        except (RuntimeError, OSError) as gone:
            logger.debug("the board is gone: %s", gone)
        how = "died, or ended by os._exit" if died else f"is not reached any more ({error})"
        self._end(f"the process of trainer {trainer} {how}")

    def _first_cause(self, stopped: list[int]) -> str:
        """What a trainer says that did not stop because of others."""
        words = {trainer: self._said(trainer) for trainer in sorted(stopped)}
        own = [trainer for trainer, text in words.items() if not text.startswith(("lost its", "waited for"))]
        trainer = (own or sorted(stopped))[0]
        return f"trainer {trainer} stopped: {words[trainer]}"

    def _said(self, trainer: int) -> str:
        return self.liveness.look_up(f"error/{trainer}")

    def _end(self, reason: str, for_all: bool = True) -> None:
        """`for_all`: the reason ends the trainers too."""
        if self.ended.is_set():
            return
        if reason and for_all and (left := sorted(self._left - self._failed)):
            reason += f" (trainers {', '.join(map(str, left))} had ended well before: look for a loop that is shorter)"
        self.reason = reason
        if reason and for_all:
            # For ranks that wait for everyone's word before they call a silent one dead.
            self.liveness.report(f"lost its trainers: {reason}")
            self.fail(reason)
        self.ended.set()
        self.items.put(End(reason))
