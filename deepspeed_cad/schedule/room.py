"""Room: what of a tick's exchanges needs memory at once on any rank, and how much there may be.

In: rows that land, by waves and ranks, and bytes of a row. Out: bytes. `UNDER_WAY` waves have memory at once, each for
what goes out and for what comes back; where transports keep it between exchanges, it is as large as the largest wave
that ever had that place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from deepspeed_cad.errors import CADError
from deepspeed_cad.layout import Ints

UNDER_WAY = 3
"""Waves of one tick that have memory at once: one is served while the next travels and the one before goes back. The
next one begins when that is back, so what waves need of memory falls with their number beyond this. Fewer would make
servers wait for the way back of each; more would only hold memory."""
HEADROOM = 1.25
"""Times what is needed: memory that is kept between exchanges is made so large, so that it does not grow with every
longer document."""


def lane_of(wave: int) -> int:
    """Which of the `UNDER_WAY` places a wave has: it begins when the wave before it there is over."""
    return wave % UNDER_WAY


class Room(NamedTuple):
    """What the exchanges of one tick may need of memory."""

    limit: float
    """Bytes on each rank."""
    out: tuple[int, int]
    """Bytes that go out for one query row and for one key row of a head group, in the pass that has more."""
    back: tuple[int, int]
    """The same of what comes back."""
    source: str = 'the key "memory"'
    """Where the limit comes from, for an error."""


def lane_rows(waves: Sequence[Ints], room_bytes: tuple[int, int]) -> list[Ints]:
    """[ranks] bytes that land at most in each place; `waves`: rows of every rank ([ranks, 2]), by waves."""
    each = [rows @ np.array(room_bytes, np.int64) for rows in waves]
    return [np.max(each[lane::UNDER_WAY], axis=0) for lane in range(min(UNDER_WAY, len(each)))]


def room_needed(room: Room, waves: Sequence[tuple[Ints, Ints]]) -> tuple[float, int]:
    """Bytes that a rank needs for waves of which so many rows land at servers and at homes, and which rank needs most.

    Every rank makes its memory as large as the fullest one needs it.
    """
    lanes = lane_rows([served for served, _ in waves], room.out) + lane_rows([landed for _, landed in waves], room.back)
    needed = HEADROOM * float(sum(int(lane.max(initial=0)) for lane in lanes))
    fullest = max(lanes, key=lambda lane: int(lane.max(initial=0)))
    return needed, int(fullest.argmax()) if len(fullest) else 0


def too_much(room: Room, needed: float, rank: int) -> CADError:
    """The error where the smallest parts of a tick do not fit."""
    over = needed - room.limit
    return CADError(
        f"the attention that ranks exchange does not fit: cut into the smallest waves, what lands at rank {rank} needs "
        f"{_size(needed)} at once, {_size(over)} more than the {_size(room.limit)} that {room.source} allows. Set "
        f'"memory" to at least {needed / 2**30:.3g} (GiB), use shorter documents or more ranks, or free GPU memory by '
        "more checkpointing"
    )


def _size(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**29 else f"{count / 2**20:.3g} MiB"
