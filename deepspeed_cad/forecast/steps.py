"""The steps that trainers make of documents, with and without seats that only serve.

In: document lengths, a setting, how rows are packed. Out: steps, each the layouts of its micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import numpy as np

from deepspeed_cad.forecast.cluster import Cluster
from deepspeed_cad.forecast.packing import layouts
from deepspeed_cad.forecast.setting import Setting
from deepspeed_cad.layout import Layout

Lengths = list[int]


def make_steps(
    lengths: Lengths, setting: Setting, context: int, packing: str, micro_batches: int, most: int, batch: int = 1
) -> list[list[Layout]]:
    """Steps of some micro-batches each; the last, partial step is left out. `batch`: documents of unpacked rows."""
    packed = iter(layouts(lengths, setting.seats, context, packing, setting.seats_per_host, batch))
    steps: list[list[Layout]] = []
    while len(steps) < most:
        step = list(islice(packed, micro_batches))
        if len(step) < micro_batches:
            break
        steps.append(step)
    return steps


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
        return [[_widen(layout, servers) for layout in step] for step in steps]

    return to_trainers


def _widen(layout: Layout, servers: int) -> Layout:
    """With seats behind the trainers that have no rows."""
    return Layout(layout.ranks + servers, layout.segments, np.append(layout.tokens, np.zeros(servers, np.int64)))
