"""The ranks that run attention at present, and what plans must know of them: one value, replaced whole.

In: groups, transport and speeds as they were opened. Out: `Crew`, which a micro-batch keeps as it was planned with.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from deepspeed_cad.attention.call import Calls
from deepspeed_cad.attention.layer import MicroBatchOrders
from deepspeed_cad.attention.microbatch import MicroBatch
from deepspeed_cad.exchange.transport import Transport
from deepspeed_cad.layout import Ints, Layout
from deepspeed_cad.planner.plan import Floats


@dataclass(frozen=True, eq=False)
class Servers:
    """Ranks behind the trainers that only serve."""

    count: int
    """There are now; 0 where all of them are lost."""
    at_start: int
    """That the job began with. Cuts into nano-batches are made for these: trainers learn of a change at different
    moments, and a cut must be the same on all of them."""
    open: Callable[[int, Layout, Ints | None], MicroBatchOrders] | None = None
    """Tells the servers of a micro-batch by its turn, its layout and its cut; None where another rank does."""


@dataclass(frozen=True, eq=False)
class Crew:
    """Trainers, then reserved servers."""

    trainers: int
    transport: Transport | None = None
    hosts: np.ndarray | None = None
    """[ranks] number of each rank's host; None where there is one rank."""
    speeds: Floats | None = None
    """[ranks] in attention, beside what costs say; None: all are equal."""
    servers: Servers | None = None
    generation: int = 0
    calls: Callable[[Callable[[MicroBatch], None]], Calls] = lambda plan_again: Calls()
    """Makes the attention calls of a micro-batch, which its argument plans again where servers have changed."""

    @property
    def ranks(self) -> int:
        return self.trainers + (0 if self.servers is None else self.servers.count)

    @property
    def several_hosts(self) -> bool:
        return self.hosts is not None and len(np.unique(self.hosts)) > 1

    def widen(self, layout: Layout, servers: int | None = None) -> Layout:
        """A layout of the trainers, with servers behind them that have no tokens; None: as many as there are."""
        count = self.ranks - self.trainers if servers is None else servers
        return Layout(layout.ranks + count, layout.segments, np.append(layout.tokens, np.zeros(count, np.int64)))

    def tell(self, turn: int, layout: Layout, cut: Ints | None) -> MicroBatchOrders | None:
        """Tell the servers of a micro-batch; None where there are none, or another rank does."""
        return None if self.servers is None or self.servers.open is None else self.servers.open(turn, layout, cut)
