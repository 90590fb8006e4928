"""Room: what of a tick's exchanges needs memory at once on any rank, and how much there may be.

In: rows that land, by waves and ranks, and bytes of a row. Out: bytes. Waves take places in turn, `OUT` on their way
out and `BACK` on their way back; where transports keep memory between exchanges, each place is as large as the largest
wave that ever had it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from deepspeed_cad.errors import CADError
from deepspeed_cad.layout import Ints

OUT, BACK = 2, 3
"""Waves of one tick that have memory at once, on their way out and on their way back. While one is served the next one
comes; results of the one before are on their way, and those of the one before that are placed. So what waves need of
memory falls with their number. Fewer would make servers wait for transfers; more would only hold memory."""
HEADROOM = 1.25
"""Times what is needed: memory that is kept between exchanges is made so large where the limit allows it, so that it
does not grow with every longer document."""


class Room(NamedTuple):
    """What the exchanges of one tick may need of memory."""

    limit: float
    out: tuple[int, int]
    """Bytes that go out for one query row and for one key row of a head group, in the pass that has more."""
    back: tuple[int, int]
    """The same of what comes back."""
    source: str = 'the key "memory"'
    parts: int = 1
    """Nano-batches, which have as much each: users think of the sum."""
    headroom: float = HEADROOM
    """Times what is needed that memory is made which is kept; see `with_headroom`."""
    most: float = 0.0
    """Bytes for what no cut makes fit into the limit: it gets the least that there is a cut for."""


def lane_bytes(waves: Sequence[Ints], row: tuple[int, int], lanes: int) -> list[Ints]:
    """[ranks] bytes that land at most in each of the `lanes` places that waves take in turn. `waves`: rows of every
    rank ([ranks, 2]). `row`: bytes of a query and of a key row."""
    each = [rows @ np.array(row, np.int64) for rows in waves]
    return [np.max(each[lane::lanes], axis=0) for lane in range(min(lanes, len(each)))]


def room_needed(room: Room, waves: Sequence[tuple[Ints, Ints]]) -> tuple[float, int]:
    """Bytes that a rank needs for waves of which so many rows land at servers and at homes, and which rank needs most.
    Every rank makes its memory as large as the fullest one needs it; headroom is not counted."""
    lanes = lane_bytes([served for served, _ in waves], room.out, OUT)
    lanes += lane_bytes([landed for _, landed in waves], room.back, BACK)
    needed = float(sum(int(lane.max(initial=0)) for lane in lanes))
    fullest = max(lanes, key=lambda lane: int(lane.max(initial=0)))
    return needed, int(fullest.argmax()) if len(fullest) else 0


def with_headroom(room: Room, needed: float) -> Room:
    """The room for a tick that needs so many bytes: with as much headroom as its limit has left, and no more."""
    return room._replace(headroom=min(HEADROOM, max(1.0, room.limit / needed)) if needed else HEADROOM)


def too_much(room: Room, needed: float, rank: int) -> CADError:
    needed, limit = needed * room.parts, room.limit * room.parts
    over = needed - limit
    return CADError(
        f"the attention that ranks exchange does not fit: cut into the smallest waves, what lands at rank {rank} "
        f"needs {_size(needed)} at once, {_size(over)} more than the {_size(limit)} that {room.source} allows. Set "
        f'"memory" to at least {needed / 2**30:.3g} (GiB), use shorter documents or more ranks, or free GPU memory by '
        "more checkpointing"
    )


def _size(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**29 else f"{count / 2**20:.3g} MiB"
