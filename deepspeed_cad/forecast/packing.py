"""Documents, and how they become the rows of GPUs: in their order, as TRL packs them, or as trainers of rollouts do.

In: document lengths, or the name of a distribution that ships; a setting. Out: steps, each the layouts of its
micro-batches. A rank whose row has more tokens than its documents has samples that are padded to the longest.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count, islice
from typing import NamedTuple

import numpy as np

from deepspeed_cad.forecast.setting import Setting
from deepspeed_cad.layout import Layout, LocalSegments, assemble
from deepspeed_cad.planner.deal import Costs, Step, deal
from deepspeed_cad.stream import order_by_host

LINEAR = 24576
"""What verl adds to a document's length, before it multiplies by that, for linear layers (its `calculate_workload`)."""
TRL_BATCH = 1000
"""Documents that TRL packs together: the batch size of `Dataset.map`, which it leaves as it is."""

PACKINGS = {
    "in_order": "rows are filled with documents in their order (default)",
    "spanning": "the same, and documents go on on the next GPU (deepspeed_cad.shard_stream)",
    "zigzag": "as spanning, ordered by host and dealt out (shard_stream with zigzag=True and ranks_per_host)",
    "bfd": "TRL's default: best fit, longest first; the end of a document longer than a row is dropped",
    "bfd_split": "TRL's other best fit: a document longer than a row is split",
    "none": "rows of --batch documents each, whatever their lengths; ends beyond the context are dropped",
    "by_length": "--batch documents a GPU and step, dealt out by tokens in micro-batches of --context tokens at most, "
    "as OpenRLHF does it with rollouts; ends beyond the context are dropped",
    "by_work": "the same by tokens × (24576 + tokens), an estimate of work, as verl does it (from 0.7 on)",
    "wrapped": "TRL's: a row is cut out of the stream of tokens, and attends to all of itself",
}
SPANNING = ("spanning", "zigzag")
"""Of them, those in which documents go on on other GPUs."""
DEALT = ("by_length", "by_work")
"""Those in which trainers deal out whole documents by themselves, and say how many micro-batches a step has."""


@dataclass(frozen=True)
class Distribution:
    """Document lengths by round quantiles of the kind that such data has, drawn from no data set. Between two of them
    the logarithm of the length is evenly distributed."""

    says: str
    quantiles: tuple[tuple[float, int], ...]
    """(share of documents, length that this share does not exceed), ascending, from 0.0 to 1.0."""

    @property
    def mean(self) -> float:
        """Tokens of a document."""
        pairs = zip(self.quantiles, self.quantiles[1:])
        return sum((end - begin) * (high - low) / math.log(high / low) for (begin, low), (end, high) in pairs)

    def draw(self, tokens: int, seed: int = 0, longest: int | None = None) -> list[int]:
        """Documents of at least so many tokens together, none longer than `longest`."""
        random = np.random.default_rng(seed)
        shares, lengths = (np.array(column, float) for column in zip(*self.quantiles, strict=True))
        drawn: list[int] = []
        missing = tokens
        while missing > 0:
            found = np.exp(np.interp(random.random(4096), shares, np.log(lengths)))
            part = np.clip(found.round().astype(np.int64), 1, longest)
            needed = int(np.searchsorted(np.cumsum(part), missing)) + 1
            drawn += part[:needed].tolist()
            missing -= int(part[:needed].sum())
        return drawn


NAMED = {
    "alike": Distribution("documents of about 4K tokens", ((0.0, 3000), (0.5, 4096), (1.0, 5500))),
    "chat": Distribution(
        "conversations, a few of them long", ((0.0, 60), (0.5, 700), (0.9, 3000), (0.99, 12000), (1.0, 65536))
    ),
    "web": Distribution(
        "web pages as they come: many short, very few long",
        ((0.0, 80), (0.5, 900), (0.9, 5000), (0.99, 30000), (0.999, 150000), (1.0, 524288)),
    ),
    "rollouts": Distribution(
        "prompts with the answers of a model that reasons: a long tail, up to 64K tokens, 20 times the median",
        ((0.0, 200), (0.5, 3200), (0.9, 12000), (0.99, 40000), (1.0, 65536)),
    ),
    "long-mix": Distribution(
        "a mix for long-context training: long documents favoured",
        ((0.0, 300), (0.25, 2000), (0.5, 5000), (0.75, 14000), (0.9, 40000), (0.98, 180000), (1.0, 524288)),
    ),
    "books-and-code": Distribution(
        "whole books and repositories beside short texts",
        ((0.0, 500), (0.4, 4000), (0.7, 32000), (0.9, 160000), (1.0, 1048576)),
    ),
}
"""By name."""


