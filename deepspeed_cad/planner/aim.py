"""What a planner core is asked to reach (`Aim`): how even, and across which borders; and what it finds (`Solution`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from deepspeed_cad.layout import Ints
from deepspeed_cad.planner.flows import Flows
from deepspeed_cad.planner.plan import Floats, PlanInput


class Units(IntEnum):
    """Between whom an `Aim` moves only what brings them down to a level."""

    NONE = 0
    """All ranks are one pool and are brought within the tolerance."""
    RANKS = 1
    """Ranks above the level give what is above, and nothing else moves."""
    HOSTS = 2
    """Hosts above the level give what is above, then each host's ranks are brought within the tolerance."""
    HOSTS_LAST = 3
    """Each host's ranks are brought within the tolerance before, and again after."""


@dataclass(frozen=True)
class Aim:
    """What a plan shall reach."""

    tolerance: float
    """How far ranks of one pool may end from their mean, as a share of it."""
    units: Units = Units.NONE
    level: float = 0.0
    """Finish time down to which units give; those that take end below it. Not with `Units.NONE`."""
    kept: int = -1
    """Ranks, the first of every document on many, that begin with their own rows while all other rows begin dealt out
    by head groups (spread.py); -1: all rows begin at home."""


@dataclass(frozen=True, eq=False)
class Solution:
    """What a core finds: tasks, and per rank the work (not divided by speed) and what moves."""

    tasks: Ints
    work: Floats
    work_before: Floats
    flows: Flows


Solve = Callable[[PlanInput, Aim], Solution]


def per_rank(values: Floats | None, problem: PlanInput, default: float) -> Floats:
    """One float for each rank."""
    return np.full(problem.tick.ranks, default) if values is None else np.ascontiguousarray(values, np.float64)
