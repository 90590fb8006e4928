"""A server's side: sockets from all trainers, the leader's orders in a queue, and why the server should end.

In: what trainers send, that a socket closes, and the error board. Out: orders for the loop; then one `End`.
"""

from __future__ import annotations

import logging
import queue
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from deepspeed_cad.errors import CADPeerError
from deepspeed_cad.exchange.liveness import Liveness
from deepspeed_cad.server.orders import DROPPED, REGROUP
from deepspeed_cad.server.wire import BUSY, Frame, encode, keep_alive, receive
from deepspeed_cad.threads import start_daemon

logger = logging.getLogger("deepspeed_cad")

LOOK_S = 0.5
"""Between two looks at the error board."""
GRACE_S = 1.5
"""For a trainer that stopped or died to say why: on the board, or as the word with which it ends."""


@dataclass(frozen=True)
class End:
    """There is nothing more to serve; `reason` is empty where all trainers ended well."""

    reason: str = ""


class Listener:
    """Where trainers reach this server."""

    def __init__(self, rendezvous: str) -> None:
        self.socket = socket.create_server(("", 0))
        self.port = int(self.socket.getsockname()[1])
        self.token = secrets.token_hex(16)
        self.addresses = _own_addresses(rendezvous.rpartition(":")[0])

    def accept(
        self, trainers: int, rank: int, timeout_s: float, look: Callable[[], None] = lambda: None
    ) -> dict[int, socket.socket]:
        """A connection from every trainer. Raises CADPeerError where one does not come.

        `look` is called now and then; it may raise.
        """
        found: dict[int, socket.socket] = {}
        end = time.monotonic() + timeout_s
        while len(found) < trainers:
            look()
            self.socket.settimeout(min(max(end - time.monotonic(), 0.01), LOOK_S))
            try:
                connection, _ = self.socket.accept()
                connection.settimeout(5.0)
                frame = receive(connection)
            except TimeoutError as error:
                missing = [one for one in range(trainers) if one not in found]
                if time.monotonic() >= end:
                    raise CADPeerError(f"server {rank}: trainers {missing} did not connect in time") from error
                continue
            except OSError:
                continue
            if frame is None or frame.head.get("token") != self.token:
                connection.close()
                continue
            connection.sendall(encode({"rank": rank}))
            connection.settimeout(None)
            keep_alive(connection)
            found[int(frame.head["rank"])] = connection
        self.socket.close()
        return found


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
        self._connections = connections
        self._sending = threading.Lock()
        self._left: set[int] = set()
        self._failed: set[int] = set()
        """Of those that left: who said why."""
        start_daemon("trainers", self._listen, None)

    def fail(self, reason: str) -> None:
        """Tell every trainer that this server ends, and why."""
        frame = encode({"do": "failed", "reason": reason[:4000]})
        with self._sending:
            for connection in self._connections.values():
                try:
                    connection.settimeout(1.0)
                    connection.sendall(frame)
                except OSError as error:
                    logger.debug("a trainer has gone: %s", error)

    def why(self) -> str:
        """See exchange.liveness.Losses."""
        if self.called > self.generation:
            return "servers have changed"
        return "the trainers have ended" if self.ended.is_set() else ""

    def wait(self) -> str:
        """See exchange.liveness.Losses: whoever is to blame, trainers agree on it, or end."""
        while not (why := self.why()):
            time.sleep(0.02)
        return why

    def tell_busy(self, busy_s: float, total_s: float) -> None:
        """Tell the leader how long this server attended so far, and how long it is up."""
        with self._sending:
            try:
                self._connections[0].sendall(encode({"do": BUSY, "busy": busy_s, "total": total_s}))
            except OSError as error:
                logger.debug("the leader has gone: %s", error)

    def wait_for_reason(self, seconds: float) -> str:
        """Why trainers cannot go on, as far as it is known by then."""
        self.ended.wait(seconds)
        return self.reason

    def _listen(self) -> None:
        looked = 0.0
        with selectors.DefaultSelector() as waiting:
            for trainer, connection in self._connections.items():
                waiting.register(connection, selectors.EVENT_READ, trainer)
            while not self.ended.is_set():
                for key, _ in waiting.select(LOOK_S):
                    if not self._hear(key.data):
                        waiting.unregister(key.fileobj)
                if time.monotonic() - looked > LOOK_S:
                    looked = time.monotonic()
                    self._look()

    def _hear(self, trainer: int) -> bool:
        try:
            frame = receive(self._connections[trainer])
        except OSError:
            frame = None
        if frame is None:
            if trainer not in self._left:
                self._end(self._explain(trainer))
            return False
        if frame.head["do"] == DROPPED:
            self._end(f"the trainers go on without it{': ' * bool(frame.head['reason'])}{frame.head['reason']}", False)
            return False
        if frame.head["do"] != "leave":
            if frame.head["do"] == REGROUP:
                self.called = frame.head["generation"]
            self.items.put(frame)
            return True
        self._left.add(trainer)
        if frame.head["reason"]:
            self._failed.add(trainer)
            self._end(f"trainer {trainer} ended: {frame.head['reason']}")
        elif len(self._left) == len(self._connections):
            self._end("")
        return True

    def _look(self) -> None:
        """A trainer that stopped says so on the board; its process may go on for a while."""
        stopped = [trainer for trainer in self._connections if self._said(trainer)]
        if stopped and not self.ended.is_set():
            time.sleep(GRACE_S)
            self._end(self._first_cause(stopped))

    def _explain(self, trainer: int) -> str:
        end = time.monotonic() + GRACE_S
        while time.monotonic() < end:
            if said := self._said(trainer):
                return f"trainer {trainer} stopped: {said}"
            time.sleep(0.1)
        try:
            # For the others, which may wait for it too.
            self.liveness.store.set(f"error/{trainer}", "its process died")
        except (RuntimeError, OSError) as error:
            logger.debug("the board is gone: %s", error)
        return f"the process of trainer {trainer} died, or ended by os._exit"

    def _first_cause(self, stopped: list[int]) -> str:
        """What a trainer says that did not stop because of others."""
        words = {trainer: self._said(trainer) for trainer in sorted(stopped)}
        own = [trainer for trainer, text in words.items() if not text.startswith(("lost its", "waited for"))]
        trainer = (own or sorted(stopped))[0]
        return f"trainer {trainer} stopped: {words[trainer]}"

    def _said(self, trainer: int) -> str:
        try:
            key = f"error/{trainer}"
            return self.liveness.store.get(key).decode() if self.liveness.store.check([key]) else ""
        except (RuntimeError, OSError):
            return ""

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


def _own_addresses(master: str) -> tuple[str, ...]:
    """Where other hosts may reach this one: the address from which it reaches the master, then its names."""
    found = []
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((master, 9))  # sends nothing: only asks which interface would
            found.append(str(probe.getsockname()[0]))
    except OSError as error:
        logger.debug("no way to %s: %s", master, error)
    return tuple(dict.fromkeys([*found, socket.gethostname()]))
