"""When ranks begin to attend in a tick: what is not attention takes some of them longer than others.

In: seconds per token outside attention (feedback/non_attention.py), the rows of a tick. Out: `Starts`, with which a
plan makes whole layers even and not attention alone. In place: planner/begin.py; here beside reserved servers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from deepspeed_cad.attention.layer import Starts
from deepspeed_cad.cost import CostModel
from deepspeed_cad.layout import Layout, Tick
from deepspeed_cad.planner.alternation import alternate
from deepspeed_cad.planner.plan import Floats


class Beside(NamedTuple):
    """What trainers compute while servers attend."""

    each: Floats
    """[trainers] seconds per token of one layer outside attention."""
    layout: Layout
    """Of trainers and servers, the whole micro-batch."""
    speed: Floats | None = None
    """[ranks] of attention; None: all are equal."""

    def seconds(self, tokens: np.ndarray) -> Floats:
        """[ranks] for so many tokens of each rank."""
        idle = self.layout.ranks - len(self.each)
        return np.append(self.each, np.zeros(idle)) * tokens

    def starts(self, tick: Tick, cost: CostModel, groups: int, window: int | None) -> Starts:
        """What each rank computes while this nano-batch is attended, and how late its results may come."""
        segments, ranks = self.layout.segments, self.layout.ranks
        whole, own = (float(cost.of(rows.begin, rows.end, window).sum()) * groups for rows in (segments, tick.query))
        turns = alternate(
            max(whole - own, 0.0),
            self.seconds(tick.query_tokens),
            np.ones(ranks) if self.speed is None else self.speed,
            np.arange(ranks) >= len(self.each),
        )
        return Starts(self.seconds(self.layout.tokens - tick.query_tokens), turns)
