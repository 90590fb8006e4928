"""A trainer's sockets to reserved servers of which some may be lost, and others come, while training goes on."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from deepspeed_cad.server.link import ServerLink
from deepspeed_cad.server.surviving.board import GIVEN_UP, LEFT
from deepspeed_cad.server.wire import encode


class SurvivingLink(ServerLink):
    """See ServerLink. Who asks learns from `gone` who is lost; nobody else is told."""

    heard: Callable[[], None] = staticmethod(lambda: None)
    """Called when a server is lost."""

    def add(self, server: int, connection: socket.socket) -> None:
        """A server has come. It is told nothing before it belongs to the crew."""
        with self._lock:
            self._add(server, connection)

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

    def leave(self, reason: str) -> None:
        if not self._closing:
            # Trainers that lose their servers because of this one ask the board who is left; and servers that came
            # later and wait to be asked in have no socket to this trainer yet.
            if reason:
                self.liveness.report(reason)
            else:
                self.liveness.close()
            self.liveness.write(LEFT, reason)
        super().leave(reason)

    def _check(self) -> None:
        pass

    def _send(self, servers: Iterable[int], frame: bytes) -> None:
        # To one that is lost a part of a frame may have gone out.
        super()._send([server for server in servers if server not in self.gone], frame)

    def _note(self, server: int, reason: str) -> None:
        self.gone[server] = reason
        self.liveness.write(f"{GIVEN_UP}/{server}", reason)
        self.heard()
