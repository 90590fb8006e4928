"""Spread: documents that lie on three ranks or more are dealt out by head groups before anything is balanced.

In: columns as they are at home, what ranks are, and how many of a document's first ranks keep their rows. Out: changed
columns. csrc/planner_spread.cpp does the same.

At home the last rank of a long document reads all keys before its rows, for every head group. Where a rank runs few
head groups over all rows instead, it reads keys of few head groups, every rank as many. So all head groups of the rows
that are dealt out are laid one behind the other on a line, as long as their work, and each rank takes a stretch of
it: its share, with which it ends when all others do. A stretch that ends within a head group cuts its rows in two.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed_cad.planner.columns import Columns, Run
from deepspeed_cad.planner.constants import BAND, HELP, READ_FROM
from deepspeed_cad.planner.levels import finish_time, work_until
from deepspeed_cad.planner.offers import Limits


@dataclass(frozen=True)
class Band:
    """Rows [begin, end) of a document that its homes share, of all head groups."""

    document: int
    begin: int
    end: int
    homes: list[int]
    work: list[float]
    """What each home runs of these rows."""
    group: float
    """Work of one head group if one rank runs it."""


def spread(state: Columns, limits: Limits, tolerance: float, kept: int) -> None:
    """Deal out all rows but those of the first `kept` homes of every document that `bands` finds, largest first."""
    found = bands(state, kept)
    found.sort(key=lambda band: (-band.group, band.document))
    total = 0.0
    for load in state.load:
        total += load
    finish = finish_time(total, limits.base, limits.speed)
    for band in found:
        others = list(state.load)
        for home, work in zip(band.homes, band.work, strict=True):
            others[home] -= work
        ranks, share = shares(state, limits, band, others, finish, finish * (1.0 + tolerance * BAND))
        slack = 0.5 * BAND * tolerance * finish
        for group, runs in enumerate(stretches(state, band, ranks, share, slack)):
            state.place(band.document, group, runs)


def bands(state: Columns, kept: int) -> list[Band]:
    """What is dealt out: of whole documents, one segment for each home, the last of which reads keys of READ_FROM."""
    found: list[Band] = []
    if state.groups == 1:
        return found
    for document, first in state.first_segment.items():
        last = first
        homes = [state.segments[first][3]]
        whole = True
        while last + 1 < len(state.segments) and state.segments[last + 1][0] == document:
            last += 1
            whole = whole and state.segments[last][1] == state.segments[last - 1][2]
            homes.append(state.segments[last][3])
        if not whole or len(homes) < READ_FROM or len(set(homes)) < len(homes) or kept > len(homes) - 2:
            continue
        if state.segments[last - READ_FROM + 1][2] <= state.first_key(state.segments[last][1]):
            continue
        begin, end = state.segments[first + kept][1], state.segments[last][2]
        work = [0.0] * kept
        for index in range(first + kept, last + 1):
            work.append(state.cost_of(state.segments[index][1], state.segments[index][2]) * state.groups)
        found.append(Band(document, begin, end, homes, work, state.cost_of(begin, end)))
    return found


def shares(
    state: Columns, limits: Limits, band: Band, others: list[float], finish: float, most: float
) -> tuple[list[int], list[float]]:
    """Who takes part, in the order of the line, and how much of the work each: all end together.

    Its homes take part, and where they would end after `most`, the emptiest other ranks of their hosts.

    Args:
        state: who runs which rows now.
        limits: what ranks are.
        band: what is dealt out.
        others: [ranks] what each runs besides.
        finish: when all work would be done.
        most: the latest that homes may end without help.
    """
    ranks = list(band.homes)
    near = {state.host[rank] for rank in ranks}
    room = work_until(finish, limits.base, limits.speed)
    idle = [
        rank
        for rank in range(state.ranks)
        if rank not in ranks and state.host[rank] in near and room[rank] - others[rank] >= HELP * band.group
    ]
    idle.sort(key=lambda rank: (others[rank] - room[rank], rank))
    work = band.group * state.groups
    while True:
        speed = [limits.speed[rank] for rank in ranks]
        base = [
            limits.base[rank] + (others[rank] / limits.speed[rank] if limits.speed[rank] > 0.0 else 0.0)
            for rank in ranks
        ]
        end = finish_time(work, base, speed)
        if (end > 0.0 and end <= most) or not idle:
            return ranks, work_until(end, base, speed)
        ranks.append(idle.pop(0))


def stretches(state: Columns, band: Band, ranks: list[int], share: list[float], slack: float) -> list[list[Run]]:
    """For each head group the runs of rows (begin, end, server) that cover the band, by where shares end on the line.

    An end that is nearer than `slack` to one of a head group is moved there.
    """
    runs: list[list[Run]] = [[] for _ in range(state.groups)]
    total = 0.0
    for one in share:
        total += one
    if total <= 0.0:
        return runs
    last = max(at for at, one in enumerate(share) if one > 0.0)
    now, gone = (0, band.begin), 0.0
    for at in range(last + 1):
        gone += share[at]
        place = gone / total * state.groups
        group, row = min(int(place), state.groups), band.begin
        over = (place - group) * band.group
        if at == last:
            group = state.groups
        elif band.group - over <= slack:
            group = min(group + 1, state.groups)
        elif over > slack and group < state.groups:
            row = cut_at(state, band, over)
            if row == band.end:
                group, row = group + 1, band.begin
        while now < (group, row):
            ends = now[0] < group
            runs[now[0]].append((now[1], band.end if ends else row, ranks[at]))
            now = (now[0] + 1, band.begin) if ends else (group, row)
    return runs


def cut_at(state: Columns, band: Band, work: float) -> int:
    """The row, on the granularity, before which rows of the band are nearest to so much work of one head group."""
    step = state.granularity
    first, last = band.begin // step + 1, -(-band.end // step) - 1
    low, high = first, last + 1
    while low < high:
        middle = (low + high) // 2
        if state.cost_of(band.begin, middle * step) < work:
            low = middle + 1
        else:
            high = middle
    before = band.begin if low == first else (low - 1) * step
    after = band.end if low > last else low * step
    nearer = work - state.cost_of(band.begin, before) <= state.cost_of(band.begin, after) - work
    return before if nearer else after
