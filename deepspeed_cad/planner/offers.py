"""Offers: the best way to move rows of one donor to one server.

In: columns, levels, rows that a donor runs (`Item`) and a server. Out: the cheapest `Move`, in bytes per unit of
load. Two kinds: the last rows of the item, and on with rows before them that other ranks above their level have of the
same document, so that K and V are sent once for all; or the first rows, for whoever holds the keys before them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from deepspeed_cad.planner.columns import Cell, Columns
from deepspeed_cad.planner.constants import GROUP_STEPS, OVERSHOOT


@dataclass(frozen=True)
class Limits:
    """What ranks are, each of them [ranks]."""

    base: list[float]
    """Base load."""
    speed: list[float]
    memory: list[float]


@dataclass(frozen=True)
class Levels:
    """What a round aims at, per rank: work, in the unit of the cost model times speed."""

    most: list[float]
    """No more than this."""
    give: list[float]
    """Ranks above it give what is above."""
    take: list[float]
    """Ranks below it take what is missing."""
    slack: list[float]
    """So much is not worth a move."""
    base: list[float]
    speed: list[float]
    memory: list[float]

    @staticmethod
    def closed(ranks: int, limits: Limits) -> Levels:
        """Levels at which no rank gives or takes."""
        zero, never = [0.0] * ranks, [math.inf] * ranks
        return Levels(list(zero), never, list(zero), list(zero), limits.base, limits.speed, limits.memory)


@dataclass(frozen=True)
class Move:
    """Rows [begin, end) of head groups [group_begin, group_end) of a document go to another server."""

    rate: float
    document: int
    group_begin: int
    group_end: int
    begin: int
    end: int
    server: int


@dataclass(frozen=True)
class Item:
    """Rows [begin, end) that a rank runs of head groups [group_begin, group_end) of a document."""

    document: int
    group_begin: int
    group_end: int
    begin: int
    end: int


@dataclass(frozen=True)
class Prices:
    """What the donor would pay elsewhere."""

    surplus: float
    """Load that it has to give."""
    level: int
    """Position behind which all its rows must leave for that."""
    fallback: float
    """Bytes per unit of load of what is left to be moved by another move."""
    fixed: float
    """Bytes of that move's K and V."""
    link: float
    """Weight of a byte of that move: inside a host where a rank of the donor's host takes, else between hosts."""


