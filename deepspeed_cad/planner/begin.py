"""When ranks begin to attend: what is not attention takes some of them longer than others.

Such a rank should attend less, and whoever is early more. `begin_in_place` gives base loads, with which a plan makes
whole layers even and not attention alone; `alternate` what is known where two ticks take turns beside reserved servers
(docs/interleave.md). Training and the forecast ask both alike.
"""

from __future__ import annotations

import numpy as np

from deepspeed_cad.cost import CostModel
from deepspeed_cad.layout import Tick
from deepspeed_cad.planner.finish import common_finish
from deepspeed_cad.planner.plan import Alternation, Bools, Floats


def alternate(other_work: float, linear: Floats, speed: Floats, servers: Bools) -> Alternation:
    """How late what reserved servers found in a tick may come home.

    A trainer hands over one tick, then runs its tasks and linear layers of the other, and its own tasks of the first;
    in backward those come right after it is handed over:

        forward    hands A over │ own B │ linear B, hands B over │ own A │ linear A …
        backward   hands A over, own A │ linear B, hands B over, own B │ linear A …
        server              B, as far as it came │ A …                   │ B …

    So A goes out, is served and comes home while all of that runs. A round takes as long as both ticks together. Of it,
    A has everything but the linear layers that follow on it: beyond its own tick, which finish.py counts, that is the
    other tick less these linear layers, those of the slowest trainer, because servers begin when the last trainer has
    handed over. That needs a transport on which results come home while the next tick goes out (Transport.two_ways).
    The figures are of forward and backward together, and shared out as attention is.

    Args:
        other_work: attention of the other tick, of all ranks, at speed 1.
        linear: [ranks] linear layers of this tick's rows, which run while the other tick is attended.
        speed: [ranks] of attention; 0: runs none.
        servers: [ranks] which ones only serve.
    """
    slowest = float(linear.max(initial=0.0))
    other = max(float(common_finish(np.array([other_work]), linear, speed)[0]), slowest)
    return Alternation(servers, other - slowest)


def begin_in_place(
    seconds: Floats, tick: Tick, cost: CostModel, groups: int, window: int | None, speeds: Floats | None = None
) -> Floats | None:
    """[ranks] seconds when every rank begins, in a tick that no other alternates with; None where all begin together.

    An early rank runs attention of its own until the keys and queries of the late ones arrive. Where it has too little
    of that it is idle for the rest, and a plan that counted on this time would be late. Rows that read keys of a late
    rank fill no time.

    Args:
        seconds: [ranks] per token of one layer outside attention, forward and backward.
        tick: whose attention is planned.
        cost: of attention, in seconds too.
        groups: head groups.
        window: of the layers, None without one.
        speeds: [ranks] in attention, beside what costs say; None: all are equal.
    """
    before = seconds * tick.query_tokens
    speed = np.ones(tick.ranks) if speeds is None else speeds
    runs = np.where(speed > 0.0, speed, np.inf)
    rows = tick.query
    work = cost.of(rows.begin, rows.end, window) * groups
    own = np.bincount(rows.rank, work, tick.ranks)
    late = before + own / runs > common_finish(own.sum(keepdims=True), before, speed)
    if not late.any():
        return None
    # When the last keys are there that the rows of a segment read, on whatever ranks.
    keys = before[rows.rank]
    documents, ranks = rows.count_ranks()
    for document in documents[ranks > 1]:
        parts = np.flatnonzero(rows.document == document)
        parts = parts[np.argsort(rows.begin[parts])]
        keys[parts] = np.maximum.accumulate(keys[parts])
    free = keys <= before[rows.rank]
    meanwhile = np.bincount(rows.rank[free], work[free], tick.ranks) / runs
    there = np.full(tick.ranks, before[late].max())
    np.maximum.at(there, rows.rank, keys)
    begin = np.maximum(before, there - meanwhile)
    begin -= begin.min()
    return begin if begin.any() else None
