"""What a transport does: move slices between homes and servers, without blocking the caller.

A `Field` is one tensor of one exchange. On the way out its `home` is [rows, groups, width] (a strided view of the
rank's own Q, K, V or dO with a contiguous last dimension) and it arrives in a group-major buffer [served rows, width].
On the way back `served` is that group-major buffer; it lands at home in table order and is then placed: written
(O, dQ: every row comes from one place) or added (dK, dV: several servers may have read the same keys).

Exchanges are paired by order; each sends its identity along (failure/identity.py).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from deepspeed_cad.exchange.failure.board import Liveness
from deepspeed_cad.exchange.failure.identity import Identity, Moment, Register
from deepspeed_cad.exchange.failure.watchdog import Alarm, Watchdog
from deepspeed_cad.exchange.group import Group, abort
from deepspeed_cad.exchange.waits import Transfers
from deepspeed_cad.schedule import Schedule
from deepspeed_cad.schedule.waves import Room

UNNAMED = Moment()
"""For whoever runs exchanges outside of training."""


@dataclass(frozen=True)
class Outgoing:
    """A tensor on its way from homes to servers."""

    kind: int
    """schedule.QUERY or schedule.KEY: which slices carry it."""
    home: torch.Tensor
    """[rows, groups, width]."""


@dataclass(frozen=True)
class Returning:
    """A tensor on its way from servers back home."""

    kind: int
    served: torch.Tensor
    """[served rows, width], contiguous."""
    home: torch.Tensor
    """[rows, groups, width] at home, where it is placed."""
    add: bool = False
    """Add to what is there (in fp32, rounded once) instead of writing."""


Arrived = TypeVar("Arrived")


class UnderWay(Generic[Arrived]):
    """A dispatch or a return that has started."""

    def __init__(self, parcel: Any, finish: Callable[[Any], Arrived]) -> None:
        """`parcel`: what is held until this is let go of; `finish` gets it, once."""
        self.parcel, self.waited = parcel, False
        self._finish = finish

    def wait(self) -> Arrived:
        """What arrived, complete for work queued after this call."""
        if not self.waited:
            self._arrived = self._finish(self.parcel)
            self.waited = True
            del self._finish  # and the fields that it holds
        return self._arrived


def leave_to_streams(tensors: Iterable[torch.Tensor], streams: Sequence[torch.cuda.Stream]) -> None:
    """Once freed, the memory of these tensors is nobody's before each stream is done with what it has to do by then.
    Torch's allocator gives freed memory at once to the next tensor of the stream that it was made on, which is right
    where somebody has waited for all that others do with it; after an error the last reference goes on any thread."""
    for x in tensors:
        for stream in streams:
            x.record_stream(stream)


Dispatched = UnderWay[list[torch.Tensor]]
"""Gives group-major buffers [served rows, width], one per field."""
Returned = UnderWay[None]
"""Gives nothing: what came back is in the `home` tensors."""


class Transport(ABC):
    """Moves slices. Every rank of the group calls the same methods in the same order, also with nothing to move."""

    name: str
    most_waves = 1
    """In how many waves a tick in place may usefully go. More work all the same, where they are asked for."""
    two_ways = False
    """Whether results travel home while later dispatches travel out, and no host waits for either: beside reserved
    servers."""
    _watchdog: Watchdog
    """On GPUs."""
    stream: torch.cuda.Stream | None = None
    """Where the transfers of the newest exchange end, if that is one stream: for timelines."""

    def __init__(self, group: Group, device: torch.device, alarm: Alarm) -> None:
        self.group, self.device, self.alarm = group, device, alarm
        self.exchanges = self.bytes_sent = 0
        self.transfers: Transfers | None = None
        """Where it notes how long transfers took, if somebody wants to know and it can tell."""
        self._register = Register()

    @property
    def landing_bytes(self) -> int:
        """Memory that it keeps between exchanges for what arrives, outside of torch's allocator."""
        return 0

    @abstractmethod
    def dispatch(
        self, schedule: Schedule, fields: list[Outgoing], nano_batch: int, moment: Moment = UNNAMED
    ) -> Dispatched:
        """Start sending. `nano_batch` (0 or 1): exchanges of different ones may overlap."""

    @abstractmethod
    def give_back(
        self, schedule: Schedule, fields: list[Returning], nano_batch: int, moment: Moment = UNNAMED
    ) -> Returned:
        """Start returning."""

    def make_room(self, schedules: Sequence[Schedule], room: Room, nano_batch: int) -> None:  # noqa: B027
        """Have memory for the waves of a tick, before the first of them starts. Collective. Raises NoRoomError, on all
        ranks alike, where one has too little: nothing has changed then."""

    @abstractmethod
    def close(self) -> None:
        """Release buffers and communicators."""

    @abstractmethod
    def abandon(self) -> Callable[[], None]:
        """Let go of a group one of whose servers is lost, or that others take the place of: meets nobody and waits for
        nothing. Gives what releases the memory that is left, which may wait for the GPU, when trainers go on."""

    @contextmanager
    def watched(self, label: str) -> Iterator[None]:
        """Sound the alarm where a GPU, or its host, stands in what is queued inside by the group's own processes."""
        self.alarm.check()
        self._watchdog.end_messages = partial(abort, self.group, self.device)
        before, after = torch.cuda.Event(), torch.cuda.Event()
        before.record()
        with Liveness.watch(self.alarm.liveness, label), self._watchdog.inside(label):
            yield
        after.record()
        self._watchdog.track(before, after, label)

    def _next(self, schedule: Schedule, nano_batch: int, moment: Moment, is_return: bool) -> Identity:
        self.exchanges += 1
        return self._register.next(self.exchanges, moment, nano_batch, is_return, schedule)