class Offer:
    """The search for the best move of an item to a server."""

    def __init__(self, state: Columns, levels: Levels, donor: int, item: Item, server: int, prices: Prices) -> None:
        """What is known before any cut is tried.

        Args:
            state: who runs which rows now.
            levels: what the round aims at.
            donor: rank that gives.
            item: rows of it that may go, of head groups that are in the same state.
            server: rank that takes.
            prices: what the donor would pay elsewhere for what the move leaves.
        """
        self.state, self.levels, self.prices = state, levels, prices
        self.donor, self.item, self.server = donor, item, server
        self.deficit = levels.take[server] - state.load[server]
        room = levels.most[server] - state.load[server]
        self.limit = prices.surplus if self.deficit < prices.surplus <= room else self.deficit
        self.wanted = min(prices.surplus, self.limit)
        self.column = state.cells[item.document][item.group_begin]
        self.theirs = state.spans(self.column, server)
        self.held = state.missing(item.document, server, self.theirs)
        self.row_bytes = state.query_bytes + state.output_bytes
        dense = state.density(item.end - 1)
        self.row_cost = self.row_bytes * prices.link / dense if dense > 0.0 else 0.0
        self.best: Move | None = None

    def search(self) -> Move | None:
        """The best move, or None where nothing fits."""
        path = self.path()
        for groups in counts_to_try(self.item.group_end - self.item.group_begin):
            self.try_tails(groups, path)
            self.try_heads(groups, path[0][3])
        return self.best

    def path(self) -> list[Cell]:
        """The item's rows, and before them rows of the same document on other ranks that give, last first."""
        state, levels, item, column = self.state, self.levels, self.item, self.column
        at = 0
        while column[at][0] != item.begin:
            at += 1
        path = [(item.begin, item.end, self.donor, column[at][3])]
        while at > 0:
            at -= 1
            begin, end, owner, home = column[at]
            if end != path[-1][0] or owner != home or home == self.server:
                break
            if state.load[home] - levels.give[home] <= levels.slack[home]:
                break
            path.append((begin, end, home, home))
        return path

    def try_tails(self, groups: int, path: list[Cell]) -> None:
        """The last rows of the item, and of cells before it."""
        state, levels, prices, item = self.state, self.levels, self.prices, self.item
        gone, sent, freed, rows_before = 0.0, 0.0, 0.0, 0
        for at, (begin, end, owner, home) in enumerate(path):
            spare = prices.surplus if at == 0 else state.load[owner] - levels.give[owner]
            row_bytes = self.row_bytes * (state.link(home, self.server) - state.link(home, owner))
            whole = state.cost_of(begin, end)
            level = prices.level if at == 0 else -1
            for cut in self.tail_cuts(begin, end, spare / groups, self.limit / groups - gone, level):
                gain = gone + state.cost_of(cut, end)
                loss = whole - state.cost_of(begin, cut)
                half = 0.0 if cut == begin else OVERSHOOT * state.cost_of(cut, min(cut + state.granularity, end))
                if not self.fits(gain * groups, loss * groups, spare, owner, half):
                    continue
                keys, weighted = self.new_keys(cut, item.end)
                size = sent + (end - cut) * row_bytes + weighted * state.key_value_bytes - freed
                if cut == begin:
                    size -= self.freed(begin, owner)
                elif at == 0 and cut > prices.level:
                    size += self.second_trip(cut)
                if self.has_room(owner, home, groups, rows_before + end - cut, keys, end - cut):
                    self.judge(groups, cut, item.end, gain * groups, size * groups)
            gone += whole
            if gone * groups > self.limit + levels.slack[self.server] or whole * groups > spare + levels.slack[owner]:
                break
            sent += (end - begin) * row_bytes
            rows_before += end - begin
            freed += self.freed(begin, owner)

    def try_heads(self, groups: int, home: int) -> None:
        """The first rows of an item in the middle of a document."""
        state, item, surplus = self.state, self.item, self.prices.surplus
        if item.begin == 0:
            return
        row_bytes = self.row_bytes * (state.link(home, self.server) - state.link(home, self.donor))
        whole = state.cost_of(item.begin, item.end)
        for cut in self.head_cuts(surplus / groups, self.limit / groups):
            gain = state.cost_of(item.begin, cut)
            loss = whole - state.cost_of(cut, item.end)
            half = OVERSHOOT * state.cost_of(max(cut - state.granularity, item.begin), cut)
            if not self.fits(gain * groups, loss * groups, surplus, self.donor, half):
                continue
            keys, weighted = self.new_keys(item.begin, cut)
            size = (cut - item.begin) * row_bytes + weighted * state.key_value_bytes
            if self.has_room(self.donor, home, groups, cut - item.begin, keys, cut - item.begin):
                self.judge(groups, item.begin, cut, gain * groups, size * groups)

    def fits(self, gain: float, loss: float, spare: float, owner: int, half: float) -> bool:
        """Whether neither side moves more than it wants; half a granule more is rounding."""
        slack = self.levels.slack
        return gain <= self.limit + max(slack[self.server], half) and loss <= spare + max(slack[owner], half)

    def new_keys(self, begin: int, end: int) -> tuple[int, float]:
        """KV rows that the server must receive in addition, and the same weighted by link."""
        needed = self.state.missing(self.item.document, self.server, sorted([*self.theirs, (begin, end)]))
        return needed[0] - self.held[0], needed[1] - self.held[1]

    def freed(self, begin: int, owner: int) -> float:
        """Bytes of K and V that a server need not receive any more without its cell at `begin`."""
        state, document = self.state, self.item.document
        homes = state.home_keys.get(document, ())
        if len(homes) == 1 and homes[0][2] == owner:
            return 0.0
        now = [(cell[0], cell[1]) for cell in self.column if cell[2] == owner]
        then = [span for span in now if span[0] != begin]
        return (
            state.missing(document, owner, now)[1] - state.missing(document, owner, then)[1]
        ) * state.key_value_bytes

    def second_trip(self, cut: int) -> float:
        """What it costs that rows between the level and the cut must leave later: K and V again, or worse rows."""
        state, level = self.state, self.prices.level
        again = float(self.row_bytes * (cut - level))
        ground = state.density(level)
        if ground > 0.0:
            again *= state.density((cut + level) // 2) / ground - 1.0
        return min(again, float(state.key_value_bytes * cut)) * self.prices.link

    def has_room(self, owner: int, home: int, groups: int, rows: int, keys: int, landing: int) -> bool:
        """Whether memory holds what would arrive at the server, and at home on the way back.

        Args:
            owner: rank that runs the rows now.
            home: rank that owns their tokens.
            groups: head groups that move.
            rows: query rows that the server would receive.
            keys: KV rows that the server would receive.
            landing: query rows whose O the home would receive.
        """
        state, memory = self.state, self.levels.memory
        space = memory[self.server] - state.received[self.server]
        if groups * (rows * state.query_bytes + keys * state.key_value_bytes) > space:
            return False
        if owner != home or home == self.server:
            return True
        return groups * landing * state.output_bytes <= memory[home] - state.received[home]

    def judge(self, groups: int, begin: int, end: int, moved: float, size: float) -> None:
        """Keep the move if it is the cheapest, with a price on what it leaves to another one."""
        prices, item = self.prices, self.item
        left, price = self.wanted - moved, 0.0
        if left > self.levels.slack[self.server]:
            price = max(left * prices.fallback, prices.fixed + left * self.row_cost)
        elif left < 0.0:
            left = 0.0
        rate = (size + price) / (moved + left)
        if self.best is None or rate < self.best.rate:
            self.best = Move(rate, item.document, item.group_end - groups, item.group_end, begin, end, self.server)

    def tail_cuts(self, begin: int, end: int, most_loss: float, most_gain: float, level: int) -> list[int]:
        """Where last rows may begin: where they are what is wanted, at the water level, at the begin of the cell."""
        state = self.state
        step = state.granularity
        whole = state.cost_of(begin, end)
        first, last = -(-begin // step) + 1, end // step - 1
        low, high = first, max(first, last + 1)
        while low < high:
            middle = (low + high) // 2
            row = middle * step
            if whole - state.cost_of(begin, row) > most_loss or state.cost_of(row, end) > most_gain:
                low = middle + 1
            else:
                high = middle
        places = [low - 1, low] if level < 0 else [low - 1, low, (level + step // 2) // step]
        return [begin, *(at * step for at in places if first <= at <= last)]

    def head_cuts(self, most_loss: float, most_gain: float) -> list[int]:
        """Where first rows may end."""
        state, item = self.state, self.item
        step = state.granularity
        whole = state.cost_of(item.begin, item.end)
        first, last = -(-item.begin // step) + 1, item.end // step - 1
        low, high = first, max(first, last + 1)
        while low < high:
            middle = (low + high) // 2
            row = middle * step
            if whole - state.cost_of(row, item.end) > most_loss or state.cost_of(item.begin, row) > most_gain:
                high = middle
            else:
                low = middle + 1
        return [at * step for at in (low - 1, low) if first <= at <= last]


def counts_to_try(groups: int) -> list[int]:
    """Numbers of head groups a move may have: all small ones, then in steps of an eighth."""
    counts, count = [], 1
    while count < groups:
        counts.append(count)
        count += max(1, count // GROUP_STEPS)
    counts.append(groups)
    return counts
