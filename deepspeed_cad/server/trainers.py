"""A server's side: sockets from all trainers, the leader's orders in a queue, and why the server should end.

In: what trainers send, that a socket closes, and the error board. Out: orders for the loop.
"""

from __future__ import annotations

import logging
import math
import queue
import socket
import threading
import time
from typing import Any

from deepspeed_cad.exchange.failure.board import Liveness
from deepspeed_cad.exchange.failure.patience import wait_until
from deepspeed_cad.server.meeting import GIVEN_UP
from deepspeed_cad.server.orders import BUSY, FAILED, LEAVE, REGROUP
from deepspeed_cad.server.wire import MOST_REASON, Frame, Inboxes, encode
from deepspeed_cad.threads import start_daemon

logger = logging.getLogger("deepspeed_cad")

LOOK_S = 0.5
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
        inboxes, looked = Inboxes(), 0.0
        for trainer, connection in self._connections.items():
            inboxes.add(trainer, connection)
        while not self.ended.is_set():
            for trainer, item in inboxes.read(LOOK_S):
                if not isinstance(item, OSError):
                    self._take(trainer, item)
                elif trainer not in self._left:
                    self._explain(trainer, item)
            if time.monotonic() - looked > LOOK_S:
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
        if self._is_given_up() or not any(map(self._said, self._connections)) or self.ended.is_set():
            return
        time.sleep(GRACE_S)
        words = {trainer: text for trainer in sorted(self._connections) if (text := self._said(trainer))}
        # Some stopped because of others.
        own = [trainer for trainer, text in words.items() if not text.startswith(("lost its", "waited for"))]
        for trainer in own or words:
            self._end(f"trainer {trainer} stopped: {words[trainer]}")

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
            names = ", ".join(map(str, well))
            reason += f" (trainers {names} had ended well before: look for a loop that is shorter)"
        self.reason = reason
        if reason and for_all:
            # For ranks that wait for everyone's word before they call a silent one dead.
            self.liveness.report(f"lost its trainers: {reason}")
            self.fail(reason)
        self.ended.set()
        self.orders.put(None)
