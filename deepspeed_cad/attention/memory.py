"""Memory for the exchanges of one micro-batch: in how many waves its ticks go so that what lands fits.

In: the limit that all ranks agreed on, plans. Out: schedules that fit. The limit may shrink while a micro-batch runs,
where some rank has less memory than was thought: every rank learns that at the same exchange, from the same words.
Reserved servers make no plans and know no limit: they are told how each plan is cut, and make room when they are told
to (`tell`), at the same exchange as trainers do.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from deepspeed_cad.errors import CADError, CADPeerError
from deepspeed_cad.exchange.landing import NoRoomError
from deepspeed_cad.exchange.transport import Transport
from deepspeed_cad.layout import Tick
from deepspeed_cad.planner.plan import HeadShape, Plan
from deepspeed_cad.schedule import Schedule
from deepspeed_cad.schedule.waves import Cut, Room, Waves, room_needed, schedule_waves, waves_within, with_headroom

SMALLER = 0.6
"""Share of what did not fit that is tried next: few tries, each of which costs a meeting of all ranks."""
LSE_BYTES = 4
"""At least: fp64 has more."""


class RowBytes(NamedTuple):
    """What travels of one query row and of one key row of a head group, in the pass that has more."""

    out: tuple[int, int]
    back: tuple[int, int]


def rows_of_layers(shape: HeadShape) -> RowBytes:
    """In a layer; a server receives Q, K and V again with dO."""
    q, o, lse, kv = _bytes_of(shape)
    # Forward: Q and, beside servers, sinks, which are as wide as LSE. Backward: dO and Q.
    return RowBytes((max(q + lse, q + o), kv), (max(q, o + lse), kv))


def rows_of_ticks(shape: HeadShape) -> RowBytes:
    """In a pipeline, where a backward takes all that it needs along: dO, Q, O and LSE."""
    q, o, lse, kv = _bytes_of(shape)
    return RowBytes((q + 2 * o + lse, kv), (max(q, o + lse), kv))


def _bytes_of(shape: HeadShape) -> tuple[int, int, int, int]:
    lse = max(LSE_BYTES, shape.bytes_per_element) * shape.heads_per_group
    return shape.query_bytes, shape.output_bytes, lse, shape.key_value_bytes


@dataclass(eq=False)
class ExchangeMemory:
    """What the ticks of one micro-batch may need at once, the same on every rank."""

    limit: float = math.inf
    """Bytes on each rank for each nano-batch; infinite where there is no limit."""
    source: str = ""
    most: float = 0.0
    rows: Callable[[HeadShape], RowBytes] = rows_of_layers
    granularity: int = 128
    """Rows: where head groups have to be cut, blocks are multiples of it."""
    parts: int = 1
    needed: Callable[[float], None] = lambda size: None
    """Hears what a tick needs."""
    lacked: Callable[[float], None] = lambda limit: None
    """Hears that there is not more than this."""

    def waves(self, tick: Tick, plan: Plan, rank: int, window: int | None, shape: HeadShape) -> Waves:
        """This rank's part of a plan, in as many waves as fit. Raises CADError on all ranks where none do."""
        cut = Cut(plan.waves, granularity=self.granularity)
        if math.isinf(self.limit):
            return Waves(cut, schedule_waves(tick, plan.tasks, rank, shape.groups, window, cut))
        return waves_within(tick, plan.tasks, rank, shape.groups, window, cut, self.room(shape))

    def make_room(
        self, transport: Transport, schedules: tuple[Schedule, ...], shape: HeadShape, nano_batch: int,
        again: Callable[[], tuple[Schedule, ...]], tell: Callable[[Room], None] = lambda room: None,
    ) -> tuple[Schedule, ...]:  # fmt: skip
        """Have memory for a tick, in smaller waves, which `again` makes, where a rank has too little. Collective.

        `tell` is called before each try: ranks that only follow are to take part in it."""
        while True:
            room = self.room(shape)
            size, _ = room_needed(room, [(one.served_rows, one.landed_rows) for one in schedules])
            room = with_headroom(room, size)
            tell(room)
            try:
                transport.make_room(schedules, room, nano_batch)
            except NoRoomError as error:
                # All ranks are here: none has started this tick, and each keeps the memory that it had.
                if not size:
                    # Nothing lands: what is missing is the least that a transport has, and no cut needs less.
                    raise CADError(
                        f"{error} Nothing is exchanged in this tick, so smaller waves do not help"
                    ) from error
                self.limit, self.source, self.most = SMALLER * size, "what is free", 0.0
                self.lacked(self.limit)
                try:
                    schedules = again()
                except CADPeerError:
                    # A server has died that was to be told: memory is not why.
                    raise
                except CADError as why:
                    raise CADError(f"{error} Smaller waves do not help: {why}") from error
            else:
                self.needed(size * room.headroom)
                return schedules

    def room(self, shape: HeadShape) -> Room:
        return Room(self.limit, *self.rows(shape), self.source, self.parts, most=self.most)


NO_LIMIT = ExchangeMemory()
