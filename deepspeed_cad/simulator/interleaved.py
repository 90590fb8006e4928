"""Two parts of a micro-batch that alternate beside reserved servers: when trainers are done (docs/interleave.md).

In: of each part, seconds of one layer at every trainer and server, and of its transfers. Out: seconds of all layers,
forward and backward. Trainers meet in every exchange, so the slowest one counts. One part alone, where a micro-batch
cannot be cut, is the same without anything beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed_cad.simulator.attention import Both, Floats


@dataclass(frozen=True, eq=False)
class Part:
    """Seconds of one layer for one part."""

    linear: Both
    """[trainers]: all but attention, with the recompute in backward."""
    own: Both
    """[trainers]: tasks that trainers run themselves."""
    served: Both
    """[servers]: tasks that servers run."""
    out: tuple[float, float]
    """Until what servers wait for has arrived, forward and backward."""
    back: tuple[float, float]
    """Until what they found has arrived."""


class _Servers:
    """Run what reaches them in the order in which it does."""

    def __init__(self, count: int) -> None:
        self.free: Floats | float = 0.0
        self.done = [0.0] * count

    def get(self, number: int, sent: float, seconds: Floats, trip: tuple[float, float]) -> None:
        """A part leaves trainers; results are home at `done`."""
        arrived = sent + trip[0]
        self.free = seconds + [max(arrived, float(one)) for one in (self.free + 0.0 * seconds)]
        self.done[number] = float(self.free.max()) + trip[1]


def forward_seconds(parts: list[Part], layers: int, before: float) -> float:
    """Of all layers; `before`: the share of a layer's linear part that lies before its attention."""
    servers, now = _Servers(len(parts)), 0.0

    def send(number: int, one: Part) -> None:
        servers.get(number, now, one.served.forward, (one.out[0], one.back[0]))

    for number, one in enumerate(parts):
        now += before * float(one.linear.forward.max())
        send(number, one)
    for layer in range(layers):
        last = layer == layers - 1
        for number, one in enumerate(parts):
            now = max(now + float(one.own.forward.max()), servers.done[number])
            now += float(one.linear.forward.max()) * (1.0 - before if last else 1.0)
            if not last:
                send(number, one)
    return now


def backward_seconds(parts: list[Part], layers: int, before: float) -> float:
    """The mirror: a trainer runs its own tasks of a part as soon as that is sent, and the last part comes first."""
    servers, now = _Servers(len(parts)), 0.0
    mirrored = list(enumerate(parts))[::-1]

    def send(number: int, one: Part) -> float:
        servers.get(number, now, one.served.backward, (one.out[1], one.back[1]))
        return now + float(one.own.backward.max())

    for number, one in mirrored:
        now += float(one.linear.backward.max()) * (1.0 - before)
        now = send(number, one)
    for layer in range(layers):
        last = layer == layers - 1
        for number, one in mirrored:
            now = max(now, servers.done[number]) + float(one.linear.backward.max()) * (before if last else 1.0)
            if not last:
                now = send(number, one)
    return now
