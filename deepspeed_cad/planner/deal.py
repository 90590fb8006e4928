"""Documents dealt out to ranks before a step, whole or cut, and the order of its micro-batches.

In: the documents of an optimizer step, and what they cost in attention and outside. Out: a rank and a micro-batch for
each document, or for each piece of one. A *row* is one micro-batch of one rank: its token buffer.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import itemgetter

import numpy as np

from deepspeed_cad.layout import Ints
from deepspeed_cad.planner.plan import Floats, digest

SHORTER = 0.01
"""Share of a step by which it must end earlier for documents to move. A choice: less is within what plans miss."""
SLACK = 0.005
"""Share of a row that may stay empty, or be too much, before a document is cut. A choice."""
HALVINGS = 40
"""Of the range in which the cost of a row is looked for, where batches are padded: to a billionth of the widest row."""


@dataclass(frozen=True, eq=False)
class Step:
    """What an optimizer step trains, of all ranks, as loaded. Columns have an entry per document, or per sample where
    batches are padded, ordered by (rank, micro-batch, place)."""

    rank: Ints
    micro_batch: Ints
    length: Ints
    tokens: Ints
    """[ranks, micro-batches] of each row, padding included."""
    padded: bool = False
    """Whether a row is a batch whose samples are padded to the longest."""

    def tokens_of(self, pieces: Pieces) -> Ints:
        """[ranks, micro-batches] of rows in which documents lie so."""
        at, tokens, count = (pieces.rank, pieces.micro_batch), np.zeros_like(self.tokens), np.zeros_like(self.tokens)
        if self.padded:
            np.maximum.at(tokens, at, pieces.end)
            np.add.at(count, at, 1)
            return tokens * count
        np.add.at(tokens, at, pieces.end - pieces.begin)
        return tokens

    def sums(self, work: Floats) -> Floats:
        """[ranks, micro-batches] of what each document has, as loaded."""
        found = np.zeros(self.tokens.shape)
        np.add.at(found, (self.rank, self.micro_batch), work)
        return found

    def whole(self, rank: Ints, micro_batch: Ints) -> Pieces:
        return Pieces(np.arange(len(self.length)), np.zeros_like(self.length), self.length, rank, micro_batch)


@dataclass(frozen=True, eq=False)
class Pieces:
    """Documents, or parts of them, and where they are trained: in the order of documents and of their tokens. Pieces of
    a document lie in one micro-batch of consecutive ranks, at the end of a row or, where it went on, at the begin."""

    document: Ints
    begin: Ints
    end: Ints
    rank: Ints
    micro_batch: Ints

    @property
    def order(self) -> Ints:
        """Of pieces, by rank, micro-batch and place in the row."""
        ends = np.append(self.begin[1:] == 0, True)
        return np.lexsort((self.document, ~ends, self.begin == 0, self.micro_batch, self.rank))


@dataclass(frozen=True, eq=False)
class Costs:
    """What a step is made of, all in one unit."""

    work: Floats
    """[documents] of attention."""
    each: Floats
    """[ranks] of a token outside attention."""
    speed: Floats
    """[ranks] of attention; 0: runs none."""

    def rows(self, step: Step, pieces: Pieces, tokens: Ints) -> tuple[Floats, Floats]:
        """[ranks, micro-batches] outside attention, and in it: of a piece by its share of query-key pairs."""
        attention, length = np.zeros(step.tokens.shape), step.length[pieces.document].astype(np.float64)
        share = (pieces.end**2 - pieces.begin**2) / np.maximum(length, 1.0) ** 2
        np.add.at(attention, (pieces.rank, pieces.micro_batch), self.work[pieces.document] * share)
        return tokens * self.each[:, None], attention

    def ends(self, before: Floats, attention: Floats, host: Ints) -> tuple[float, float]:
        """When a step ends whose attention is balanced inside hosts, and one where every rank runs its own. Until the
        last rank of a host comes to its attention the others run their own; what then is left they share."""
        last, left = np.zeros((2, int(host.max()) + 1, before.shape[1]))
        np.maximum.at(last, host, before)
        np.add.at(left, host, np.maximum(attention - (last[host] - before) * self.speed[:, None], 0.0))
        balanced = float((last + left / np.bincount(host, self.speed)[:, None]).max(axis=0).sum())
        per_work = np.divide(1.0, self.speed, out=np.zeros(len(self.speed)), where=self.speed > 0)
        return balanced, sum(map(float, (before + attention * per_work[:, None]).max(axis=0)))


@dataclass(frozen=True, eq=False)
class Dealt:
    """Where every document of a step is trained."""

    pieces: Pieces
    tokens: Ints
    """[ranks, micro-batches] of the rows."""
    before: float
    """When the step ends if documents stay and attention is balanced; in the unit of the costs."""
    after: float
    """When it ends as dealt out."""

    def fingerprint(self) -> int:
        """62-bit digest: equal on every rank, or something is wrong."""
        return digest(np.stack([getattr(self.pieces, one.name) for one in fields(Pieces)]).astype(np.int64)) >> 2


def order_rows(rows: Floats) -> Ints:
    """The order in which each rank trains its micro-batches ([ranks, micro-batches] of indices; `rows`: attention): the
    heaviest of all ranks at the same time, in the order of rank 0's loader: what it logs is as without CAD."""
    heaviest = np.argsort(-rows, axis=1, kind="stable").astype(np.int64)
    return heaviest[:, np.argsort(heaviest[0])]


