"""The steps that trainers make of documents: packed in their order, beside seats that only serve, and dealt out as
training does it (planner/deal.py).

In: document lengths, a setting, how rows are packed. Out: steps, each the layouts of its micro-batches. A rank whose
row has more tokens than its documents has a batch of samples that are padded to the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from deepspeed_cad.forecast.machine import Cluster
from deepspeed_cad.forecast.packing import DEALT, deal_by_length, layouts
from deepspeed_cad.forecast.setting import Setting
from deepspeed_cad.layout import Layout, LocalSegments, assemble
from deepspeed_cad.planner.deal import Costs, Step, deal

Lengths = list[int]


def make_steps(
    lengths: Lengths, setting: Setting, context: int, packing: str, micro_batches: int, most: int, batch: int = 1
) -> list[list[Layout]]:
    """Steps of some micro-batches each; the last, partial step is left out. `batch`: documents of unpacked rows, or of
    each rank in a step that is dealt out."""
    if packing in DEALT:
        return list(islice(deal_by_length(lengths, setting.seats, context, batch, packing), most))
    packed = layouts(lengths, setting.seats, context, packing, setting.seats_per_host, batch)
    steps = zip(*[packed] * micro_batches)  # which leaves a partial one out
    return [list(step) for step in islice(steps, most)]


def for_fewer(
    lengths: Lengths, setting: Setting, context: int, packing: str, micro_batches: int, most: int, batch: int = 1
) -> Callable[[int], list[list[Layout]]]:
    """Gives the steps of fewer trainers, beside seats that only serve: the same documents, in more steps.

    `most`: steps of all seats.
    """

    def to_trainers(servers: int) -> list[list[Layout]]:
        trainers, cluster = setting.seats - servers, setting.cluster
        ranks = trainers * setting.sharing * setting.pipeline
        fewer = replace(setting, cluster=Cluster(ranks, min(ranks, cluster.per_host), cluster.machine))
        more = -(-most * setting.seats // trainers)
        steps = make_steps(lengths, fewer, context, packing, micro_batches, more, batch)
        # Behind the trainers, seats that have no rows.
        return [
            [Layout(one.ranks + servers, one.segments, np.pad(one.tokens, (0, servers))) for one in step]
            for step in steps
        ]

    return to_trainers


def deal_out(setting: Setting, step: Sequence[Layout], trainers: int | None = None) -> Sequence[Layout]:
    """The micro-batches of a step as CAD trains them; as they are where nothing is gained, or the setting deals not.

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
    found = deal(given, costs, setting.tolerance, setting.hosts, cuts=trainers is None)
    if found is None:
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


def lay(rows: list[list[int]], padded: bool) -> Layout:
    """Documents of every rank, or samples that are padded to its longest."""
    layout = Layout.from_rank_lengths(rows)
    return replace(layout, tokens=np.array([max(row, default=0) * len(row) for row in rows])) if padded else layout
