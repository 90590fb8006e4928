"""Step-level scheduling: the order of a step's micro-batches, and which rank trains which of its documents.

In: the documents of every micro-batch of one optimizer step, of all ranks, and a cost model. Out: an order per rank
(`order_rows`), or a place for every document (`assign_documents`). Plain numpy, pure, the same answer on every rank.

A *row* is one micro-batch of one rank: its packed token buffer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deepspeed_cad.ahead.swaps import RowSums, Swap, find_swap
from deepspeed_cad.cost import PAIRS, CostModel
from deepspeed_cad.layout import Ints

Floats = npt.NDArray[np.float64]

LARGEST_WORK = 2.0**32
"""The work of the heaviest document of a step: whole numbers up to it add up exactly, a million of them and more."""
TINY = 1e-300
"""In place of a divisor that is 0."""
TOKENS_PER_ROW = 64
"""Tokens that may change their rank so that one attention row need not. A low estimate by arithmetic, not measured: Q
and O of one row are 2 KB in one layer's forward where the model is small (8 heads of 64, bf16), and a token is 32 bytes
(four fields of 8)."""
ROWS_KEPT = 32
"""Rows whose token sums are kept while a micro-batch is balanced. Bounds memory: some megabytes each."""
LIGHT_CANDIDATES = 4
"""Light ranks that the heaviest rank of a micro-batch tries to swap with, the lightest first. A choice: bounds time."""
SWAPS_PER_RANK = 8
"""Swaps of one micro-batch, times its ranks. A choice: bounds time, most micro-batches end long before."""


@dataclass(frozen=True, eq=False)
class StepDocuments:
    """Every segment of every micro-batch of a step; segments are ordered by (rank, micro-batch, offset)."""

    rank: Ints
    micro_batch: Ints
    begin: Ints
    """First position in its document; above 0 where a document goes on from the rank before."""
    end: Ints
    tokens: Ints
    """[ranks, micro-batches]: rows of each token buffer."""
    fixed: npt.NDArray[np.bool_]
    """[ranks, micro-batches]: whether the documents of this row must stay in it."""

    @property
    def ranks(self) -> int:
        """Ranks of the CAD group."""
        return int(self.tokens.shape[0])

    @property
    def micro_batches(self) -> int:
        """Micro-batches per rank in this step."""
        return int(self.tokens.shape[1])

    @property
    def length(self) -> Ints:
        """Tokens of each segment."""
        return self.end - self.begin

    @property
    def spans_ranks(self) -> bool:
        """Whether a document goes on from one rank to the next: micro-batches then belong together across ranks."""
        return bool((self.begin > 0).any())

    def work(self, kinds: Sequence[tuple[CostModel, int | None]] = ((PAIRS, None),)) -> Floats:
        """Attention of each segment ([segments]) over kinds of layers, given as (cost, window).

        In units in which the heaviest segment has LARGEST_WORK. Whole numbers, so that every machine adds them up to
        the same.
        """
        work = np.sum([cost.of(self.begin, self.end, window) for cost, window in kinds], axis=0)
        return np.rint(work / max(float(work.max(initial=0.0)), TINY) * LARGEST_WORK)

    def row_work(self, work: Floats) -> Floats:
        """Sum over each row, [ranks, micro-batches]."""
        total = np.zeros(self.tokens.shape)
        np.add.at(total, (self.rank, self.micro_batch), work)
        return total


@dataclass(frozen=True, eq=False)
class Assignment:
    """Where every document of a step is trained; columns have one entry per document of the `StepDocuments`."""

    rank: Ints
    micro_batch: Ints
    place: Ints
    """How many documents come before it in its row."""
    source: Ints
    """[ranks, micro-batches]: the micro-batch of the same rank that fills this row as it is; −1 where documents of
    several rows, or of another rank, meet."""
    imbalance_before: float
    """Work of the slowest rank, summed over micro-batches, over the mean, if micro-batches are only put in order."""
    imbalance: float
    """The same with documents exchanged."""
    tokens_moved: int
    """Tokens that change their rank."""

    def fingerprint(self) -> int:
        """62-bit digest: equal on every rank, or something is wrong."""
        text = b"".join(np.ascontiguousarray(x).tobytes() for x in (self.rank, self.micro_batch, self.place))
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 2


def order_rows(step: StepDocuments, work: Floats) -> Ints:
    """The order in which each rank trains its micro-batches ([ranks, micro-batches] of indices): the heaviest of all
    ranks at the same time, and so on, so that less has to move.

    When they are trained is rank 0's order, that of its loader: what it logs of micro-batches is as without CAD. Where
    documents span ranks all keep their order, because a micro-batch of one rank continues the same one of the rank
    before.
    """
    rows = step.row_work(work)
    if step.spans_ranks:
        return np.broadcast_to(np.arange(step.micro_batches), rows.shape).copy()
    heaviest = np.argsort(-rows, axis=1, kind="stable").astype(np.int64)
    return heaviest[:, np.argsort(heaviest[0])]


def assign_documents(step: StepDocuments, work: Floats, tolerance: float) -> Assignment:
    """Whole documents to ranks and micro-batches, so that the ranks' attention differs less before any of it moves.

    First whole rows change ranks, so that the heaviest rows of the step are trained together, if that helps. Then the
    heaviest and a lighter rank of a micro-batch swap a long document for short ones of the same length, until every
    rank is within `tolerance` (a share of the mean) or nothing that is worth its tokens is left (`is_worth`). No row
    gets longer than the longest row of the step, and rows keep their length where documents allow. The work of the
    slowest rank, summed over micro-batches, never grows. Documents that span ranks, and those of fixed rows, stay.

    `work`: what `step.work()` gives, one number per segment.
    """
    if step.spans_ranks:
        order = order_rows(step, work)
        return _as_assignment(step, work, _Rows(step, work, order))
    rows = _Rows(step, work, order_rows(step, work))
    if not step.fixed.any():
        rows.deal(tolerance)
    budget = int(step.tokens.max(initial=0))
    for micro_batch in range(step.micro_batches):
        _level(rows, micro_batch, tolerance, budget)
    return _as_assignment(step, work, rows)


class _Rows:
    """The rows of a step while documents change places."""

    def __init__(self, step: StepDocuments, work: Floats, order: Ints) -> None:
        self.step, self.work, self.length = step, work, step.length
        starts = np.zeros(step.tokens.size + 1, np.int64)
        counts = np.bincount(step.rank * step.micro_batches + step.micro_batch, minlength=step.tokens.size)
        np.cumsum(counts, out=starts[1:])
        self._held = [np.arange(a, b).tolist() for a, b in zip(starts[:-1], starts[1:])]
        self._load = step.row_work(work)
        home = np.arange(step.ranks)
        self.origin = [[(int(r), int(order[r, m])) for r in home] for m in range(step.micro_batches)]
        """[micro-batch][rank]: the row that was put there whole."""
        self.fill()

    def fill(self) -> None:
        """Take loads, documents and lengths of rows from where they came from."""
        micro_batches = self.step.micro_batches
        self.documents = [[list(self._held[r * micro_batches + m]) for r, m in row] for row in self.origin]
        self.load = np.array([[self._load[r, m] for r, m in row] for row in self.origin]).reshape(micro_batches, -1)
        self.tokens = np.array([[self.step.tokens[r, m] for r, m in row] for row in self.origin], np.int64)
        self.tokens = self.tokens.reshape(micro_batches, -1)
        self.fixed = [[bool(self.step.fixed[r, m]) for r, m in row] for row in self.origin]

    def deal(self, tolerance: float) -> None:
        """Whole rows to other ranks: the heaviest of the step to micro-batch 0, and so on, if that is worth it."""
        ranks, micro_batches = self.step.ranks, self.step.micro_batches
        # Rows that differ by less than the tolerance count as equal, and every rank then keeps one of its own.
        grain = max(float(self._load.mean()) * tolerance, 1.0)
        turn = np.argsort(np.argsort(-self._load, axis=1, kind="stable"), axis=1)
        home = np.repeat(np.arange(ranks), micro_batches)
        heaviest = np.lexsort((home, turn.reshape(-1), -np.rint(self._load / grain).reshape(-1)))
        origin: list[list[tuple[int, int]]] = []
        moved = 0
        for chunk in heaviest.reshape(micro_batches, ranks).tolist():
            given: list[tuple[int, int] | None] = [None] * ranks
            left = []
            for row in chunk:
                at = divmod(row, micro_batches)
                if given[at[0]] is None:
                    given[at[0]] = at
                else:
                    left.append(at)
            free = [rank for rank in range(ranks) if given[rank] is None]
            for rank, at in zip(free, left):
                given[rank] = at
                moved += int(self.step.tokens[at])
            origin.append([at for at in given if at is not None])
        before, earlier = self.load.max(axis=1).sum(), self.origin
        self.origin = origin
        self.fill()
        longest = float(self.work.max(initial=0.0))
        # What the slowest ranks need not hand over any more, summed over micro-batches, against the rows dealt away.
        if not is_worth(float(before - self.load.max(axis=1).sum()), longest, int(self.length.max(initial=0)), moved):
            self.origin = earlier
            self.fill()

    def apply(self, micro_batch: int, heavy: int, light: int, swap: Swap) -> None:
        """Exchange the documents of a swap."""
        for source, target, moving in ((heavy, light, swap.given), (light, heavy, swap.taken)):
            names = set(moving)
            row = self.documents[micro_batch]
            row[source] = [one for one in row[source] if one not in names]
            row[target] = row[target] + sorted(moving)
            self.load[micro_batch, source] -= self.work[moving].sum()
            self.load[micro_batch, target] += self.work[moving].sum()
            self.tokens[micro_batch, source] -= self.length[moving].sum()
            self.tokens[micro_batch, target] += self.length[moving].sum()


def is_worth(gain: float, longest_work: float, longest: int, tokens: int) -> bool:
    """Whether an exchange of documents saves more bytes than it costs:

        tokens <= TOKENS_PER_ROW * gain / last_row

    `gain` is attention that need not move any more, and `last_row` what one moved row takes along at most: ranks hand
    over the last rows of their longest document, and where work grows with the square of the length the last of
    `longest` rows has twice the mean, 2 * longest_work / longest. So the right side counts the rows saved, in tokens.

    `gain` and `longest_work` are in the unit of `StepDocuments.work`; `tokens` change their rank, once per step.
    """
    last_row = 2 * longest_work / max(longest, 1)
    return gain > 0 and tokens <= TOKENS_PER_ROW * gain / max(last_row, TINY)


def _level(rows: _Rows, micro_batch: int, tolerance: float, budget: int) -> None:
    """Swap documents between the ranks of one micro-batch."""
    load, fixed = rows.load[micro_batch], rows.fixed[micro_batch]
    mean = float(load.mean())
    open_ranks = [rank for rank in range(len(load)) if not fixed[rank]]
    stuck: set[int] = set()
    sums: dict[int, RowSums] = {}

    def sums_of(rank: int) -> RowSums:
        if rank not in sums:
            if len(sums) >= ROWS_KEPT:
                del sums[next(iter(sums))]
            sums[rank] = RowSums(rows.documents[micro_batch][rank], rows.length)
        return sums[rank]

    for _ in range(SWAPS_PER_RANK * len(load)):
        above = [rank for rank in open_ranks if rank not in stuck and load[rank] > mean * (1 + tolerance)]
        if not above:
            return
        heavy = max(above, key=lambda rank: (load[rank], -rank))
        below = sorted((rank for rank in open_ranks if load[rank] < mean), key=lambda rank: (load[rank], rank))
        best: tuple[float, int, Swap] | None = None
        for light in below[:LIGHT_CANDIDATES]:
            swap = find_swap(
                sums_of(heavy), sums_of(light), rows.length, rows.work,
                wanted=min(load[heavy] - mean, (load[heavy] - load[light]) / 2),
                most=float(load[heavy] - load[light]),
                room=(budget - int(rows.tokens[micro_batch, heavy]), budget - int(rows.tokens[micro_batch, light])),
            )  # fmt: skip
            if swap is None:
                continue
            after = np.array([load[heavy] - swap.work, load[light] + swap.work])
            excess = np.maximum(np.array([load[heavy], load[light]]) - mean, 0).sum()
            gain = float(excess - np.maximum(after - mean, 0).sum())
            longest = swap.given[0]
            if not is_worth(gain, float(rows.work[longest]), int(rows.length[longest]), swap.tokens):
                continue
            if best is None or gain > best[0]:
                best = (gain, light, swap)
        if best is None:
            stuck.add(heavy)
        else:
            rows.apply(micro_batch, heavy, best[1], best[2])
            sums.pop(heavy, None)
            sums.pop(best[1], None)


def _as_assignment(step: StepDocuments, work: Floats, rows: _Rows) -> Assignment:
    count = len(work)
    to_rank, to_micro_batch, place = (np.zeros(count, np.int64) for _ in range(3))
    source = np.full((step.ranks, step.micro_batches), -1, np.int64)
    for micro_batch, by_rank in enumerate(rows.documents):
        for rank, documents in enumerate(by_rank):
            to_rank[documents], to_micro_batch[documents] = rank, micro_batch
            place[documents] = np.arange(len(documents))
            home, own = rows.origin[micro_batch][rank]
            if home == rank and documents == rows._held[home * step.micro_batches + own]:
                source[rank, micro_batch] = own
    ordered = np.take_along_axis(step.row_work(work), order_rows(step, work), axis=1)
    mean = max(float(work.sum()) / max(step.ranks, 1), TINY)
    after = np.zeros_like(ordered)
    np.add.at(after, (to_rank, to_micro_batch), work)
    return Assignment(
        to_rank, to_micro_batch, place, source,
        float(ordered.max(axis=0).sum()) / mean, float(after.max(axis=0).sum()) / mean,
        int(step.length[to_rank != step.rank].sum()),
    )  # fmt: skip
