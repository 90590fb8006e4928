"""How documents become the rows of GPUs: in their order, or as TRL's `packing_strategy` packs them.

In: document lengths. Out: layouts, one per step of all ranks, and a sentence on what happens to documents that are
longer than a row.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from deepspeed_cad.layout import Layout
from deepspeed_cad.stream import order_by_host

TRL_BATCH = 1000
"""Documents that TRL packs together: the batch size of `Dataset.map`, which it leaves as it is."""

PACKINGS = {
    "in_order": "rows are filled with documents in their order (default)",
    "spanning": "the same, and documents go on on the next GPU (deepspeed_cad.shard_stream)",
    "zigzag": "as spanning, ordered by host and dealt out (shard_stream with zigzag=True and ranks_per_host)",
    "bfd": "TRL's default: best fit, longest first; the end of a document longer than a row is dropped",
    "bfd_split": "TRL's other best fit: a document longer than a row is split",
    "none": "rows of --batch documents each, whatever their lengths; ends beyond the context are dropped",
    "wrapped": "TRL's: a row is cut out of the stream of tokens, and attends to all of itself",
}


SPANNING = ("spanning", "zigzag")
"""Of them, those in which documents go on on other GPUs."""


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
    if packing in ("bfd", "none"):
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
