"""One pass of a call on a server: its waves, each told when it goes out and when it comes back.

Orders come in the order in which trainers start these exchanges (attention/overlap.py): the dispatches of the first
waves, then return after return, and behind each one the dispatch of the next wave. A server does as they do. It
starts what it is told to, serves a wave as soon as trainers would, that is when as many are out as have memory at once,
and waits for a return before another one takes its place. In: orders, and a function that serves what arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from deepspeed_cad.attention.setup import CallSetup, WavesOut
from deepspeed_cad.errors import CADError
from deepspeed_cad.exchange.transport import Returned, Returning
from deepspeed_cad.schedule.waves import BACK, OUT

Serve = Callable[[int, list[torch.Tensor]], list[Returning]]
"""Runs what arrived of a wave; gives what goes back."""


@dataclass(eq=False)
class ServedPass:
    """One direction of one call."""

    setup: CallSetup
    backward: bool
    out: WavesOut
    serve: Serve
    served: int = 0
    returned: int = 0
    """Of these, told to come back."""
    _ready: list[Returning] = field(default_factory=list)
    """What goes back next, where it was served and is not asked for yet."""
    _backs: deque[Returned] = field(default_factory=deque)

    @property
    def is_over(self) -> bool:
        """Whether all of it came back."""
        return self.returned == self.out.count

    def dispatch(self, wave: int) -> None:
        """A wave goes out. Raises CADError where it is another one's turn."""
        self._expect("dispatch", wave, self.out.started)
        if wave >= self.returned + OUT:
            raise CADError(f"{self._words} is told to dispatch wave {wave} before wave {self.returned} was returned")
        if wave >= BACK:
            # Its place on the way back is that of the wave so many before it.
            self._backs.popleft().wait()
        with self.setup.span("dispatch", self.backward):
            self.out.start_next()
        self._serve_next()

    def give_back(self, wave: int) -> None:
        """A wave comes back. Raises CADError where it is another one's turn."""
        self._expect("return", wave, self.returned)
        if self.served == wave:
            raise CADError(f"{self._words} is told to return wave {wave} before it was served")
        fields, self._ready = self._ready, []
        self._backs.append(self.setup.give_back(wave, fields, self.backward))
        self.returned += 1
        self._serve_next()
        while self.is_over and self._backs:
            self._backs.popleft().wait()

    def _serve_next(self) -> None:
        """Serve a wave where the one before is on its way back, and the one after, if there is any, on its way here."""
        wave = self.served
        if self.returned < wave or self.is_over or self.out.started < min(self.out.count, wave + OUT):
            return
        with self.setup.span("wait", self.backward):
            arrived = self.out.wait()
        self._ready = self.serve(wave, arrived)
        self.served += 1

    def _expect(self, what: str, wave: int, expected: int) -> None:
        if wave != expected or expected == self.out.count:
            raise CADError(
                f"{self._words} is told to {what} wave {wave}, where wave {expected} of {self.out.count} comes next: "
                "orders and plans do not belong together"
            )

    @property
    def _words(self) -> str:
        way = "backward" if self.backward else "forward"
        return f"the {way} of {self.setup.label} in micro-batch {self.setup.turn} (a server)"
