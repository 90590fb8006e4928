"""How documents become the rows of GPUs: in their order, or as TRL's `packing_strategy` packs them.

In: document lengths. Out: layouts, one per step of all ranks, and a sentence on what happens to documents that are
longer than a row.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush

import numpy as np

from deepspeed_cad.layout import Layout
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


def layouts(
    lengths: Sequence[int], ranks: int, context: int, packing: str, ranks_per_host: int | None = None, batch: int = 1
) -> Iterator[Layout]:
    """Micro-batches of all ranks; the last, partial one is left out. `ranks_per_host`: None: all are on one; `batch`:
    documents of a row that is not packed."""
    if packing in ("in_order", "spanning", "zigzag"):
        by_host = min(ranks_per_host or ranks, ranks) if packing == "zigzag" else None
        yield from pack(list(lengths), ranks, context, packing != "in_order", by_host)
        return
    if packing == "none":
        whole = [min(length, context) for length in lengths if length > 0]
        for first in range(0, len(whole) - ranks * batch + 1, ranks * batch):
            step = whole[first : first + ranks * batch]
            yield Layout.from_rank_lengths([step[at : at + batch] for at in range(0, len(step), batch)])
        return
    rows = trl_rows(lengths, context, packing)
    # Trainers shuffle rows. Unshuffled, the fullest rows of best fit would meet in one step.
    order = np.random.default_rng(0).permutation(len(rows))
    for first in range(0, len(rows) - ranks + 1, ranks):
        yield Layout.from_rank_lengths([rows[row] for row in order[first : first + ranks]])


def pack(
    lengths: list[int], ranks: int, context: int, spanning: bool, zigzag_by_host: int | None = None
) -> Iterator[Layout]:
    """Micro-batches of all ranks, in the order of the documents; the last, partial one is left out.

    Ranks are filled one after the other with whole documents; those longer than the context are split, as packing in
    the Hugging Face trainers does. With `spanning`, documents go on on the next rank instead; with `zigzag_by_host`,
    the number of ranks on a host, each micro-batch is then laid out as `shard_stream` does it with both its options.
    """
    if spanning:
        budget, step, held = ranks * context, [], 0
        for length in lengths:
            while length:
                part = min(length, budget - held)
                step.append(part)
                held += part
                length -= part
                if held == budget:
                    if zigzag_by_host is not None:
                        step = [step[one] for one in order_by_host(step, ranks, context, zigzag_by_host)]
                    yield Layout.from_stream(step, ranks, context, zigzag_by_host is not None)
                    step, held = [], 0
        return
    rows: list[list[int]] = [[]]
    held = 0
    for length in lengths:
        while length:
            part = min(length, context)
            if held + part > context:
                if len(rows) == ranks:
                    yield Layout.from_rank_lengths(rows)
                    rows = []
                rows.append([])
                held = 0
            rows[-1].append(part)
            held += part
            length -= part


def deal_by_length(
    lengths: Sequence[int], ranks: int, context: int, batch: int, packing: str
) -> Iterator[list[Layout]]:
    """Steps of `batch` documents a rank, each as the layouts of its micro-batches; the last, partial one is left out.

    As trainers of rollouts deal them out by themselves: first as many to every rank, then those of a rank to as many
    micro-batches as the rank with most needs, so that each holds at most `context` tokens; every time the longest first
    to whoever has least of what `packing` goes by. On all ranks the micro-batch with most of it comes first.
    """
    whole = [min(length, context) for length in lengths if length > 0]
    for first in range(0, len(whole) - ranks * batch + 1, ranks * batch):
        dealt = _share_out(whole[first : first + ranks * batch], ranks, packing, batch)
        count = -(-max(map(sum, dealt)) // context)
        while True:
            rows = [_share_out(own, count, packing) for own in dealt]
            if max(sum(row) for own in rows for row in own) <= context:
                break
            count += 1
        yield [Layout.from_rank_lengths(list(row)) for row in zip(*rows)]


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
    strategy: Callable[[Sequence[int], int], list[list[int]]] = _wrapped if packing == "wrapped" else _best_fit
    rows: list[list[int]] = []
    for first in range(0, len(lengths), TRL_BATCH):
        batch = [length for length in lengths[first : first + TRL_BATCH] if length > 0]
        if packing == "bfd":
            batch = [min(length, context) for length in batch]
        elif packing == "bfd_split":
            batch = [part for length in batch for part in _parts(length, context)]
        rows += strategy(batch, context)
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


def _parts(length: int, context: int) -> list[int]:
    whole, rest = divmod(length, context)
    return [context] * whole + [rest] * (rest > 0)


def _wrapped(lengths: Sequence[int], context: int) -> list[list[int]]:
    return [[part] for part in _parts(sum(lengths), context)]


def _best_fit(lengths: Sequence[int], context: int) -> list[list[int]]:
    """The longest first, each into the row that it leaves least room in; of rows with equal room, the one that has had
    it longest."""
    rows: list[list[int]] = []
    with_room: dict[int, deque[list[int]]] = {}
    rooms: list[int] = []  # those that some row has, ascending
    for length in sorted(lengths, reverse=True):
        place = bisect_left(rooms, length)
        if place == len(rooms):
            rows.append([])
            row, room = rows[-1], context
        else:
            room = rooms[place]
            row = with_room[room].popleft()
            if not with_room[room]:
                del rooms[place]
        row.append(length)
        room -= length
        if room:
            if not with_room.setdefault(room, deque()):
                insort(rooms, room)
            with_room[room].append(row)
    return rows
