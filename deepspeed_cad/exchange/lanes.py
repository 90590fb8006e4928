"""Lanes: the places that waves of a nano-batch take in turn, each with landing areas of its own (landed.py says when an
area is free).

In: a group whose ranks map each other's memory. Out: lanes, and memory for all of a tick's at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from deepspeed_cad.exchange.copies import ALIGNMENT
from deepspeed_cad.exchange.failure.roll_call import RollCall
from deepspeed_cad.exchange.landing import LandingArea, grow_together
from deepspeed_cad.exchange.peers import PeerGroup
from deepspeed_cad.exchange.transport import Returned
from deepspeed_cad.schedule import Schedule
from deepspeed_cad.schedule.room import BACK, OUT, Room, lane_bytes

FIELDS = 8
"""At most of one exchange."""


@dataclass(eq=False)
class OutLane:
    """A place on the way out: its areas, and the numbers of the exchanges that used it last."""

    areas: tuple[LandingArea, LandingArea]
    """The second one only where dispatches follow each other without a return."""
    filled: int = 1
    """Which area the last dispatch landed in."""
    dispatch: int = 0
    give_back: int = 0
    """The return of that dispatch; 0 before it started."""

    @property
    def guard(self) -> int:
        """The exchange that peers must have reached, so that the area of the next dispatch is free there."""
        return self.give_back or self.dispatch

    def next_area(self) -> LandingArea:
        self.filled = 0 if self.give_back else 1 - self.filled
        return self.areas[self.filled]


@dataclass(eq=False)
class BackLane:
    """A place on the way back: its area and what is under way."""

    area: LandingArea
    unfinished: Returned | None = None


class Lanes:
    """All lanes of a transport."""

    def __init__(self, peers: PeerGroup, device: torch.device, roll_call: RollCall) -> None:
        self.peers, self.device, self.roll_call = peers, device, roll_call
        self._out: dict[tuple[int, int], OutLane] = {}
        self._back: dict[tuple[int, int], BackLane] = {}

    def out(self, nano_batch: int, wave: int) -> OutLane:
        """Where a wave of a nano-batch lands at its servers; areas are empty at first."""
        number = wave % OUT
        found = self._out.get((nano_batch, number))
        if found is None:
            areas = self._area("out", nano_batch, number), self._area("out (odd)", nano_batch, number)
            found = self._out[nano_batch, number] = OutLane(areas)
        return found

    def back(self, nano_batch: int, wave: int) -> BackLane:
        """Where its results land at home."""
        number = wave % BACK
        found = self._back.get((nano_batch, number))
        if found is None:
            found = self._back[nano_batch, number] = BackLane(self._area("back", nano_batch, number))
        return found

    def _area(self, what: str, nano_batch: int, number: int) -> LandingArea:
        label = f"{what} {nano_batch}" + (f", wave {number}" if number else "")
        return LandingArea(label, self.peers, self.device, self.roll_call)

    def make_room(self, schedules: Sequence[Schedule], room: Room, nano_batch: int) -> bool:
        """Have memory for all waves of a tick. Collective; gives whether some is new. Raises NoRoomError."""
        out = lane_bytes([one.served_rows[self.peers.members] for one in schedules], room.out, OUT)
        back = lane_bytes([one.landed_rows[self.peers.members] for one in schedules], room.back, BACK)
        areas = [self.out(nano_batch, number).areas[0] for number in range(len(out))]
        areas += [self.back(nano_batch, number).area for number in range(len(back))]
        # Each field begins at a multiple of an alignment.
        needed = [(area, size + FIELDS * ALIGNMENT) for area, size in zip(areas, out + back, strict=True)]
        return grow_together(needed, room.headroom)

    def areas(self) -> Iterator[LandingArea]:
        for out in self._out.values():
            yield from out.areas
        for back in self._back.values():
            yield back.area

    def release(self) -> None:
        for area in self.areas():
            area.release()
        self._out.clear()
        self._back.clear()
