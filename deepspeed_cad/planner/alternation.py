"""Alternation: how late what reserved servers found may come, where two ticks take turns (docs/interleave.md).

In: what every rank has to do in the other tick. Out: `Alternation`, which the model of transfers heeds (finish.py).

A trainer hands over one tick, then runs its tasks and linear layers of the other, and its own tasks of the first; in
backward those come right after it is handed over:

    forward    hands A over │ own B │ linear B, hands B over │ own A │ linear A …
    backward   hands A over, own A │ linear B, hands B over, own B │ linear A …
    server              B, as far as it came │ A …                   │ B …

So A goes out, is served and comes home while all of that runs, and a server that is busy with B when A arrives loses
nothing. A round takes as long as both ticks together. Of it, A has everything but the linear layers that follow on it:
beyond its own tick, which finish.py counts, that is the other tick less these linear layers, those of the slowest
trainer, because servers begin when the last trainer has handed over. That needs a transport on which results come home
while the next tick goes out (Transport.two_ways). The figures are those of forward and backward together, and are
shared out as attention is; without checkpointing linear layers are rather more of a forward.
"""

from __future__ import annotations

import numpy as np

from deepspeed_cad.planner.finish import common_finish
from deepspeed_cad.planner.plan import Alternation, Bools, Floats


def alternate(other_work: float, linear: Floats, speed: Floats, servers: Bools) -> Alternation:
    """How late results of a tick may come.

    Args:
        other_work: attention of the other tick, of all ranks, at speed 1.
        linear: [ranks] linear layers of this tick's rows, which run while the other tick is attended.
        speed: [ranks] of attention; 0: runs none.
        servers: [ranks] which ones only serve.
    """
    other = max(float(common_finish(np.array([other_work]), linear, speed)[0]), float(linear.max(initial=0.0)))
    return Alternation(servers, other - float(linear.max(initial=0.0)))