class Rows(NamedTuple):
    """How steps are made of documents."""

    context: int
    """Tokens of a row."""
    packing: str
    micro_batches: int
    batch: int
    """Documents of a row that is not packed, or of each rank in a step that is dealt out."""


def make_steps(lengths: list[int], setting: Setting, rows: Rows, most: int, servers: int = 0) -> list[list[Layout]]:
    """Steps of some micro-batches each; the last, partial step is left out.

    Beside `servers`, seats that have no rows, the others train the same documents in more steps. `most`: steps of all
    seats."""
    seats = setting.seats - servers
    most = -(-most * setting.seats // seats)
    steps: Iterator[Sequence[Layout]]
    if rows.packing in DEALT:
        steps = deal_by_length(lengths, seats, rows)
    else:
        packed = layouts(lengths, seats, rows, min(seats, setting.seats_per_host))
        steps = zip(*[packed] * rows.micro_batches)  # which leaves a partial one out
    return [
        [Layout(seats + servers, one.segments, np.pad(one.tokens, (0, servers))) for one in step]
        for step in islice(steps, most)
    ]


def layouts(lengths: Sequence[int], ranks: int, rows: Rows, ranks_per_host: int) -> Iterator[Layout]:
    """Micro-batches of all ranks; the last, partial one is left out."""
    context, packing = rows.context, rows.packing
    if packing in ("in_order", *SPANNING):
        yield from pack(lengths, ranks, context, packing != "in_order", ranks_per_host if packing == "zigzag" else None)
        return
    if packing == "none":
        whole = [min(length, context) for length in lengths if length > 0]
        found = [whole[at : at + rows.batch] for at in range(0, len(whole) - rows.batch + 1, rows.batch)]
    else:
        found = trl_rows(lengths, context, packing)
        # Trainers shuffle rows. Unshuffled, the fullest rows of best fit would meet in one step.
        found = [found[row] for row in np.random.default_rng(0).permutation(len(found))]
    for first in range(0, len(found) - ranks + 1, ranks):
        yield Layout.from_rank_lengths(found[first : first + ranks])


def pack(
    lengths: Sequence[int], ranks: int, context: int, spanning: bool, zigzag_by_host: int | None = None
) -> Iterator[Layout]:
    """Micro-batches of all ranks, in the order of the documents; the last, partial one is left out.

    Ranks are filled one after the other with whole documents; those longer than the context are split, as packing in
    the Hugging Face trainers does. With `spanning`, documents go on on the next rank instead; with `zigzag_by_host`,
    the number of ranks on a host, each micro-batch is then laid out as `shard_stream` does it with both its options."""
    room = ranks * context if spanning else context
    rows: list[list[int]] = [[]]
    held = 0
    for length in lengths:
        while length:
            part = min(length, room - held if spanning else context)
            if held + part > room:
                if len(rows) == ranks:
                    yield Layout.from_rank_lengths(rows)
                    rows = []
                rows.append([])
                held = 0
            rows[-1].append(part)
            held += part
            length -= part
            if spanning and held == room:
                order = order_by_host(rows[0], ranks, context, zigzag_by_host) if zigzag_by_host else None
                step = [rows[0][one] for one in order] if order is not None else rows[0]
                yield Layout.from_stream(step, ranks, context, zigzag_by_host is not None)
                rows, held = [[]], 0


def deal_by_length(lengths: Sequence[int], ranks: int, rows: Rows) -> Iterator[list[Layout]]:
    """Steps of `rows.batch` documents a rank, each as the layouts of its micro-batches, without the last, partial one.

    As trainers of rollouts deal them out: first as many to every rank, then those of a rank to as many micro-batches as
    the rank with most needs to hold at most `rows.context` tokens in each; every time the longest first to whoever has
    least of what `rows.packing` goes by. On all ranks the micro-batch with most of it comes first."""
    whole = [min(length, rows.context) for length in lengths if length > 0]
    size = ranks * rows.batch
    for first in range(0, len(whole) - size + 1, size):
        dealt = _share_out(whole[first : first + size], ranks, rows.packing, rows.batch)
        for parts in count(-(-max(map(sum, dealt)) // rows.context)):
            found = [_share_out(own, parts, rows.packing) for own in dealt]
            if max(sum(row) for own in found for row in own) <= rows.context:
                break
        yield [Layout.from_rank_lengths(list(turn)) for turn in zip(*found)]


def _share_out(lengths: Sequence[int], parts: int, packing: str, most: int = 1 << 62) -> list[list[int]]:
    """Documents in so many parts of at most `most`; the parts with most work first."""
    linear = LINEAR if packing == "by_work" else math.inf
    found: list[list[int]] = [[] for _ in range(parts)]

    def work(length: int) -> float:
        return length + length * length / linear

    heap = [(0.0, part) for part in range(parts)]
    for length in sorted(lengths, reverse=True):
        held, part = heappop(heap)
        found[part].append(length)
        if len(found[part]) < most:
            heappush(heap, (held + work(length), part))
    return sorted(found, key=lambda own: -sum(map(work, own)))


def trl_rows(lengths: Sequence[int], context: int, packing: str) -> list[list[int]]:
    """Rows as TRL makes them, each the lengths of what attends to itself, in TRL's order."""
    rows: list[list[int]] = []
    for first in range(0, len(lengths), TRL_BATCH):
        batch = [length for length in lengths[first : first + TRL_BATCH] if length > 0]
        if packing == "wrapped":
            rows += [[part] for part in _parts(sum(batch), context)]
        elif packing == "bfd":
            rows += _best_fit([min(length, context) for length in batch], context)
        else:
            rows += _best_fit([part for length in batch for part in _parts(length, context)], context)
    return rows


def _parts(length: int, context: int) -> list[int]:
    return [min(context, length - begin) for begin in range(0, length, context)]


def _best_fit(lengths: Sequence[int], context: int) -> list[list[int]]:
    """The longest first, each into the row that it leaves least room in; of rows with equal room, the one that has had
    it longest."""
    rows: list[list[int]] = []
    with_room: list[tuple[int, int, list[int]]] = []  # room, since when, row; ascending
    for turn, length in enumerate(sorted(lengths, reverse=True)):
        place = bisect_left(with_room, (length,))
        if place == len(with_room):
            rows.append([])
            with_room.append((context, turn, rows[-1]))
        room, _, row = with_room.pop(place)
        row.append(length)
        if room > length:
            insort(with_room, (room - length, turn, row))
    return rows


def say_cut(lengths: Sequence[int], context: int, packing: str) -> str:
    """What becomes of documents that are longer than a row."""
    beyond = [length - context for length in lengths if length > context]
    share = 100.0 * sum(beyond) / max(1, sum(lengths))
    if packing == "wrapped":
        return "wrapped: each row attends to all of itself, whatever documents it holds; no two rows differ"
    if not beyond:
        return "no document is longer than a row"
    head = f"{len(beyond)} documents are longer than a row of {context} tokens: "
    if packing in ("bfd", "none", *DEALT):
        return f"{head}their ends are dropped, {sum(beyond)} tokens ({share:.1f} %)"
    if packing in SPANNING:
        return f"{head}they go on on the next GPU and stay whole; only the ends of a step cut documents"
    return f"{head}each is split there, and its parts do not attend to each other"


def deal_out(setting: Setting, step: Sequence[Layout], trainers: int | None = None) -> Sequence[Layout]:
    """The micro-batches of a step as CAD trains them, dealt out as training does it (planner/deal.py); as they are
    where nothing is gained, or the setting deals not.

    `trainers`: beside so many seats serve the others, which have no documents; they make attention even by themselves.
    """
    whole = setting.pipeline > 1 or setting.sharing > 1
    if not setting.deals or whole or any(layout.segments.begin.any() for layout in step):
        return step
    ranks, work = (step[0].ranks if trainers is None else trainers), setting.work
    columns = [
        (rank, turn, length)
        for rank in range(ranks)
        for turn, layout in enumerate(step)
        for length in layout.segments.end[layout.segments.rank == rank].tolist()
    ]
    rank, turn, length = np.array(columns, np.int64).reshape(-1, 3).T
    tokens = np.stack([layout.tokens[:ranks] for layout in step], axis=1)
    given = Step(rank, turn, length, tokens, padded=bool(tokens.sum() > length.sum()))
    kernels = setting.machine.in_training * setting.shape.groups * setting.attending if trainers is None else 0.0
    each = (work.forward * (2 if setting.checkpointing else 1) + work.backward) * setting.layers + work.loss
    costs = Costs(setting.cost.of(0 * length, length) * kernels, np.full(ranks, each), np.ones(ranks))
    cuts = trainers is None and setting.model.state is None
    if (found := deal(given, costs, setting.tolerance, setting.hosts, cuts)) is None:
        return step
    idle, pieces = [LocalSegments.none(0)] * (step[0].ranks - ranks), found.pieces
    order = pieces.order

    def row(rank: int, turn: int) -> LocalSegments:
        own = order[(pieces.rank[order] == rank) & (pieces.micro_batch[order] == turn)]
        begin, end = pieces.begin[own], pieces.end[own]
        return LocalSegments(begin, end, np.cumsum(end - begin) - (end - begin), int((end - begin).sum()))

    return [
        replace(
            assemble([*(row(rank, turn) for rank in range(ranks)), *idle]),
            tokens=np.pad(found.tokens[:, turn], (0, len(idle))),
        )
        for turn in range(len(step))
    ]
