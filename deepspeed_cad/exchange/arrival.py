"""Waits on the host until an exchange has arrived, where training goes on without a server that is lost (Losses).

Elsewhere streams wait, and the host queues work far ahead of its GPU. Behind a wait that cannot end that work could
not be taken back. So where a server may be lost no stream of a GPU ever waits for another rank: the host looks until
all is there, and only then queues what reads it. Nothing is computed from what did not come, no stream has to be
released when a server dies, and the GPU can always be waited for.

In: what says whether an exchange is there, and the alarm. Out: nothing, or ServerLostError.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from deepspeed_cad.exchange.failure.watchdog import Alarm, Event, Watchdog

PAUSE_S = 1e-4
"""At most, between two looks: what is queued behind an exchange starts late by so much. A choice."""
ROUND = 1 << 32
"""Numbers in device memory have 32 bits and begin again at 0."""


def wait_for(reached: Callable[[], bool], alarm: Alarm, watchdog: Watchdog, waited_for: object, exchange: int) -> None:
    """Wait on the host; raises ServerLostError where a server is lost before `reached`, CADPeerError as streams do.

    `reached` says whether it is there, and never waits; `waited_for`: what it is, in words; `exchange`: its number.
    """

    def has_arrived() -> bool:
        # First this: what ends a wait by force sounds the alarm, or says that it frees, before it does so.
        found = reached()
        alarm.check()
        return found and not watchdog.freed

    # The watchdog knows how long it may last.
    with watchdog.inside(waited_for):
        alarm.liveness.patiently(
            has_arrived, str(waited_for), exchange, with_servers=True, longest_pause_s=PAUSE_S
        )  # fmt: skip


class Reader:
    """Reads, on the host, how far all ranks have come by the numbers that they write in this rank's device memory."""

    def __init__(self, host_R: torch.Tensor, begin: Callable[[], Event]) -> None:
        """`begin` starts to copy the numbers, one of each rank, to `host_R`; gives what happens when they are there."""
        self._host_R, self._begin = host_R, begin
        self._copied: Event | None = None
        self.least = 0
        """The least number that was read last: no rank is behind it."""

    def reached(self, number: int) -> bool:
        """Whether all ranks have come to a number. Never waits: it begins a copy, and a later call looks at it."""
        if self.least < number:
            if self._copied is None:
                self._copied = self._begin()
            elif self._copied.query():
                # As a GPU compares: no rank is half a round behind another, so the nearer way round is the right one.
                ahead_R = (self._host_R.long() - number + ROUND // 2) % ROUND - ROUND // 2
                self._copied, self.least = None, number + int(ahead_R.min())
        return self.least >= number


def read_numbers(numbers_R: torch.Tensor) -> Reader:
    """A reader of int32 numbers in device memory, on a stream of its own."""
    host_R = torch.empty(numbers_R.shape, dtype=numbers_R.dtype, pin_memory=numbers_R.is_cuda)
    stream = torch.cuda.Stream(numbers_R.device, priority=-1)

    def begin() -> Event:
        with torch.cuda.stream(stream):
            host_R.copy_(numbers_R, non_blocking=True)
            return stream.record_event()

    return Reader(host_R, begin)
