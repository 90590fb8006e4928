"""Columns: who runs which rows of each (document, head group), while a plan is being made.

In: the tick as plain lists. Out: loads, and what a move would cost in bytes. A column is a list of cells
(begin, end, server, home), ordered by begin; together they cover the document's query rows once.
"""

from __future__ import annotations

import numpy as np

from deepspeed_cad.planner.constants import HOST_BORDER
from deepspeed_cad.planner.plan import PlanInput

Cell = tuple[int, int, int, int]
Interval = tuple[int, int]
Run = tuple[int, int, int]
"""Rows [begin, end) and their server."""


class Columns:
    """The columns of all documents, the load of every server and the bytes it receives."""

    def __init__(self, problem: PlanInput) -> None:
        tick, shape, cost = problem.tick, problem.shape, problem.cost
        self.ranks, self.groups = tick.ranks, shape.groups
        self.window = 0 if problem.window is None else int(problem.window)
        self.pair, self.row, self.key, self.task = cost.pair, cost.row, cost.key, cost.task
        self.granularity = problem.granularity
        self.query_bytes, self.output_bytes = shape.query_bytes, shape.output_bytes
        self.key_value_bytes = shape.key_value_bytes
        self.host = host_of_rank(problem)
        self.inside, self.between = link_weights(problem)
        order = sorted(
            zip(tick.query.document.tolist(), tick.query.begin.tolist(), tick.query.end.tolist(),
                tick.query.rank.tolist(), strict=True)
        )  # fmt: skip
        self.home_keys: dict[int, list[tuple[int, int, int]]] = {}
        for document, begin, end, rank in sorted(
            zip(tick.key.document.tolist(), tick.key.begin.tolist(), tick.key.end.tolist(),
                tick.key.rank.tolist(), strict=True)
        ):  # fmt: skip
            self.home_keys.setdefault(document, []).append((begin, end, rank))
        self.segments: list[tuple[int, int, int, int]] = []
        """(document, begin, end, home): query segments, those that continue each other on one rank joined."""
        for document, begin, end, rank in order:
            if begin == end:
                continue
            if self.segments:
                last = self.segments[-1]
                if last[0] == document and last[2] == begin and last[3] == rank:
                    self.segments[-1] = (document, last[1], end, rank)
                    continue
            self.segments.append((document, begin, end, rank))
        self.first_segment: dict[int, int] = {}
        self.cells: dict[int, list[list[Cell]]] = {}
        self.load = [0.0] * self.ranks
        self.received = [0] * self.ranks
        self.of_rank: list[list[int]] = [[] for _ in range(self.ranks)]
        """Segments of each rank, those that end last in their document first."""
        self.served: list[list[int]] = [[] for _ in range(self.ranks)]
        """Documents of which a rank runs, or ran, rows of others."""
        for index, (document, begin, end, rank) in enumerate(self.segments):
            if document not in self.cells:
                self.first_segment[document] = index
                self.cells[document] = [[] for _ in range(self.groups)]
            for column in self.cells[document]:
                column.append((begin, end, rank, rank))
            self.of_rank[rank].append(index)
            self.load[rank] += self.cost_of(begin, end) * self.groups
        for own in self.of_rank:
            own.sort(key=lambda index: (-self.segments[index][2], index))
        self.left = [(end - begin) * self.groups for _, begin, end, _ in self.segments]
        """Rows times head groups of each segment that are at home."""
        for document, columns in self.cells.items():
            for server in sorted({cell[2] for cell in columns[0]}):
                keys = self.missing(document, server, self.spans(columns[0], server))[0]
                self.received[server] += keys * self.groups * self.key_value_bytes

    def pairs(self, begin: int, end: int) -> int:
        """Query-key pairs of rows [begin, end)."""
        window = self.window
        if window == 0:
            return (end * (end + 1) - begin * (begin + 1)) // 2
        low, high = min(begin, window), min(end, window)
        ramp = (high * (high + 1) - low * (low + 1)) // 2
        return ramp + ((end - high) - (begin - low)) * window

    def cost_of(self, begin: int, end: int) -> float:
        """Cost of one head group's rows [begin, end) as one task."""
        if begin >= end:
            return 0.0
        keys = end - self.first_key(begin)
        return self.pair * self.pairs(begin, end) + self.row * (end - begin) + self.key * keys + self.task

    def density(self, position: int) -> float:
        """Cost of one row at a position, without what a task costs as such."""
        reach = position + 1 if self.window == 0 else min(position + 1, self.window)
        return self.pair * reach + self.row

    def first_key(self, row: int) -> int:
        """First key that a row reads."""
        return max(row - self.window + 1, 0) if self.window else 0

    def spans(self, column: list[Cell], server: int) -> list[Interval]:
        """The row intervals of one server in a column, neighbours joined."""
        spans: list[Interval] = []
        for begin, end, owner, _ in column:
            if owner != server:
                continue
            if spans and spans[-1][1] == begin:
                spans[-1] = (spans[-1][0], end)
            else:
                spans.append((begin, end))
        return spans

    def missing(self, document: int, server: int, spans: list[Interval]) -> tuple[int, float]:
        """KV rows that the server must receive to run these rows, and the same weighted by link."""
        inside = between = 0
        reach = -1
        needed: list[Interval] = []
        for begin, end in spans:
            start = self.first_key(begin)
            if start <= reach:
                needed[-1] = (needed[-1][0], end)
            else:
                needed.append((start, end))
            reach = end
        host = self.host[server]
        for low, high, home in self.home_keys.get(document, ()):
            if home == server:
                continue
            rows = 0
            for start, end in needed:
                if start < high and low < end:
                    rows += min(end, high) - max(start, low)
            if self.host[home] == host:
                inside += rows
            else:
                between += rows
        return inside + between, self.inside * inside + self.between * between

    def holds(self, document: int, rank: int, begin: int, end: int) -> bool:
        """Whether a rank has these keys at home in one piece."""
        return any(
            low <= begin and end <= high and home == rank for low, high, home in self.home_keys.get(document, ())
        )

    def classes(self, document: int) -> list[tuple[int, int]]:
        """Runs of head groups whose columns are equal."""
        columns = self.cells[document]
        runs, first = [], 0
        for group in range(1, self.groups + 1):
            if group == self.groups or columns[group] != columns[first]:
                runs.append((first, group))
                first = group
        return runs

    def link(self, home: int, server: int) -> float:
        """Weight of a byte between two ranks."""
        if home == server:
            return 0.0
        return self.inside if self.host[home] == self.host[server] else self.between

    def run_cost(self, spans: list[Interval]) -> float:
        """Cost of one server's rows in a column."""
        total = 0.0
        for begin, end in spans:
            total += self.cost_of(begin, end)
        return total

    def move(self, document: int, group: int, begin: int, end: int, server: int) -> None:
        """Give rows [begin, end), which lie in one cell, to another server."""
        column = self.cells[document][group]
        at = 0
        while not (column[at][0] <= begin and end <= column[at][1]):
            at += 1
        first, last, old, home = column[at]
        before_old, before_new = self.spans(column, old), self.spans(column, server)
        parts = [(first, begin, old, home), (begin, end, server, home), (end, last, old, home)]
        column[at : at + 1] = [part for part in parts if part[0] < part[1]]
        self._join(column)
        after_old, after_new = self.spans(column, old), self.spans(column, server)
        self.load[old] += self.run_cost(after_old) - self.run_cost(before_old)
        self.load[server] += self.run_cost(after_new) - self.run_cost(before_new)
        for rank, before, after in ((old, before_old, after_old), (server, before_new, after_new)):
            rows = self.missing(document, rank, after)[0] - self.missing(document, rank, before)[0]
            self.received[rank] += rows * self.key_value_bytes
        if home in (old, server) and old != server:
            self.left[self.segment_of(document, begin)] += (end - begin) * (1 if server == home else -1)
        if old != home:
            self.received[old] -= (end - begin) * self.query_bytes
            self.received[home] -= (end - begin) * self.output_bytes
        if server != home:
            if document not in self.served[server]:
                self.served[server].append(document)
            self.received[server] += (end - begin) * self.query_bytes
            self.received[home] += (end - begin) * self.output_bytes

    def place(self, document: int, group: int, runs: list[Run]) -> None:
        """Give rows of a head group that is at home to the servers of `runs`, which are ordered and do not overlap."""
        column = self.cells[document][group]
        placed: list[Cell] = []
        at = 0
        for begin, end, rank, home in column:
            row = begin
            while row < end:
                while at < len(runs) and runs[at][1] <= row:
                    at += 1
                if at == len(runs) or runs[at][0] >= end:
                    placed.append((row, end, rank, home))
                    break
                if row < runs[at][0]:
                    placed.append((row, runs[at][0], rank, home))
                    row = runs[at][0]
                upto = min(end, runs[at][1])
                placed.append((row, upto, runs[at][2], home))
                row = upto
        self._join(placed)
        for rank in sorted({cell[2] for cell in (*column, *placed)}):
            before, after = self.spans(column, rank), self.spans(placed, rank)
            self.load[rank] += self.run_cost(after) - self.run_cost(before)
            rows = self.missing(document, rank, after)[0] - self.missing(document, rank, before)[0]
            self.received[rank] += rows * self.key_value_bytes
        for begin, end, server, home in placed:
            if server == home:
                continue
            if document not in self.served[server]:
                self.served[server].append(document)
            self.left[self.segment_of(document, begin)] -= end - begin
            self.received[server] += (end - begin) * self.query_bytes
            self.received[home] += (end - begin) * self.output_bytes
        self.cells[document][group] = placed

    def segment_of(self, document: int, row: int) -> int:
        """The segment that holds a row."""
        index = self.first_segment[document]
        while row >= self.segments[index][2]:
            index += 1
        return index

    @staticmethod
    def _join(column: list[Cell]) -> None:
        at = 1
        while at < len(column):
            left, right = column[at - 1], column[at]
            if left[1] == right[0] and left[2:] == right[2:]:
                column[at - 1 : at + 1] = [(left[0], right[1], left[2], left[3])]
            else:
                at += 1

    def tasks(self) -> list[tuple[int, int, int, int, int, int]]:
        """The rectangles of all columns, ordered: one per server's run of rows and run of head groups alike."""
        tasks = []
        for document in sorted(self.cells):
            open_at: dict[tuple[int, int, int], int] = {}
            for group, column in enumerate(self.cells[document]):
                still: dict[tuple[int, int, int], int] = {}
                at = 0
                while at < len(column):
                    begin, end, server, _ = column[at]
                    at += 1
                    while at < len(column) and column[at][2] == server and column[at][0] == end:
                        end = column[at][1]
                        at += 1
                    span = (begin, end, server)
                    still[span] = open_at.pop(span, group)
                for (begin, end, server), first in open_at.items():
                    tasks.append((document, begin, end, first, group, server))
                open_at = still
            for (begin, end, server), first in open_at.items():
                tasks.append((document, begin, end, first, self.groups, server))
        return sorted(tasks)


def host_of_rank(problem: PlanInput) -> list[int]:
    """Number of each rank's host, in the order in which hosts first appear."""
    if problem.hosts is None:
        return [0] * problem.tick.ranks
    numbers: dict[int, int] = {}
    return [numbers.setdefault(host, len(numbers)) for host in np.asarray(problem.hosts).tolist()]


def link_weights(problem: PlanInput) -> tuple[float, float]:
    """Weight of a byte inside a host and between hosts; the first is 1."""
    if problem.hosts is None or len(set(np.asarray(problem.hosts).tolist())) < 2:
        return 1.0, 1.0
    inside, between = problem.cost.byte_inside, problem.cost.byte_between
    if inside > 0.0 and between > inside:
        return 1.0, between / inside
    return 1.0, 1.0 if between > 0.0 else HOST_BORDER
