"""Memory for the exchanges of one micro-batch: in how many waves its ticks go so that what lands fits.

In: the limit that all ranks agreed on, plans. Out: schedules that fit. The limit may shrink while a micro-batch runs,
where some rank has less memory than was thought: every rank learns that at the same exchange, from the same words.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from deepspeed_cad.errors import CADError
from deepspeed_cad.exchange.landing import NoRoomError
from deepspeed_cad.exchange.transport import Transport
from deepspeed_cad.layout import Tick
from deepspeed_cad.planner.plan import HeadShape, Plan
from deepspeed_cad.schedule import Schedule
from deepspeed_cad.schedule.room import Room, room_needed, too_much
from deepspeed_cad.schedule.waves import Cut, schedule_waves, schedule_within

SMALLER = 0.6
"""Share of what did not fit that is tried next: few tries, each of which costs a meeting of all ranks."""
LSE_BYTES = 4


@dataclass(eq=False)
class ExchangeMemory:
    """What the ticks of one micro-batch may need at once, the same on every rank."""

    limit: float = math.inf
    """Bytes on each rank for each nano-batch; infinite where there is no limit."""
    source: str = ""
    """Where it comes from, for an error."""
    keep: bool = False
    """Whether servers keep Q, K and V, so that they do not travel again in the backward."""
    granularity: int = 128
    """Rows: where head groups have to be cut, blocks are multiples of it."""
    parts: int = 1
    """Nano-batches."""
    needed: Callable[[float], None] = lambda size: None
    """Hears what a tick needs."""
    lacked: Callable[[float], None] = lambda limit: None
    """Hears that there is not more than this."""
    whole: str = ""
    """Why no tick goes in waves, for an error; empty where it may."""

    def schedules(
        self, tick: Tick, plan: Plan, rank: int, window: int | None, shape: HeadShape
    ) -> tuple[Schedule, ...]:
        """This rank's part of a plan, in as many waves as fit. Raises CADError on all ranks where none do."""
        cut = Cut(plan.waves, granularity=self.granularity)
        if math.isinf(self.limit):
            return schedule_waves(tick, plan.tasks, rank, shape.groups, window, cut)
        if self.whole:
            schedules = schedule_waves(tick, plan.tasks, rank, shape.groups, window, cut)
            room = self.room(shape)
            size, fullest = room_needed(room, [(one.served_rows, one.landed_rows) for one in schedules])
            if size > room.limit:
                raise too_much(room, size, fullest, self.whole)
            self.needed(size)
            return schedules
        return schedule_within(tick, plan.tasks, rank, shape.groups, window, cut, self.room(shape))

    def make_room(
        self,
        transport: Transport,
        schedules: tuple[Schedule, ...],
        shape: HeadShape,
        nano_batch: int,
        again: Callable[[], tuple[Schedule, ...]],
    ) -> tuple[Schedule, ...]:
        """Have memory for a tick, in smaller waves (`again` makes them) where a rank has too little. Collective."""
        if self.whole:
            return schedules
        while True:
            room = self.room(shape)
            size, _ = room_needed(room, [(one.served_rows, one.landed_rows) for one in schedules])
            try:
                transport.make_room(schedules, room, nano_batch)
            except NoRoomError as error:
                # All ranks are here: none has started this tick, and each keeps the memory that it had.
                self.limit, self.source = SMALLER * size, "what is free"
                self.lacked(self.limit)
                try:
                    schedules = again()
                except CADError as why:
                    raise CADError(f"{error} Smaller waves do not help: {why}") from error
            else:
                self.needed(size)
                return schedules

    def room(self, shape: HeadShape) -> Room:
        """The limit, and what travels of one row in the pass that has more."""
        q, o, kv = shape.query_bytes, shape.output_bytes, shape.key_value_bytes
        lse = LSE_BYTES * shape.heads_per_group
        out = (max(q, o), kv) if self.keep else (q + o, kv)
        return Room(self.limit, out, (max(q, o + lse), kv), self.source, self.parts)


NO_LIMIT = ExchangeMemory()
