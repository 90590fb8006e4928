"""What lands on a rank through the CPU transport, counted as it happens: bytes that have to be there at once.

What was dispatched is there from the start of its exchange until its return starts, what comes back until it was
waited for; between nano-batches and waves nothing is shared.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from deepspeed_cad.exchange.landing import NoRoomError
from deepspeed_cad.exchange.packed import PackedTransport
from deepspeed_cad.exchange.transport import UNNAMED, UnderWay
from deepspeed_cad.schedule import Schedule
from deepspeed_cad.schedule.waves import Room, room_needed


@dataclass
class Landing:
    """Of one process."""

    now: int = 0
    most: int = 0
    """Bytes at once."""
    waves: dict[tuple[int, int, int, bool], int] = field(default_factory=dict)
    """By micro-batch, layer, nano-batch and direction."""
    tried: int = 0
    """How often ranks made room."""

    def takes(self, size: int) -> None:
        """So much is there from now on."""
        self.now += size
        self.most = max(self.most, self.now)

    @property
    def span(self) -> tuple[int, int]:
        """Fewest and most waves of any pass."""
        return (min(self.waves.values()), max(self.waves.values())) if self.waves else (0, 0)


def _size(schedule: Schedule, fields: Sequence[Any], rows: Any) -> int:
    return sum(int(rows[schedule.rank, f.kind]) * f.home.shape[-1] * f.home.element_size() for f in fields)


@contextmanager
def counted(has: float = float("inf")) -> Iterator[Landing]:
    """Count in this process. `has`: bytes for which its transports find memory when ranks make room; they all have as
    much, so all fail alike."""
    found, landed = Landing(), dict[tuple[int, int], int]()
    before = PackedTransport.dispatch, PackedTransport.give_back, PackedTransport.make_room, UnderWay.wait

    def dispatch(self: Any, schedule: Schedule, fields: list, nano_batch: int, moment: Any = UNNAMED) -> Any:
        size = _size(schedule, fields, schedule.served_rows)
        landed[nano_batch, moment.wave] = size
        found.takes(size)
        key = moment.turn, moment.layer, nano_batch, moment.backward
        found.waves[key] = max(found.waves.get(key, 0), moment.wave + 1)
        return before[0](self, schedule, fields, nano_batch, moment)

    def give_back(self: Any, schedule: Schedule, fields: list, nano_batch: int, moment: Any = UNNAMED) -> Any:
        size = _size(schedule, fields, schedule.landed_rows)
        found.takes(size - landed.pop((nano_batch, moment.wave)))
        back = before[1](self, schedule, fields, nano_batch, moment)
        back.size = size
        return back

    def wait(self: Any) -> Any:
        arrived = before[3](self)
        found.now -= self.__dict__.pop("size", 0)
        return arrived

    def make_room(self: Any, schedules: Sequence[Schedule], room: Room, nano_batch: int) -> None:
        found.tried += 1
        size, _ = room_needed(room, [(one.served_rows, one.landed_rows) for one in schedules])
        if size > has:
            raise NoRoomError("rank 2: 7 MiB were wanted, 3 are free.")
        before[2](self, schedules, room, nano_batch)

    transport = mock.patch.multiple(PackedTransport, dispatch=dispatch, give_back=give_back, make_room=make_room)
    with transport, mock.patch.object(UnderWay, "wait", wait):
        yield found
