"""Flows: what a plan moves between ranks in one layer's forward, as the model of transfers needs it (finish.py).

In: columns. Out: `Flows`. What counts, per head group: Q of every row that is not at home on its server goes from the
home to the server, and O of the same rows goes back. Of K and V a server receives each row that it reads of a
(document, head group) and does not hold itself, once, from the row's home.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from deepspeed_cad.layout import Ints
from deepspeed_cad.planner.columns import Columns, Interval
from deepspeed_cad.planner.constants import IN_PLACE
from deepspeed_cad.planner.plan import Floats

QKV_SENT, QKV_RECEIVED, O_SENT, O_RECEIVED = range(4)
"""Rows of `Flows.bytes`: dispatched by a home, received by a server; returned by a server, received by a home."""
INSIDE, BETWEEN = range(2)


@dataclass(frozen=True, eq=False)
class Flows:
    """Bytes of one layer's forward by rank, and who exchanges with whom."""

    bytes: Ints
    """[4, 2, ranks]: of what (see above), inside a host or between hosts, for each rank."""
    waiting: Floats
    """[ranks]: work of tasks that read anything from another rank, in the unit of the cost model times speed."""
    pairs: Ints
    """[n, 3]: home, server, and whether Q and O travel beside K and V; ordered."""
    parts: Floats
    """[ranks]: head groups of documents with such work, which waves do not cut."""
    served: Ints
    """[2, ranks]: query and KV rows times head groups that lie side by side at each server to be run, its own among
    them; what finds all that it reads at home in one piece runs there and is not among them. Nor are query rows of a
    server's own that only read keys of others, where they are a large share of its rows (IN_PLACE)."""

    @cached_property
    def sent(self) -> Ints:
        """[ranks]: bytes that leave each rank."""
        return self.bytes[[QKV_SENT, O_SENT]].sum((0, 1))

    @cached_property
    def received(self) -> Ints:
        """[ranks]: bytes that reach each rank."""
        return self.bytes[[QKV_RECEIVED, O_RECEIVED]].sum((0, 1))

    @cached_property
    def between(self) -> int:
        """Bytes between hosts, of all ranks."""
        return int(self.bytes[[QKV_SENT, O_SENT], BETWEEN].sum())


def count_flows(state: Columns) -> Flows:
    """What the columns as they are would move."""
    counted = np.zeros((4, 2, state.ranks), np.int64)
    waiting, parts = [0.0] * state.ranks, [0.0] * state.ranks
    served = np.zeros((2, state.ranks), np.int64)
    pairs: dict[tuple[int, int], bool] = {}
    rows_of = [0] * state.ranks
    for _, begin, end, home in state.segments:
        rows_of[home] += end - begin

    def send(home: int, server: int, rows: int, keys: int) -> None:
        if home == server or not rows + keys:
            return
        where = INSIDE if state.host[home] == state.host[server] else BETWEEN
        out = rows * state.query_bytes + keys * state.key_value_bytes
        counted[QKV_SENT, where, home] += out
        counted[QKV_RECEIVED, where, server] += out
        counted[O_SENT, where, server] += rows * state.output_bytes
        counted[O_RECEIVED, where, home] += rows * state.output_bytes
        pairs[home, server] = pairs.get((home, server), False) or rows > 0

    for document in sorted(state.cells):
        keys = state.home_keys.get(document, ())
        for first, last in state.classes(document):
            groups = last - first
            reads = sorted((server, begin, end, home) for begin, end, server, home in state.cells[document][first])
            at = 0
            while at < len(reads):
                server, needed, apart = reads[at][0], list[Interval](), list[Interval]()
                own = others = 0.0
                in_place = 0
                while at < len(reads) and reads[at][0] == server:
                    _, begin, end, home = reads[at]
                    at += 1
                    goes_on = at < len(reads) and reads[at][:2] == (server, end)
                    if apart and apart[-1][1] == begin:
                        apart[-1] = (apart[-1][0], end)
                    elif home != server or goes_on:
                        apart.append((begin, end))
                    elif not state.holds(document, server, state.first_key(begin), end):
                        apart.append((begin, end))
                        if (end - begin) * IN_PLACE >= rows_of[server]:
                            in_place += end - begin
                    start = state.first_key(begin)
                    if needed and start <= needed[-1][1]:
                        needed[-1] = (needed[-1][0], end)
                    else:
                        needed.append((start, end))
                    if home == server:
                        own += state.cost_of(begin, end)
                    else:
                        others += state.cost_of(begin, end)
                        send(home, server, (end - begin) * groups, 0)
                reached = False
                for low, high, home in keys:
                    rows = sum(max(min(end, high) - max(start, low), 0) for start, end in needed)
                    if rows and home != server:
                        send(home, server, 0, rows * groups)
                        reached = True
                landed = sum(end - begin for begin, end in apart) - in_place
                served[:, server] += groups * np.array([landed, _read(state, apart)])
                waits = others + own if reached else others
                waiting[server] += waits * groups
                parts[server] += groups if waits > 0.0 else 0.0
    order = np.array(sorted((home, server, int(rows)) for (home, server), rows in pairs.items()), np.int64)
    return Flows(counted, np.array(waiting), order.reshape(-1, 3), np.array(parts), served)


def _read(state: Columns, spans: list[Interval]) -> int:
    """Keys that rows of a document read."""
    rows, reach = 0, 0
    for begin, end in spans:
        rows += end - max(state.first_key(begin), reach)
        reach = end
    return rows
