"""What all ranks of a pipeline tell each other: what their stages are made of, and what a step trains.

In: this rank's layers, or its micro-batches. Out: those of all, the same on every rank, or one error on all of them.
Runs on the look-ahead thread, on the CPU group.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple

import numpy as np
import torch

from deepspeed_cad.ahead.announced import compare
from deepspeed_cad.ahead.documents import Announcement
from deepspeed_cad.ahead.gather import Gatherer, Said, State, Subject, What
from deepspeed_cad.attention.layer import LayerKind
from deepspeed_cad.errors import CADDataError, CADUnsupportedError
from deepspeed_cad.kernels.interface import MaskRule
from deepspeed_cad.layout import Ints, LocalSegments
from deepspeed_cad.notice import name_ranks
from deepspeed_cad.pipeline.plans import Place
from deepspeed_cad.planner.plan import HeadShape
from deepspeed_cad.shares import Shares


def any_stage_has(gatherer: Gatherer, modules: int) -> bool:
    """Whether any stage has modules of a kind; `modules`: how many this one has."""
    return any(gatherer.numbers(modules, Subject(What.LAYERS)))


def all_are_ready(gatherer: Gatherer, ready: bool, step: int) -> bool:
    """Whether every rank trains now what it announced as its next step."""
    return all(one.value for one in gatherer.gather(Subject(What.LOADER, index=step), value=int(ready)))


def gather_layers(
    gatherer: Gatherer, places: Sequence[Place], mine: Sequence[LayerKind], index: int
) -> list[list[LayerKind]]:
    """The attention layers of every stage. Raises CADUnsupportedError where there are none, or replicas differ."""
    said = gatherer.gather(Subject(What.LAYERS, index=index), _layers_to_array(mine))
    stages = max(place.stage for place in places) + 1
    found: list[list[LayerKind] | None] = [None] * stages
    for rank, place in zip(gatherer.shares.members, places, strict=True):
        layers = _layers_from_array(said[rank].payload)
        if found[place.stage] is None:
            found[place.stage] = layers
        elif found[place.stage] != layers:
            raise CADUnsupportedError(
                f"stage {place.stage} has other attention layers on rank {rank} (replica {place.replica}) than on "
                "replica 0: build the same PipelineModule on all ranks"
            )
    layers_of = [one or [] for one in found]
    if not any(layers_of):
        raise CADUnsupportedError(
            "no stage of the pipeline ran attention that CAD can move: its layers need attention modules of "
            "transformers (deepspeed_cad.to_pipeline makes a pipeline of a model)"
        )
    return layers_of


def gather_documents(
    gatherer: Gatherer, places: Sequence[Place], mine: Sequence[LocalSegments] | None, step: int, count: int
) -> list[list[LocalSegments]] | None:
    """Documents of every replica's micro-batches; None where some loader ended before it had `count` of them.

    `mine`: of this rank's micro-batches; empty on a stage that loads nothing, None where its loader ended.
    Raises CADDataError where the first and the last stage of a replica load different micro-batches.
    """
    state = State.ENDED if mine is None else State.GOING
    said = gatherer.gather(Subject(What.STEP, index=step), to_message(mine or []), state=state)
    if any(one.state == State.ENDED for one in said):
        return None
    _compare_shares(gatherer.shares, said)
    stages = max(place.stage for place in places) + 1
    replicas = max(place.replica for place in places) + 1
    documents: list[list[LocalSegments]] = [[] for _ in range(replicas)]
    last: list[list[LocalSegments]] = [[] for _ in range(replicas)]
    for rank, place in zip(gatherer.shares.members, places, strict=True):
        if place.stage == 0:
            documents[place.replica] = from_message(said[rank].payload)
        elif place.stage == stages - 1:
            last[place.replica] = from_message(said[rank].payload)
    for replica in range(replicas):
        for m, (first, other) in enumerate(zip(documents[replica], last[replica])):
            if not first.same_as(other):
                raise CADDataError(
                    f"micro-batch {m} of replica {replica} has {first.tokens} tokens in {len(first.begin)} documents "
                    f"on the first stage and {other.tokens} in {len(other.begin)} on the last: both must read the same "
                    "data in the same order. Give all ranks of a replica the same loader and the same seed"
                )
    if any(len(one) != count for one in documents):
        raise CADDataError(
            f"replicas have {[len(one) for one in documents]} micro-batches in this step; expected {count} of each"
        )
    return documents


def _compare_shares(shares: Shares, said: Sequence[Said]) -> None:
    """Raise CADDataError where ranks that divide the heads of a stage among them load different micro-batches."""
    for ranks in shares.replicas.tolist():
        each = [[Announcement(one) for one in from_message(said[rank].payload)] for rank in ranks]
        if len({len(one) for one in each}) > 1:
            counts = [len(one) for one in each]
            raise CADDataError(f"{name_ranks(ranks)} divide the heads of a stage, but load {counts} micro-batches")
        for own in zip(*each):
            compare(own, ranks)


def to_message(documents: Sequence[LocalSegments]) -> Ints:
    """How many micro-batches, then of each the number of its values and these."""
    each = [Announcement(one).to_array() for one in documents]
    values = [np.array([len(each)]), *(np.r_[len(one), one] for one in each)]
    return np.concatenate(values).astype(np.int64)


def from_message(values: Ints) -> list[LocalSegments]:
    """The inverse of `to_message`; nothing from a rank that loads nothing."""
    found: list[LocalSegments] = []
    at = 1
    while at < len(values):
        count = int(values[at])
        found.append(Announcement.from_array(values[at + 1 : at + 1 + count]).local)
        at += 1 + count
    return found


def _layers_to_array(layers: Sequence[LayerKind]) -> Ints:
    rows = [[*astuple(shape), *astuple(rule), str(dtype).removeprefix("torch.")] for shape, rule, dtype in layers]
    return np.frombuffer(json.dumps(rows).encode(), np.uint8).astype(np.int64)


def _layers_from_array(values: Ints) -> list[LayerKind]:
    rows = json.loads(values.astype(np.uint8).tobytes())
    return [LayerKind(HeadShape(*row[:5]), MaskRule(*row[5:8]), getattr(torch, row[8])) for row in rows]
