"""A foreseen step: where its seconds go, what it moves, what it holds; and how far predictions were off.

In: what a mode found; compared.json, which benchmarks/compared.py makes of the measured runs. Out: `Foreseen`, plain
numbers that tables, pictures and JSON are made from; what a star, a ± and "fits" stand on.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from deepspeed_cad.planner.plan import Plan

COMPARED = Path(__file__).parent / "compared.json"


class Run(NamedTuple):
    """What runs that were compared with their predictions have in common."""

    machine: str
    mode: str
    ranks: int
    sharding: str
    pipeline: int


_found = json.loads(COMPARED.read_text(encoding="utf-8"))
RUNS = frozenset(Run(*run) for run in _found["runs"])
RATIO: float = _found["ratio"]
"""How far a foreseen ratio of two modes in place was from the measured one, at most."""
MEMORY: float = _found["memory"]
"""The same of a GPU's peak memory."""
SERVERS: tuple[float, float] = tuple(_found["servers"])
"""Tokens/s of reserved servers over CAD in place, as measured: the least and the most."""
OUTSIDE = 3.0 * 2**30
"""Bytes of a GPU that CUDA and NCCL take beside torch, assumed: a context of half a GiB, and communicators, of which
users report 1.6 GB for the first and 0.5 to 0.7 GB for each further one (github.com/NVIDIA/nccl, issues 864, 964)."""


def needed_bytes(peak: float) -> float:
    """Of a GPU for a foreseen peak: with the largest error that was found, and what torch does not allocate."""
    return peak * (1.0 + MEMORY) + OUTSIDE


class Seconds(NamedTuple):
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
        return sum(self)


@dataclass(frozen=True)
class Foreseen:
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
    """Bytes that torch has allocated at the fullest rank."""
    state: float = 0.0
    """Of them, weights, gradients and optimizer: what does not depend on the tokens."""
    offloadable: float = 0.0
    """Of them, what an optimizer on the host takes away."""
    capacity: float = 0.0
    """Bytes that a rank has."""
    degree: int = 1
    """Ranks that share a row (Ulysses, context parallelism), or that are reserved (CAD)."""
    variant: str = ""
    """What is special about it, for tables."""
    measured: bool = False
    """Whether a run of this mode and size was compared with its prediction."""
    repeats: bool = True
    """Whether the recompute of activation checkpointing repeats attention."""
    mfu: float = 0.0
    """Floating-point operations of the model, a recompute not counted, over what the GPUs' data sheet has."""
    steps: tuple[float, ...] = ()
    """Seconds of each step."""
    plans: tuple[Plan, ...] = ()
    """Of CAD in place, of the first micro-batch of each step; in pipelines, of the first round of all stages."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.ranks / self.seconds.total

    @property
    def idle(self) -> float:
        """Share of the step in which the mean rank does no work of the model."""
        return 1.0 - (self.seconds.non_attention + self.seconds.attention + self.seconds.optimizer) / self.seconds.total

    @property
    def needed(self) -> float:
        """Bytes that the fullest rank must have."""
        return needed_bytes(self.peak)

    @property
    def fits(self) -> bool:
        return self.needed <= self.capacity

    def to_json(self) -> dict[str, Any]:
        found = vars(self) | {
            "seconds": self.seconds._asdict(),
            "step_seconds": self.seconds.total,
            "tokens_per_second_per_gpu": self.tokens_per_second,
            "idle_share": self.idle,
            "needed": self.needed,
            "fits": self.fits,
        }
        del found["plans"]
        return found


def mean(found: Sequence[Foreseen]) -> Foreseen:
    """One for several steps: means, and the fullest memory."""
    count = len(found)
    return replace(
        found[0],
        seconds=Seconds(*(sum(parts) / count for parts in zip(*(one.seconds for one in found)))),
        **{name: sum(getattr(one, name) for one in found) / count for name in ("tokens", "inside", "between")},
        peak=max(one.peak for one in found),
        steps=tuple(one.seconds.total for one in found),
        plans=tuple(plan for one in found for plan in one.plans),
    )
