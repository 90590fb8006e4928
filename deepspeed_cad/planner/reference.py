"""The reference planner: what csrc/planner*.cpp does, in plain Python, to the task.

In: a `PlanInput` and a tolerance. Out: a `Solution`. Greedy: ranks above their level give rows of their longest
documents to ranks below theirs, cheapest bytes per unit of load first; a move is a number of head groups times the
last rows of a segment.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np

from deepspeed_cad.planner.answer import Solution
from deepspeed_cad.planner.columns import Cell, Columns
from deepspeed_cad.planner.levels import finish_time, settle_levels, work_until
from deepspeed_cad.planner.plan import PlanInput
from deepspeed_cad.planner.traffic import traffic_matrix

HALF = 0.5
"""Once something moves, ranks come within this share of the tolerance: costs are predictions."""
ROUNDS = (0.8, 0.85, 0.9, 0.95)
"""Share of that band which each round of moves aims at."""
SLACK = 0.1
"""Share of the tolerance that is not worth a move."""
ITEMS = 2
"""Longest documents of a rank that are looked at for each move."""
NEAR = 4
"""Servers that hold keys of a document and are looked at: so many from its first homes, its last, and its servers."""


@dataclass(frozen=True)
class Move:
    """Rows [cut, end) of head groups [group_begin, group_end) of a segment go to another server."""

    rate: float
    document: int
    group_begin: int
    group_end: int
    cut: int
    end: int
    server: int


@dataclass(frozen=True)
class Item:
    """Rows [begin, end) that head groups [group_begin, group_end) of a document still have at home."""

    document: int
    group_begin: int
    group_end: int
    begin: int
    end: int


class Round:
    """One round of moves towards fixed levels."""

    def __init__(self, state: Columns, most: list[float], give: list[float], take: list[float], slack: list[float],
                 base: list[float], speed: list[float], memory: list[float]) -> None:  # fmt: skip
        self.state, self.most, self.give, self.take, self.slack = state, most, give, take, slack
        self.base, self.speed, self.memory = base, speed, memory

    def run(self) -> None:
        """Move until no rank is above its level, or nothing helps."""
        state = self.state
        heap = []
        for rank in range(state.ranks):
            if state.load[rank] - self.give[rank] > self.slack[rank]:
                move = self.choose(rank)
                if move is not None:
                    heap.append((move.rate, rank))
        heapq.heapify(heap)
        while heap:
            rate, rank = heapq.heappop(heap)
            if state.load[rank] - self.give[rank] <= self.slack[rank]:
                continue
            move = self.choose(rank)
            if move is None:
                continue
            if heap and move.rate > heap[0][0] * 1.02 and move.rate > rate:
                heapq.heappush(heap, (move.rate, rank))
                continue
            for group in range(move.group_begin, move.group_end):
                for begin, end, _, _ in list(state.cells[move.document][group]):
                    low, high = max(begin, move.cut), min(end, move.end)
                    if low < high:
                        state.move(move.document, group, low, high, move.server)
            heapq.heappush(heap, (move.rate, rank))

    def items(self, rank: int) -> list[Item]:
        """What the rank still runs of its own rows, last rows first, head groups in the same state together."""
        state = self.state
        found = []
        for index in state.of_rank[rank]:
            document, begin, _, home = state.segments[index]
            for first, last in self.classes(document):
                for cell in state.cells[document][first]:
                    if cell[0] == begin:
                        if cell[2] == home and cell[3] == home:
                            found.append(Item(document, first, last, begin, cell[1]))
                        break
        found.sort(key=lambda item: (-item.end, item.document, item.begin, item.group_begin))
        return found

    def received_items(self, rank: int) -> list[Item]:
        """What the rank runs of other ranks' rows."""
        state = self.state
        found = []
        for document in state.served[rank]:
            for first, last in self.classes(document):
                for begin, end, server, home in state.cells[document][first]:
                    if server == rank and home != rank:
                        found.append(Item(document, first, last, begin, end))
        found.sort(key=lambda item: (-item.end, item.document, item.begin, item.group_begin))
        return found

    def classes(self, document: int) -> list[tuple[int, int]]:
        """Runs of head groups whose columns are equal."""
        columns = self.state.cells[document]
        runs, first = [], 0
        for group in range(1, self.state.groups + 1):
            if group == self.state.groups or columns[group] != columns[first]:
                runs.append((first, group))
                first = group
        return runs

    def water_level(self, items: list[Item], surplus: float) -> int:
        """The position behind which rows must leave for the surplus to be gone."""
        state = self.state
        low, high = 0, items[0].end
        while low < high:
            middle = (low + high + 1) // 2
            shed = 0.0
            for item in items:
                if item.end <= middle:
                    break
                cut = max(item.begin, middle)
                shed += (item.group_end - item.group_begin) * (
                    state.cost_of(item.begin, item.end) - state.cost_of(item.begin, cut)
                )
            if shed >= surplus:
                low = middle
            else:
                high = middle - 1
        return low

    def density(self, position: int) -> float:
        """Cost of one row at a position."""
        state = self.state
        reach = position + 1 if state.window == 0 else min(position + 1, state.window)
        return state.pair * reach + state.row

    def emptiest(self, donor: int) -> list[int]:
        """The server farthest below its level, overall and in the donor's node."""
        state = self.state
        best, near = -1, -1
        node = donor // state.node_size
        for rank in range(state.ranks):
            deficit = self.take[rank] - state.load[rank]
            if deficit <= self.slack[rank] or rank == donor:
                continue
            if best < 0 or deficit > self.take[best] - state.load[best]:
                best = rank
            if rank // state.node_size == node and (near < 0 or deficit > self.take[near] - state.load[near]):
                near = rank
        return [rank for rank in (best, near) if rank >= 0]

    def receivers(self, donor: int, item: Item, emptiest: list[int]) -> list[int]:
        """Servers worth looking at: the emptiest, and those that hold keys of the document."""
        state = self.state
        homes = [rank for _, _, rank in state.home_keys.get(item.document, ()) if self.takes(rank) and rank != donor]
        servers = [
            cell[2]
            for cell in state.cells[item.document][item.group_begin]
            if cell[2] != cell[3] and self.takes(cell[2]) and cell[2] != donor
        ]
        return sorted({*emptiest, *homes[:NEAR], *homes[-NEAR:], *servers[-NEAR:]})

    def takes(self, rank: int) -> bool:
        """Whether a server is below its level."""
        return self.take[rank] - self.state.load[rank] > self.slack[rank]

    def choose(self, donor: int) -> Move | None:
        """The move of the least bytes per unit of load: of own rows, or where none helps of rows of others."""
        emptiest = self.emptiest(donor)
        for find in (self.items, self.received_items):
            items = find(donor)
            if items:
                move = self.cheapest(donor, items, emptiest) or self.smallest_step(donor, items, emptiest)
                if move is not None:
                    return move
        return None

    def cheapest(self, donor: int, items: list[Item], emptiest: list[int]) -> Move | None:
        """The cheapest move of the longest documents."""
        state = self.state
        surplus = state.load[donor] - self.give[donor]
        level = self.water_level(items, surplus)
        longest = items[0]
        generic = math.inf
        for part in (0.4, 0.5, 0.6, 0.7, 0.85, 1.0):
            rows = max(int((longest.end - longest.begin) * part), 1)
            amount = state.cost_of(longest.end - rows, longest.end)
            size = rows * (state.query_bytes + state.output_bytes) + longest.end * state.key_value_bytes
            if amount > 0.0:
                generic = min(generic, size / amount)
        floor = self.density(level)
        fallback = generic * 1.2
        if floor > 0.0:
            fallback = max(fallback, (state.query_bytes + state.output_bytes) / floor)
        fixed = float(longest.end * state.key_value_bytes)
        best: Move | None = None
        seen: list[int] = []
        for item in items:
            if item.document not in seen:
                if len(seen) == ITEMS:
                    break
                seen.append(item.document)
            for server in self.receivers(donor, item, emptiest):
                move = self.best_cut(donor, item, server, surplus, level, fallback, fixed)
                if move is not None and (best is None or move.rate < best.rate):
                    best = move
        return best

    def smallest_step(self, donor: int, items: list[Item], emptiest: list[int]) -> Move | None:
        """Where every cut is too coarse: the least that can move, if its server then ends before the donor does now."""
        state = self.state
        step = state.granularity
        best: Move | None = None
        least = math.inf
        for item in items:
            cut = max((item.end - 1) // step * step, item.begin)
            amount = state.cost_of(cut, item.end)
            if amount >= least:
                continue
            for server in self.receivers(donor, item, emptiest):
                if self.finish(server, amount) < self.finish(donor, 0.0) and self.fits(donor, server, item, cut):
                    least = amount
                    best = Move(math.inf, item.document, item.group_end - 1, item.group_end, cut, item.end, server)
                    break
        return best

    def finish(self, rank: int, more: float) -> float:
        """When a rank would stop."""
        if self.speed[rank] <= 0.0:
            return math.inf
        return self.base[rank] + (self.state.load[rank] + more) / self.speed[rank]

    def fits(self, donor: int, server: int, item: Item, cut: int) -> bool:
        """Whether memory holds one head group's rows from `cut` on."""
        state = self.state
        rows = item.end - cut
        keys = item.end - state.first_key(cut)
        room = self.memory[server] - state.received[server]
        if rows * state.query_bytes + keys * state.key_value_bytes > room:
            return False
        return rows * state.output_bytes <= self.memory[donor] - state.received[donor]

    def best_cut(
        self, donor: int, item: Item, server: int, surplus: float, level: int, fallback: float, fixed: float
    ) -> Move | None:
        """How many head groups and from which row on: the cheapest way to move what both sides want."""
        state = self.state
        deficit = self.take[server] - state.load[server]
        room = self.most[server] - state.load[server]
        limit = surplus if deficit < surplus <= room else deficit
        wanted = min(surplus, limit)
        column = state.cells[item.document][item.group_begin]
        theirs = state.spans(column, server)
        held = state.missing(item.document, server, theirs)
        path = self.path(column, item, donor, server)
        both = state.query_bytes + state.output_bytes
        row_cost = both / self.density(item.end - 1) if self.density(item.end - 1) > 0.0 else 0.0
        best: Move | None = None
        for groups in counts_to_try(item.group_end - item.group_begin):
            gone, sent, freed, rows_before = 0.0, 0.0, 0.0, 0
            for at, (begin, end, owner, home) in enumerate(path):
                spare = surplus if at == 0 else state.load[owner] - self.give[owner]
                row_bytes = both * (state.link(home, server) - state.link(home, owner))
                whole = state.cost_of(begin, end)
                for cut in self.cuts(begin, end, spare / groups, limit / groups - gone, level if at == 0 else -1):
                    gain = gone + state.cost_of(cut, item.end if at == 0 else end)
                    loss = whole - state.cost_of(begin, cut)
                    half = 0.0 if cut == begin else 0.5 * state.cost_of(cut, min(cut + state.granularity, end)) * groups
                    if gain * groups > limit + max(self.slack[server], half):
                        continue
                    if loss * groups > spare + max(self.slack[owner], half):
                        continue
                    need = state.missing(item.document, server, sorted([*theirs, (cut, item.end)]))
                    size = sent + (end - cut) * row_bytes + (need[1] - held[1]) * state.key_value_bytes - freed
                    if cut == begin:
                        size -= self.freed(item.document, column, begin, owner)
                    elif at == 0 and cut > level:
                        again = float(both * (cut - level))
                        ground = self.density(level)
                        if ground > 0.0:
                            again *= self.density((cut + level) // 2) / ground - 1.0
                        size += min(again, float(state.key_value_bytes * cut))
                    rows = rows_before + end - cut
                    space = self.memory[server] - state.received[server]
                    if groups * (rows * state.query_bytes + (need[0] - held[0]) * state.key_value_bytes) > space:
                        continue
                    landing = groups * (end - cut) * state.output_bytes
                    if owner == home and home != server and landing > self.memory[home] - state.received[home]:
                        continue
                    moved = gain * groups
                    left = wanted - moved
                    price = 0.0
                    if left > self.slack[server]:
                        price = max(left * fallback, fixed + left * row_cost)
                    elif left < 0.0:
                        left = 0.0
                    rate = (size * groups + price) / (moved + left)
                    if best is None or rate < best.rate:
                        best = Move(rate, item.document, item.group_end - groups, item.group_end, cut, item.end, server)
                loss = whole
                gone += whole
                if gone * groups > limit + self.slack[server] or loss * groups > spare + self.slack[owner]:
                    break
                sent += (end - begin) * row_bytes
                rows_before += end - begin
                freed += self.freed(item.document, column, begin, owner)
        return best

    def freed(self, document: int, column: list[Cell], begin: int, owner: int) -> float:
        """Bytes of K and V that a server need not receive any more without its cell at `begin`."""
        state = self.state
        homes = state.home_keys.get(document, ())
        if len(homes) == 1 and homes[0][2] == owner:
            return 0.0
        now = [(cell[0], cell[1]) for cell in column if cell[2] == owner]
        then = [span for span in now if span[0] != begin]
        return (
            state.missing(document, owner, now)[1] - state.missing(document, owner, then)[1]
        ) * state.key_value_bytes

    def path(self, column: list[Cell], item: Item, donor: int, server: int) -> list[Cell]:
        """The item's rows, and before them rows of the same document on other ranks that give, last first."""
        state = self.state
        at = 0
        while column[at][0] != item.begin:
            at += 1
        path = [(item.begin, item.end, donor, column[at][3])]
        while at > 0:
            at -= 1
            begin, end, owner, home = column[at]
            if end != path[-1][0] or owner != home or home == server:
                break
            if state.load[home] - self.give[home] <= self.slack[home]:
                break
            path.append((begin, end, home, home))
        return path

    def cuts(self, begin: int, end: int, most_loss: float, most_gain: float, level: int) -> list[int]:
        """Rows to cut at: those that move what is wanted, the water level, the begin of the segment."""
        state = self.state
        step = state.granularity
        whole = state.cost_of(begin, end)
        found = [begin]
        first = begin // step + 1
        last = (end - 1) // step
        if first <= last:
            low, high = first, last + 1
            while low < high:
                middle = (low + high) // 2
                row = middle * step
                if whole - state.cost_of(begin, row) > most_loss or state.cost_of(row, end) > most_gain:
                    low = middle + 1
                else:
                    high = middle
            for at in (low - 1, low):
                if first <= at <= last:
                    found.append(at * step)
            at = (level + step // 2) // step
            if first <= at <= last:
                found.append(at * step)
        return found


def counts_to_try(groups: int) -> list[int]:
    """Numbers of head groups a move may have: all small ones, then in steps of an eighth."""
    counts, count = [], 1
    while count < groups:
        counts.append(count)
        count += max(1, count // 8)
    counts.append(groups)
    return counts


def solve(problem: PlanInput, tolerance: float) -> Solution:
    """Make a plan in plain Python."""
    state = Columns(problem)
    ranks = state.ranks
    base = _floats(problem.base_load, ranks, 0.0)
    speed = _floats(problem.speed, ranks, 1.0)
    memory = _floats(problem.memory, ranks, math.inf)
    before = list(state.load)
    _balance(state, tolerance, base, speed, memory)
    if _slowest(state.load, base, speed) > _slowest(before, base, speed):
        state = Columns(problem)
    tasks = np.array(state.tasks(), np.int64).reshape(-1, 6)
    work = np.zeros(ranks)
    cost = problem.cost.of(tasks[:, 1], tasks[:, 2], problem.window) * (tasks[:, 4] - tasks[:, 3])
    np.add.at(work, tasks[:, 5], cost)
    matrix = traffic_matrix(tasks, problem.tick, problem.shape, problem.window)
    sent, received, between = (np.zeros(ranks, np.int64) for _ in range(3))
    for (source, target), amount in matrix.items():
        sent[source] += amount
        received[target] += amount
        if source // state.node_size != target // state.node_size:
            between[target] += amount
    return Solution(tasks, work, np.array(before), sent, received, between)


def _balance(state: Columns, tolerance: float, base: list[float], speed: list[float], memory: list[float]) -> None:
    ranks = state.ranks
    band = tolerance
    for part in ROUNDS:
        for phase in range(3):
            total = 0.0
            for rank in range(ranks):
                total += state.load[rank]
            finish = finish_time(total, base, speed)
            most = work_until(finish * (1.0 + band), base, speed)
            least = work_until(finish * (1.0 - band), base, speed)
            too_much = any(state.load[rank] > most[rank] for rank in range(ranks))
            too_little = any(state.load[rank] < least[rank] for rank in range(ranks))
            if not too_much and not too_little:
                return
            band = tolerance * HALF
            if (phase == 1 and not too_much) or (phase == 2 and not too_little):
                continue
            aim = band * part
            room = work_until(finish * (1.0 + aim), base, speed)
            if phase == 0:
                give, take = settle_levels(state.load, base, speed, finish, aim)
            elif phase == 1:
                give, take = room, work_until(finish, base, speed)
            else:
                give, take = work_until(finish, base, speed), work_until(finish * (1.0 - aim), base, speed)
            slack = [SLACK * band * finish * speed[rank] for rank in range(ranks)]
            Round(state, room, give, take, slack, base, speed, memory).run()
            _evacuate(state, take, speed)


def _evacuate(state: Columns, take: list[float], speed: list[float]) -> None:
    """What a rank of speed 0 still has goes to whoever is farthest below its level."""
    for rank in range(state.ranks):
        if speed[rank] > 0.0:
            continue
        for index in state.of_rank[rank]:
            document = state.segments[index][0]
            for group in range(state.groups):
                for begin, end, server, _ in list(state.cells[document][group]):
                    if server == rank:
                        state.move(document, group, begin, end, _emptiest(state, take, speed))


def _emptiest(state: Columns, take: list[float], speed: list[float]) -> int:
    best = -1
    for rank in range(state.ranks):
        if speed[rank] <= 0.0:
            continue
        if best < 0 or (take[rank] - state.load[rank]) / speed[rank] > (take[best] - state.load[best]) / speed[best]:
            best = rank
    return best


def _slowest(load: list[float], base: list[float], speed: list[float]) -> float:
    slowest = 0.0
    for rank in range(len(load)):
        if speed[rank] > 0.0:
            slowest = max(slowest, base[rank] + load[rank] / speed[rank])
        elif load[rank] > 0.0:
            return math.inf
    return slowest


def _floats(values: object, ranks: int, default: float) -> list[float]:
    return [default] * ranks if values is None else [float(value) for value in values]  # type: ignore[attr-defined]
