"""One round of the reference planner: moves towards fixed levels, the cheapest bytes per unit of load first.

In: the columns, and for each rank the levels to give and to take to. Out: changed columns. A move is a number of head
groups times the last (or first) rows that a rank still has of a document. csrc/planner_round.cpp does the same.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from deepspeed_cad.planner.columns import Columns
from deepspeed_cad.planner.constants import (
    DEARER,
    DOCUMENTS,
    LEFTOVER_PRICE,
    LONGEST,
    MOVE_SHARES,
    NEAR,
    SHORT_STEPS,
    SHORTEST,
)
from deepspeed_cad.planner.offers import Item, Levels, Move, Offer, Prices


class Round:
    """One round of moves towards fixed levels."""

    def __init__(self, state: Columns, levels: Levels, pool: Sequence[int]) -> None:
        """Moves between the ranks of `pool`, in rank order."""
        self.state, self.levels, self.pool = state, levels, pool
        self.give, self.take, self.slack = levels.give, levels.take, levels.slack

    def run(self) -> None:
        """Move until no rank is above its level, or nothing helps."""
        state = self.state
        heap = []
        for rank in self.pool:
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
            if heap and move.rate > heap[0][0] * DEARER and move.rate > rate:
                heapq.heappush(heap, (move.rate, rank))
                continue
            for group in range(move.group_begin, move.group_end):
                for begin, end, _, _ in list(state.cells[move.document][group]):
                    low, high = max(begin, move.begin), min(end, move.end)
                    if low < high:
                        state.move(move.document, group, low, high, move.server)
            self.follow(rank, move)
            heapq.heappush(heap, (move.rate, rank))

    def follow(self, donor: int, move: Move) -> None:
        """After a whole short document, further ones to the same server: one search for many."""
        state, server = self.state, move.server
        if move.end - move.begin > SHORT_STEPS * state.granularity or move.group_end - move.group_begin < state.groups:
            return
        if not self.is_whole(state.segment_of(move.document, move.begin), 0):
            return
        for index in state.of_rank[donor]:
            document, begin, end, home = state.segments[index]
            if end > move.end or not self.is_whole(index, (end - begin) * state.groups):
                continue
            amount = state.cost_of(begin, end) * state.groups
            surplus, deficit = state.load[donor] - self.give[donor], self.take[server] - state.load[server]
            if amount > min(surplus, deficit):
                return
            rows = (end - begin) * state.groups
            space = self.levels.memory[server] - state.received[server]
            if rows * (state.query_bytes + state.key_value_bytes) > space:
                return
            if rows * state.output_bytes > self.levels.memory[home] - state.received[home]:
                return
            for group in range(state.groups):
                state.move(document, group, begin, end, server)

    def is_whole(self, index: int, left: int) -> bool:
        """Whether a segment is a whole document, keys and all, of which so much is at home."""
        state = self.state
        document, begin, end, home = state.segments[index]
        return state.left[index] == left and state.home_keys.get(document) == [(0, end, home)] and begin == 0

    def items(self, rank: int) -> list[Item]:
        """What the rank still runs of its longest segments, last rows first, head groups in the same state together."""
        found: list[Item] = []
        seen = 0
        for index in self.state.of_rank[rank]:
            if self.state.left[index]:
                self._own_rows(index, found)
                seen += 1
                if seen == LONGEST:
                    break
        found.sort(key=lambda item: (-item.end, item.document, item.begin, item.group_begin))
        return found

    def short_items(self, rank: int) -> list[Item]:
        """The same of its shortest segments."""
        found: list[Item] = []
        seen = 0
        for index in reversed(self.state.of_rank[rank]):
            if self.state.left[index]:
                self._own_rows(index, found)
                seen += 1
                if seen == SHORTEST:
                    break
        return found

    def _own_rows(self, index: int, found: list[Item]) -> None:
        document, begin, end, home = self.state.segments[index]
        for first, last in self.state.classes(document):
            for cell in self.state.cells[document][first]:
                if begin <= cell[0] < end and cell[2] == home and cell[3] == home:
                    found.append(Item(document, first, last, cell[0], cell[1]))
                    break

    def received_items(self, rank: int) -> list[Item]:
        """What the rank runs of other ranks' rows."""
        state = self.state
        found = []
        for document in state.served[rank]:
            for first, last in state.classes(document):
                for begin, end, server, home in state.cells[document][first]:
                    if server == rank and home != rank:
                        found.append(Item(document, first, last, begin, end))
        found.sort(key=lambda item: (-item.end, item.document, item.begin, item.group_begin))
        return found

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

    def emptiest(self, donor: int) -> list[int]:
        """The server farthest below its level, overall and on the donor's host."""
        state = self.state
        best, near = -1, -1
        host = state.host[donor]
        for rank in self.pool:
            deficit = self.take[rank] - state.load[rank]
            if deficit <= self.slack[rank] or rank == donor:
                continue
            if best < 0 or deficit > self.take[best] - state.load[best]:
                best = rank
            if state.host[rank] == host and (near < 0 or deficit > self.take[near] - state.load[near]):
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
                move = self.cheapest(donor, items, emptiest)
                if move is None:
                    more = self.short_items(donor) if find == self.items else []
                    move = self.smallest_step(donor, items + more, emptiest)
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
        for part in MOVE_SHARES:
            rows = max(int((longest.end - longest.begin) * part), 1)
            amount = state.cost_of(longest.end - rows, longest.end)
            size = rows * (state.query_bytes + state.output_bytes) + longest.end * state.key_value_bytes
            if amount > 0.0:
                generic = min(generic, size / amount)
        floor = state.density(level)
        near = any(state.host[rank] == state.host[donor] for rank in emptiest)
        link = state.inside if near else state.between
        fallback = generic * LEFTOVER_PRICE * link
        if floor > 0.0:
            fallback = max(fallback, (state.query_bytes + state.output_bytes) * link / floor)
        prices = Prices(surplus, level, fallback, longest.end * state.key_value_bytes * link, link)
        best: Move | None = None
        seen: list[int] = []
        for item in items:
            if item.document not in seen:
                if len(seen) == DOCUMENTS:
                    break
                seen.append(item.document)
            for server in self.receivers(donor, item, emptiest):
                move = Offer(state, self.levels, donor, item, server, prices).search()
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
            cut = max((item.end - step) // step * step, item.begin)
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
        if self.levels.speed[rank] <= 0.0:
            return math.inf
        return self.levels.base[rank] + (self.state.load[rank] + more) / self.levels.speed[rank]

    def fits(self, donor: int, server: int, item: Item, cut: int) -> bool:
        """Whether memory holds one head group's rows from `cut` on."""
        state = self.state
        rows = item.end - cut
        keys = item.end - state.first_key(cut)
        room = self.levels.memory[server] - state.received[server]
        if rows * state.query_bytes + keys * state.key_value_bytes > room:
            return False
        return rows * state.output_bytes <= self.levels.memory[donor] - state.received[donor]
