"""Two parts of a micro-batch that alternate beside reserved servers: when trainers are done (docs/interleave.md).

In: of each part, seconds of one layer at every trainer and server, and of its transfers. Out: seconds of all layers,
forward and backward. Trainers go at their own pace from one meeting to the next: a part of a layer is home when the
last server and the last trainer that ran tasks of it are done, and a trainer with less besides runs more of
them. One part alone, where a micro-batch cannot be cut, is the same without anything beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deepspeed_cad.forecast.attention_seconds import Both, Floats
from deepspeed_cad.planner.constants import WAVE_SECONDS


@dataclass(frozen=True, eq=False)
class Part:
    """Seconds of one layer for one part."""

    non_attention: Both
    """[trainers]: with the recompute in backward."""
    own: Both
    """[trainers]: tasks that trainers run themselves."""
    served: Both
    """[servers]: tasks that servers run."""
    out: tuple[float, float]
    """Until what servers wait for has arrived, forward and backward."""
    back: tuple[float, float]
    """Until what they found has arrived."""
    waves: int = 1
    """In how many equal parts it goes out, is served and comes back."""


class _Meetings:
    """When results of each part are home; servers run what reaches them in the order in which it does."""

    def __init__(self, parts: list[Part]) -> None:
        self.free = np.zeros(len(parts[0].served.forward))
        """[servers] when each one is done with what reached it."""
        self.home = [0.0] * len(parts)

    def serve(self, number: int, sent: Floats, seconds: Floats, trip: tuple[float, float], waves: int) -> None:
        """A part leaves trainers (`sent`: [trainers]): servers run each wave of it when all of that is there."""
        home = 0.0
        for wave in range(waves):
            begun = np.maximum(self.free, sent.max() + trip[0] * (wave + 1) / waves)
            self.free = begun + seconds / waves + (WAVE_SECONDS if wave else 0.0)
            home = max(home, float(self.free.max(initial=0.0))) + trip[1] / waves
        self.home[number] = home

    def attend(self, number: int, now: Floats, own: Floats) -> Floats:
        """Trainers run their tasks of a part."""
        done = now + own
        self.home[number] = max(self.home[number], float(done.max()))
        return done


def forward_seconds(parts: list[Part], layers: int, before: float) -> float:
    """Of all layers; `before`: the share of a layer's part that is not attention that lies before its attention."""
    meetings, now = _Meetings(parts), np.zeros(len(parts[0].own.forward))

    def send(number: int, one: Part) -> None:
        meetings.serve(number, now, one.served.forward, (one.out[0], one.back[0]), one.waves)

    for number, one in enumerate(parts):
        now = now + before * one.non_attention.forward
        send(number, one)
    for layer in range(layers):
        last = layer == layers - 1
        for number, one in enumerate(parts):
            now = np.maximum(meetings.attend(number, now, one.own.forward), meetings.home[number])
            now = now + one.non_attention.forward * (1.0 - before if last else 1.0)
            if not last:
                send(number, one)
    return float(now.max())


def backward_seconds(parts: list[Part], layers: int, before: float) -> float:
    """The mirror: a trainer runs its own tasks of a part as soon as that is sent, and the last part comes first."""
    meetings, now = _Meetings(parts), np.zeros(len(parts[0].own.backward))
    mirrored = list(enumerate(parts))[::-1]

    def send(number: int, one: Part) -> Floats:
        meetings.serve(number, now, one.served.backward, (one.out[1], one.back[1]), one.waves)
        return meetings.attend(number, now, one.own.backward)

    for number, one in mirrored:
        now = now + one.non_attention.backward * (1.0 - before)
        now = send(number, one)
    for layer in range(layers):
        last = layer == layers - 1
        for number, one in mirrored:
            now = np.maximum(now, meetings.home[number]) + one.non_attention.backward * (before if last else 1.0)
            if not last:
                now = send(number, one)
    return float(now.max())