def deal(step: Step, costs: Costs, tolerance: float, hosts: Ints | None = None, cuts: bool = False) -> Dealt | None:
    """Documents to ranks and micro-batches, so that all rows take as long; None where that gains nothing.

    Longest first, each to the row that has least to do with it, on several hosts (`hosts`: [ranks] number of each
    rank's) first to the host that has least. Padded samples go in order of their lengths, so that similar ones meet. No
    row gets more tokens than the largest had, none gets no document, and the step never ends later than with balanced
    attention alone. Documents move where it ends SHORTER, or where ranks, each with its own attention, end earlier by
    `tolerance` (a share of the step), so that less moves. With `cuts` they are cut where it ends SHORTER still."""
    ranks, micro_batches = step.tokens.shape
    if len(step.length) < step.tokens.size or step.tokens.size == 1:
        return None
    order = np.argsort(order_rows(step.sums(costs.work)), axis=1)
    loaded = order[step.rank, step.micro_batch]
    tokens = np.take_along_axis(step.tokens, np.argsort(order, axis=1), axis=1)
    host = np.zeros(ranks, np.int64) if hosts is None else np.unique(hosts[:ranks], return_inverse=True)[1]
    before = costs.rows(step, step.whole(step.rank, loaded), tokens)
    ends, alone = costs.ends(*before, host)
    least = (float(before[0].sum()) + float(before[1].sum())) / ranks
    if not step.padded and alone <= (1.0 + SHORTER) * least:
        return None
    best: Dealt | None = None

    # By tokens alone where rows are too full for the other way.
    by_tokens = Costs(np.zeros_like(costs.work), costs.each, costs.speed)
    whole = [_deal_samples(step, by) if step.padded else _deal_documents(step, by, host) for by in (costs, by_tokens)]
    for pieces in [*whole, _cut_documents(step, costs, host) if cuts and not step.padded else None]:
        if pieces is None:
            continue
        held = step.tokens_of(pieces)
        after, own = costs.ends(*costs.rows(step, pieces, held), host)
        worth = after <= (1.0 - SHORTER) * ends or own <= alone - tolerance * ends
        if worth and after <= ends and (best is None or after < (1.0 - SHORTER) * best.after):
            best = Dealt(pieces, held, ends, after)
    return best


def _cut_documents(step: Step, costs: Costs, host: Ints) -> Pieces | None:
    """Rows of equal seconds outside attention, on each host by itself; None where they have no room. Row after row is
    filled by the longest document that fits, and where none does by a part of the longest of all."""
    micro_batches, most = step.tokens.shape[1], int(step.tokens.max())
    seconds = costs.work + step.length * float(costs.each.mean())
    if (np.diff(host) < 0).any() or seconds.max() * (int(host.max()) + 1) * micro_batches > seconds.sum():
        # A document that is cut lies on consecutive ranks, and one that is more than a host's share on several hosts.
        host = np.zeros_like(host)
    size = np.repeat(np.bincount(host), micro_batches)
    # What a piece lacks of its document, the target of its last token, takes one more.
    room, load = size * (most - 1), np.zeros(len(size))
    given: list[list[int]] = [[] for _ in size]
    for document in np.argsort(-seconds, kind="stable").tolist():
        fits = room >= step.length[document]
        if not fits.any():
            return None
        group = int(np.argmin(np.where(fits, load, np.inf)))
        given[group].append(document)
        room[group] -= step.length[document]
        load[group] += seconds[document] / size[group]
    rows: list[tuple[int, int, int, int, int]] = []
    for group, documents in enumerate(given):
        one, turn = divmod(group, micro_batches)
        filled = _fill(step.length[documents].tolist(), (1.0 / costs.each[host == one]).tolist(), most - 1)
        if filled is None:
            return None
        members = np.flatnonzero(host == one).tolist()
        rows += [(documents[at], begin, end, members[row], turn) for at, begin, end, row in filled]
    return Pieces(*np.array(sorted(rows), np.int64).T)


