"""What the leader tells reserved servers: of micro-batches, of their plans, and of every exchange before it starts.

Servers are told plans and do not make them: then nothing that a plan depends on (costs, speeds) has to be equal
there too. Nor do they know how much memory there may be: they are told the cut that trainers found, and make the same
waves of the same tasks. Each order names its wave. Whether both ends mean the same is compared in every exchange,
because its identity covers the wave and the schedule.

In: plans and calls of trainer 0. Out: frames to all servers, in the order of its exchanges, which is that of all ranks.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple
from typing import Any

import numpy as np

from deepspeed_cad.attention.microbatch import PlanKey
from deepspeed_cad.attention.setup import CallOrders, Modes
from deepspeed_cad.kernels.interface import KernelNeed, MaskRule
from deepspeed_cad.layout import Ints, Layout
from deepspeed_cad.planner.plan import Plan
from deepspeed_cad.schedule.waves import Cut, Room

OPEN, PLAN, ROOM, DISPATCH, RETURN, RELEASE = "open", "plan", "room", "dispatch", "return", "release"
REGROUP = "regroup"
"""Servers have changed: open another group with these ranks."""
TRACE = "trace"
"""The next micro-batch is about to be trained: record it."""
LEAVE = "leave"
"""Of any trainer: it needs no server any more."""
BUSY, FAILED = "busy", "failed"
"""What a server says: that it is there, and how long it attended; or that it ends."""

Tell = Callable[[dict[str, Any], tuple[Ints, ...]], None]
"""Carries a frame to every server, in this order; raises CADPeerError where one has died, if that ends all."""


class Leader:
    """Trainer 0 as servers see it."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        # Filled where garbage is collected, which may be inside of any call: nothing is sent from there.
        self._over: deque[int] = deque()

    def open(self, turn: int, layout: Layout, cut: Ints | None) -> MicroBatchTold:
        """A micro-batch that was gathered; `cut`: where each rank's rows are cut into nano-batches."""
        at = np.zeros(0, np.int64) if cut is None else cut
        self.tell({"do": OPEN, "turn": turn}, (layout.segments.to_array(), layout.tokens, at))
        told = MicroBatchTold(self, turn)
        # Alive as long as the micro-batch or one of its calls is: after that no backward can come.
        weakref.finalize(told, self._over.append, turn).atexit = False
        return told

    def tell(self, head: dict[str, Any], arrays: tuple[Ints, ...] = ()) -> None:
        """One frame, behind what is over by now."""
        over: list[int] = []
        with suppress(IndexError):  # none is left: two threads come here, that of look-ahead and that which trains
            while True:
                over.append(self._over.popleft())
        if over:
            self._tell({"do": RELEASE, "turns": over}, ())
        self._tell(head, arrays)


class MicroBatchTold:
    """See attention.microbatch.MicroBatchOrders."""

    def __init__(self, leader: Leader, turn: int) -> None:
        self._leader, self.turn = leader, turn

    def plan(self, key: PlanKey, nano_batch: int, plan: Plan, cut: Cut) -> None:
        head = {"do": PLAN, "turn": self.turn, "key": key_to_list(key), "nano_batch": nano_batch, "cut": list(cut)}
        self._leader.tell(head, (plan.tasks,))

    def room(self, key: PlanKey, nano_batch: int, room: Room) -> None:
        size = {"out": room.out, "back": room.back, "headroom": room.headroom}
        self.tell({"do": ROOM, "key": key_to_list(key), "nano_batch": nano_batch, **size})

    def call(
        self, place: tuple[int, int], key: PlanKey, need: KernelNeed, rule: MaskRule, modes: Modes, has_sinks: bool
    ) -> CallOrders:
        layer, nano_batch = place
        kind = {
            "key": key_to_list(key),
            "dtype": str(need.dtype).removeprefix("torch."),
            "scale": rule.scale,
            "softcap": rule.softcap,
            "deterministic": need.deterministic,
            "returns": modes.returns,
            "sinks": has_sinks,
        }

        def tell(is_return: bool, backward: bool, wave: int) -> None:
            head = {"do": RETURN if is_return else DISPATCH, "layer": layer, "nano_batch": nano_batch}
            first = not (is_return or backward or wave)
            self.tell({**head, "backward": backward, "wave": wave, **(kind if first else {})})

        return tell

    def tell(self, head: dict[str, Any]) -> None:
        self._leader.tell({**head, "turn": self.turn})


def key_to_list(key: PlanKey) -> list[int | None]:
    """Window, then the fields of the head shape."""
    return [key.window, *astuple(key.shape)]
