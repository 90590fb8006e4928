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


def forward_seconds(parts: list[Part], layers: int, before: float) -> float:
    """Of all layers; `before`: the share of a layer's part that is not attention that lies before its attention."""
    return _seconds(parts, layers, "forward", before)


def backward_seconds(parts: list[Part], layers: int, before: float) -> float:
    """The mirror: a trainer runs its own tasks of a part as soon as that is sent, and the last part comes first."""
    return _seconds(parts, layers, "backward", 1.0 - before)


def _seconds(parts: list[Part], layers: int, way: str, first: float) -> float:
    """`first`: the share of what is not attention in a part's layer that runs before that part is sent."""
    backward = way == "backward"
    numbers = range(len(parts))[::-1] if backward else range(len(parts))
    other, own, served = (
        [getattr(getattr(one, kind), way) for one in parts] for kind in ("non_attention", "own", "served")
    )
    now = np.zeros(len(own[0]))
    free = np.zeros(
        len(served[0])
    )  # [servers] when each one is done with what reached it, in the order in which it did
    home = [0.0] * len(parts)  # when results of each part are there

    def serve(number: int) -> None:
        """A part leaves trainers: servers run each wave of it when all of that is there."""
        nonlocal free
        out, back = parts[number].out[backward], parts[number].back[backward]
        waves, home[number] = parts[number].waves, 0.0
        for wave in range(waves):
            begun = np.maximum(free, now.max() + out * (wave + 1) / waves)
            free = begun + served[number] / waves + (WAVE_SECONDS if wave else 0.0)
            home[number] = max(home[number], float(free.max(initial=0.0))) + back / waves

    def attend(number: int) -> Floats:
        done = now + own[number]
        home[number] = max(home[number], float(done.max()))
        return done

    for layer in range(layers + 1):
        for number in numbers:
            if layer:
                now = np.maximum(now if backward else attend(number), home[number])
            now = now + other[number] * (first if not layer else 1.0 - first if layer == layers else 1.0)
            if layer < layers:
                serve(number)
                now = attend(number) if backward else now
    return float(now.max())
