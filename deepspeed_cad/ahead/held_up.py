"""Held up: ranks that cannot begin their attention because they read keys of a rank that is late.

In: how late each rank is, the rows of a tick. Out: when each rank begins, as far as plans care. A rank whose documents
lie on it alone works on while a late one still computes its linear layers, so the late one can be relieved of
attention. The rows of a document that began on the late rank have nothing to read until its keys are there: taking
attention from the late rank gains nothing then, and only what there is besides fills the time.
"""

from __future__ import annotations

import numpy as np

from deepspeed_cad.cost import CostModel, window_start
from deepspeed_cad.layout import Tick
from deepspeed_cad.planner.plan import Floats


def begins(
    late: Floats, tick: Tick, cost: CostModel, groups: int, window: int | None, speed: Floats | None = None
) -> Floats:
    """[ranks] seconds at which ranks begin, so that from there on none is idle; `late` where nobody is held up.

    Args:
        late: [ranks] seconds after which a rank's queries, keys and values are there.
        tick: whose attention is planned.
        cost: of attention, in the same seconds.
        groups: head groups.
        window: of the layers, None without one.
        speed: [ranks] in attention, beside what costs say; None: all are equal.
    """
    rows = tick.query
    if not len(rows) or late.min() == late.max():
        return late
    needed = _keys_there(late, tick, window)
    own = late[rows.rank]
    each = cost.of(rows.begin, rows.end, window) * groups
    if speed is not None:
        each = each / np.where(speed > 0.0, speed, np.inf)[rows.rank]
    held = needed > own
    # What a rank has to do before the keys come that it waits for.
    meanwhile = np.bincount(rows.rank[~held], each[~held], tick.ranks)
    latest = late.copy()
    np.maximum.at(latest, rows.rank[held], needed[held])
    return np.maximum(late, latest - meanwhile)


def _keys_there(late: Floats, tick: Tick, window: int | None) -> Floats:
    """[segments] when the last keys are there that the rows of a segment read, on whatever ranks."""
    rows, keys = tick.query, tick.key
    found = late[rows.rank]
    documents, ranks = rows.count_ranks()
    for document in documents[ranks > 1]:
        own, theirs = np.flatnonzero(rows.document == document), np.flatnonzero(keys.document == document)
        first = window_start(rows.begin[own], window)
        reads = (keys.begin[theirs] < rows.end[own, None]) & (keys.end[theirs] > first[:, None])
        found[own] = np.maximum(found[own], np.where(reads, late[keys.rank[theirs]], 0.0).max(axis=1, initial=0.0))
    return found
