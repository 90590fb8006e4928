"""A foreseen step: where its seconds go, what it moves, what it holds.

In: what a mode found. Out: `Foreseen`, plain numbers that tables, pictures and JSON are made from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple


class Seconds(NamedTuple):
    """Where the seconds of a step go, on the mean rank."""

    non_attention: float = 0.0
    """Everything of the model but core attention, recompute included."""
    attention: float = 0.0
    exchange: float = 0.0
    """Of CAD, Ulysses or context parallelism, where nothing hides it."""
    collectives: float = 0.0
    """Of tensor parallelism, weights and gradients, where nothing hides them."""
    optimizer: float = 0.0
    waiting: float = 0.0
    """For ranks that have more attention, and for pipeline stages before and after."""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self)


@dataclass(frozen=True)
class Foreseen:
    """What a mode does with a step, a mean over steps."""

    mode: str
    seconds: Seconds
    tokens: float
    """Of a step, over all ranks."""
    ranks: int
    inside: float = 0.0
    """Bytes of attention's exchanges that a rank sends to ranks of its host in a step, mean over ranks."""
    between: float = 0.0
    """The same to other hosts."""
    peak: float = 0.0
    """Bytes at the fullest rank."""
    state: float = 0.0
    """Of them, weights, gradients and optimizer: what does not depend on the tokens."""
    capacity: float = 0.0
    """Bytes that a rank has."""
    degree: int = 1
    """Ranks that share a row (Ulysses, context parallelism), or that are reserved (CAD)."""
    variant: str = ""
    """What is special about it, for tables."""
    measured: bool = True
    """Whether benchmarks/results has runs of this mode that predictions were compared with."""
    steps: tuple[float, ...] = ()
    """Seconds of each step."""

    @property
    def tokens_per_second(self) -> float:
        """Per GPU."""
        return self.tokens / self.ranks / self.seconds.total

    @property
    def idle(self) -> float:
        """Share of the step in which the mean rank does no work of the model."""
        busy = self.seconds.non_attention + self.seconds.attention + self.seconds.optimizer
        return 1.0 - busy / self.seconds.total

    @property
    def fits(self) -> bool:
        """Whether the fullest rank has the memory."""
        return self.peak <= self.capacity

    def to_json(self) -> dict[str, Any]:
        """Everything, with what is derived."""
        return asdict(self) | {
            "seconds": self.seconds._asdict(),
            "step_seconds": self.seconds.total,
            "tokens_per_second_per_gpu": self.tokens_per_second,
            "idle_share": self.idle,
            "fits": self.fits,
        }


def mean(found: Sequence[Foreseen]) -> Foreseen:
    """One for several steps: means, and the fullest memory."""
    count = len(found)
    return replace(
        found[0],
        seconds=Seconds(*(sum(parts) / count for parts in zip(*(one.seconds for one in found)))),
        **{name: sum(getattr(one, name) for one in found) / count for name in ("tokens", "inside", "between")},
        peak=max(one.peak for one in found),
        steps=tuple(one.seconds.total for one in found),
    )