def _fill(lengths: Sequence[int], shares: Sequence[float], most: int) -> list[tuple[int, int, int, int]] | None:
    """Document, begin, end and row of pieces that fill rows by their shares, at most `most` tokens in each; None where
    a row would stay empty, or something is left."""
    left = sorted((length, one) for one, length in enumerate(lengths))
    pieces: list[tuple[int, int, int, int]] = []
    document, begin = -1, 0
    tokens = sum(lengths)
    for row, share in enumerate(shares):
        level = math.ceil(tokens * share / sum(shares[row:]))
        size = room = min(level, most)
        slack = min(int(SLACK * level), most - size)
        while room > 0 and (document >= 0 or left):
            if document < 0:
                at = bisect_right(left, room + slack, key=itemgetter(0)) - 1
                if at < 0 and room <= max(slack, 1):
                    # Not cut behind its first token: that a copy of the next follows must show (`layout.assemble`).
                    break
                document, begin = left.pop(at)[1], 0
            end = lengths[document] if lengths[document] - begin <= room + slack else begin + room
            pieces.append((document, begin, end, row))
            room -= end - begin
            document, begin = (-1, 0) if end == lengths[document] else (document, end)
        if room == size:
            return None
        tokens -= size - room
    return None if document >= 0 or left else pieces


def _deal_documents(step: Step, costs: Costs, host: Ints) -> Pieces | None:
    """Whole documents; None where rows are too full."""
    ranks, micro_batches = step.tokens.shape
    each = float(costs.each.mean())
    whole = costs.work + step.length * each
    longest = np.sort(step.length)[::-1].astype(np.float64)
    # Where a long document makes a micro-batch long, all get more in it.
    level, rest = np.zeros(micro_batches), float(whole.sum())
    for turn in range(micro_batches):
        # Its share of what is left, or its longest document outside attention.
        level[turn] = max(longest[turn * ranks] * each, rest / (ranks * (micro_batches - turn)))
        rest -= ranks * level[turn]
    # Who meets in a micro-batch: [groups, ranks of a host], -1 where a host has fewer.
    size = np.bincount(host)
    members = np.full((len(size), size.max()), -1)
    for one in range(len(size)):
        members[one, : size[one]] = np.flatnonzero(host == one)
    turn_of = np.arange(micro_batches).repeat(len(size))
    members, size = np.tile(members, (micro_batches, 1)), np.tile(size, micro_batches)
    empty = members >= 0
    load = np.where(empty, (level[0] - level)[turn_of][:, None], np.inf)
    total = np.cumsum(np.where(empty, load, 0.0), axis=1)[:, -1]
    room, empties = np.where(empty, step.tokens.max(), -1), step.tokens.size
    speed = np.where(costs.speed > 0, costs.speed, np.inf)
    rank, micro_batch = np.zeros_like(step.length), np.zeros_like(step.length)
    order = np.argsort(-whole, kind="stable")
    for left, document in zip(range(len(order), 0, -1), order.tolist()):
        length = step.length[document]
        # The emptiest row of the emptiest group, or of those that have room.
        at = int(np.argmin(total / size))
        place = int(np.argmin(load[at]))
        if left <= empties or room[at, place] < length:
            fits = (room >= length) & (empty if left <= empties else True)
            if not fits.any():
                return None
            at = int(np.argmin(np.where(fits.any(axis=1), total / size, np.inf)))
            place = int(np.argmin(np.where(fits[at], load[at], np.inf)))
        chosen = members[at, place]
        rank[document], micro_batch[document] = chosen, turn_of[at]
        mine = costs.each[chosen] * length + costs.work[document] / speed[chosen]
        load[at, place] += mine
        total[at] += mine
        room[at, place] -= length
        empties -= int(empty[at, place])
        empty[at, place] = False
    return step.whole(rank, micro_batch)


def _deal_samples(step: Step, costs: Costs) -> Pieces | None:
    """Samples; None where they do not fit. Ordered by length and cut so that rows cost alike."""
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
    if (begins := cut(high)) is None:
        return None
    for _ in range(HALVINGS):
        middle = 0.5 * (low + high)
        found = cut(middle)
        low, high, begins = (middle, high, begins) if found is None else (low, middle, found)
    row = np.zeros(len(length), np.int64)
    row[order] = np.repeat(np.arange(count), np.diff(begins))
    return step.whole(row % ranks, row // ranks)
