"""Whole documents dealt out to ranks before a step, and the order of its micro-batches.

Unpacked training gives each rank some documents, so ranks differ in tokens, and no attention that moves can fill what
that leaves idle. Token ids travel for nothing. In: the documents of all micro-batches of an optimizer step, what a
token costs outside attention, what each document's attention costs. Out: a rank and a micro-batch for each document.
Pure, the same on every rank; training and the forecast ask it alike.

A *row* is one micro-batch of one rank: its token buffer.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from deepspeed_cad.layout import Ints
from deepspeed_cad.planner.finish import common_finish
from deepspeed_cad.planner.plan import Floats

SHORTER = 0.01
"""Share of a step by which it must end earlier for documents to move. A choice: less is within what plans miss."""
HALVINGS = 40
"""Of the range in which the cost of a row is looked for, where batches are padded: to a billionth of the widest row."""


@dataclass(frozen=True, eq=False)
class Step:
    """What an optimizer step trains, of all ranks, as their loaders gave it. Columns have an entry per document, or per
    sample where batches are padded, ordered by (rank, micro-batch, place)."""

    rank: Ints
    micro_batch: Ints
    length: Ints
    """Tokens."""
    tokens: Ints
    """[ranks, micro-batches] of each row, padding included."""
    padded: bool = False
    """Whether a row is a batch whose samples are padded to the longest."""

    def tokens_of(self, rank: Ints, micro_batch: Ints) -> Ints:
        """[ranks, micro-batches] of rows in which documents lie so."""
        at = (rank, micro_batch)
        tokens = np.zeros_like(self.tokens)
        if not self.padded:
            np.add.at(tokens, at, self.length)
            return tokens
        count = np.zeros_like(tokens)
        np.add.at(count, at, 1)
        np.maximum.at(tokens, at, self.length)
        return tokens * count

    def sums(self, work: Floats) -> Floats:
        """[ranks, micro-batches] of what each document has, as loaded."""
        return self._sums(work, self.rank, self.micro_batch)

    def _sums(self, work: Floats, rank: Ints, micro_batch: Ints) -> Floats:
        found = np.zeros(self.tokens.shape)
        np.add.at(found, (rank, micro_batch), work)
        return found


@dataclass(frozen=True, eq=False)
class Costs:
    """What a step is made of, all in one unit."""

    work: Floats
    """[documents] of attention."""
    each: Floats
    """[ranks] of a token outside attention."""
    speed: Floats
    """[ranks] of attention; 0: runs none."""

    def rows(self, step: Step, rank: Ints, micro_batch: Ints, tokens: Ints) -> tuple[Floats, Floats]:
        """[ranks, micro-batches] outside attention, and in it."""
        return tokens * self.each[:, None], step._sums(self.work, rank, micro_batch)

    def ends(self, before: Floats, attention: Floats) -> tuple[float, float]:
        """When a step ends whose attention is balanced over ranks, and one where every rank runs its own."""
        balanced = sum(
            max(float(common_finish(own.sum(keepdims=True), begin, self.speed)[0]), float(begin.max()))
            for begin, own in zip(before.T, attention.T)
        )
        per_work = np.divide(1.0, self.speed, out=np.zeros(len(self.speed)), where=self.speed > 0)
        alone = before + attention * per_work[:, None]
        return balanced, sum(map(float, alone.max(axis=0)))

    def of(self, document: int, tokens: int, rank: int) -> float:
        """One document on a rank."""
        speed = self.speed[rank]
        return float(self.each[rank] * tokens + (self.work[document] / speed if speed > 0 else 0.0))


@dataclass(frozen=True, eq=False)
class Dealt:
    """Where every document of a step is trained."""

    rank: Ints
    micro_batch: Ints
    tokens: Ints
    """[ranks, micro-batches] of the rows."""
    before: float
    """When the step ends if documents stay and attention is balanced; in the unit of the costs."""
    after: float
    """When it ends as dealt out."""

    def fingerprint(self) -> int:
        """62-bit digest: equal on every rank, or something is wrong."""
        text = np.ascontiguousarray(self.rank).tobytes() + np.ascontiguousarray(self.micro_batch).tobytes()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 2


def order_rows(rows: Floats) -> Ints:
    """The order in which each rank trains its micro-batches ([ranks, micro-batches] of indices): the heaviest of all
    ranks at the same time, and so on, so that less attention has to move.

    When they are trained is rank 0's order, that of its loader: what it logs of micro-batches is as without CAD.
    `rows`: [ranks, micro-batches] attention.
    """
    heaviest = np.argsort(-rows, axis=1, kind="stable").astype(np.int64)
    return heaviest[:, np.argsort(heaviest[0])]


def deal(step: Step, costs: Costs, tolerance: float, hosts: Ints | None = None) -> Dealt | None:
    """Whole documents to ranks and micro-batches, so that all rows take as long; None where that gains nothing.

    Longest first, each to the row that has least to do with it. On several hosts first to the host that has least, so
    that hosts are even and attention of a long document goes to ranks beside its own. Padded samples are dealt out in
    order of their lengths, so that similar ones meet. No row gets more tokens than the largest row had, none gets no
    document, and the step never ends later than with balanced attention alone. Documents move where it ends SHORTER,
    or where ranks, each with its own attention, end earlier by `tolerance` (a share of the step), so that less moves.

    `hosts`: [ranks] number of each rank's; None: all share one.
    """
    ranks, micro_batches = step.tokens.shape
    if len(step.length) < step.tokens.size or step.tokens.size == 1:
        return None
    order = np.argsort(order_rows(step.sums(costs.work)), axis=1)
    loaded = order[step.rank, step.micro_batch]
    tokens = np.take_along_axis(step.tokens, np.argsort(order, axis=1), axis=1)
    before = costs.rows(step, step.rank, loaded, tokens)
    ends, alone = costs.ends(*before)
    least = (float(before[0].sum()) + float(before[1].sum())) / ranks
    if not step.padded and alone <= (1.0 + SHORTER) * least:
        return None
    best: Dealt | None = None
    for work in (costs.work, np.zeros_like(costs.work)):
        # By tokens alone where rows are too full for the other way.
        by = Costs(work, costs.each, costs.speed)
        found = _deal_samples(step, by) if step.padded else _deal_documents(step, by, hosts)
        if found is None:
            continue
        rank, micro_batch = found
        held = step.tokens_of(rank, micro_batch)
        after, own = costs.ends(*costs.rows(step, rank, micro_batch, held))
        worth = after <= (1.0 - SHORTER) * ends or own <= alone - tolerance * ends
        if worth and after <= ends and (best is None or after < (1.0 - SHORTER) * best.after):
            best = Dealt(rank, micro_batch, held, ends, after)
    return best


def _deal_documents(step: Step, costs: Costs, hosts: Ints | None) -> tuple[Ints, Ints] | None:
    """Ranks and micro-batches of documents; None where rows are too full."""
    ranks, micro_batches = step.tokens.shape
    rank_of, turn_of = np.divmod(np.arange(step.tokens.size), micro_batches)
    whole = costs.work + step.length * float(costs.each.mean())
    order = np.argsort(-whole, kind="stable")
    # Who meets: ranks of a host in a micro-batch. Where a long document makes a micro-batch long, all get more in it.
    host = np.zeros(ranks, np.int64) if hosts is None else np.unique(hosts[:ranks], return_inverse=True)[1]
    group = turn_of * (int(host.max()) + 1) + host[rank_of]
    longest = np.sort(step.length)[::-1].astype(np.float64)
    level = _levels(longest * float(costs.each.mean()), float(whole.sum()), ranks, micro_batches)
    load = (level[0] - level)[turn_of]
    size = np.bincount(group)
    total = np.bincount(group, load)
    room, empty = np.full(len(load), int(step.tokens.max())), np.ones(len(load), bool)
    groups = [(total[one] / size[one], one) for one in range(len(size))]
    members = [[(load[row], row) for row in np.flatnonzero(group == one).tolist()] for one in range(len(size))]
    for heap in (groups, *members):
        heapify(heap)
    rows = np.zeros(len(order), np.int64)
    empties = len(load)
    for left, document in zip(range(len(order), 0, -1), order.tolist()):
        length = int(step.length[document])
        row = -1
        if left > empties:
            # The emptiest row of the emptiest group; what heaps say of others may be out of date.
            while groups[0][0] != total[groups[0][1]] / size[groups[0][1]]:
                heappop(groups)
            heap = members[groups[0][1]]
            while heap[0][0] != load[heap[0][1]]:
                heappop(heap)
            row = heap[0][1] if room[heap[0][1]] >= length else -1
        if row < 0:
            fits = (room >= length) & (empty if left <= empties else True)
            if not fits.any():
                return None
            open_groups = np.bincount(group[fits], minlength=len(size)) > 0
            fits &= group == np.argmin(np.where(open_groups, total / size, np.inf))
            row = int(np.argmin(np.where(fits, load, np.inf)))
        at, mine = group[row], costs.of(document, length, rank_of[row])
        rows[document] = row
        load[row] += mine
        total[at] += mine
        room[row] -= length
        empties -= int(empty[row])
        empty[row] = False
        heappush(groups, (total[at] / size[at], at))
        heappush(members[at], (load[row], row))
    return rank_of[rows], turn_of[rows]


def _levels(floors: Floats, total: float, ranks: int, micro_batches: int) -> Floats:
    """[micro-batches] how long each should take: its share of what is left, or its longest document outside attention.

    `floors`: of documents, the longest first; `total`: of all of them, with attention.
    """
    levels = np.zeros(micro_batches)
    for turn in range(micro_batches):
        levels[turn] = max(floors[turn * ranks], total / (ranks * (micro_batches - turn)))
        total -= ranks * levels[turn]
    return levels


def _deal_samples(step: Step, costs: Costs) -> tuple[Ints, Ints] | None:
    """Ranks and micro-batches of samples; None where they do not fit. By length, cut so that rows cost alike."""
    ranks, count = step.tokens.shape[0], step.tokens.size
    most, each = int(step.tokens.max()), float(costs.each.mean())
    order = np.argsort(-step.length, kind="stable")
    length = step.length[order].tolist()
    total = np.append(0.0, np.cumsum(costs.work[order])).tolist()

    def cut(dearest: float) -> list[int] | None:
        """First samples of rows that cost at most so much, and the end; None where that is too little."""
        begins, level = [0], dearest
        for row in range(count):
            begin = begins[-1]
            if row % ranks == 0:
                # Others wait for the longest sample anyway.
                level = max(dearest, length[begin] * each)
            # One sample at least for each row that comes.
            longest = min(len(length) - begin - (count - row - 1), most // max(length[begin], 1))
            fit = bisect_right(
                range(1, longest + 1), level,
                key=lambda n: n * length[begin] * each + total[begin + n] - total[begin],
            )  # fmt: skip
            begins.append(begin + max(fit, 1))
        return begins if begins[-1] == len(length) else None

    low, high = 0.0, len(length) * length[0] * each + total[-1]
    begins = cut(high)
    if begins is None:
        return None
    for _ in range(HALVINGS):
        middle = 0.5 * (low + high)
        found = cut(middle)
        low, high, begins = (middle, high, begins) if found is None else (low, middle, found)
    row = np.zeros(len(length), np.int64)
    row[order] = np.repeat(np.arange(count), np.diff(begins))
    return row % ranks, row // ranks
