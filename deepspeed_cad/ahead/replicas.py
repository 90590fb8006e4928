"""Micro-batches of replicas, from what each of their ranks announced.

In: the announcements of all ranks of the job. Out: one per replica. Ranks of a replica that are all given its tokens
must have announced the same; where each is given a piece, the pieces are put side by side.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deepspeed_cad.ahead.documents import Announcement
from deepspeed_cad.errors import CADDataError
from deepspeed_cad.layout import PADDING, segments_from_positions
from deepspeed_cad.notice import name_ranks
from deepspeed_cad.shares import Shares


def of_replicas(announcements: Sequence[Announcement], shares: Shares) -> list[Announcement]:
    """[replicas] of the announcements of all ranks, in their order.

    Raises CADDataError, the same on every rank, where ranks of a replica were given different micro-batches.
    """
    if shares.count == 1:
        return list(announcements)
    each = []
    for ranks in shares.replicas.tolist():
        own = [announcements[rank] for rank in ranks]
        if shares.pieces:
            each.append(_join(own, ranks))
        else:
            compare(own, ranks)
            each.append(own[0])
    return each


def compare(own: Sequence[Announcement], ranks: Sequence[int]) -> None:
    """Raise CADDataError, naming the first token that differs, where ranks of a replica announced different ones."""
    first = own[0]
    for rank, other in zip(ranks[1:], own[1:]):
        if np.array_equal(first.to_array(), other.to_array()):
            continue
        found = f"rank {ranks[0]} has {_shape(first)} and rank {rank} {_shape(other)}"
        if first.local.same_as(other.local) and first.unit == other.unit:
            found = f"documents of rank {rank} are as long as those of rank {ranks[0]}, but of other tokens"
        mine, theirs = first.local.positions(), other.local.positions()
        size = min(len(mine), len(theirs))
        if len(wrong := np.flatnonzero(mine[:size] != theirs[:size])):
            at = int(wrong[0])
            found = f"at token {at} rank {ranks[0]} has {_say(mine[at])} and rank {rank} {_say(theirs[at])}"
        raise CADDataError(
            f"{name_ranks(ranks)} divide the heads of one micro-batch among them, but were given different ones: "
            f"{found}. Let the sampler count replicas, not ranks: num_replicas and rank are those of data parallelism"
        )


def _join(own: Sequence[Announcement], ranks: Sequence[int]) -> Announcement:
    shapes = [_shape(one) for one in own]
    if len(set(shapes)) > 1:
        raise CADDataError(
            f"{name_ranks(ranks)} have pieces of one micro-batch, but not of the same shape: {'; '.join(shapes)}"
        )
    if own[0].unit > 1:
        raise CADDataError(
            f"{name_ranks(ranks)} have pieces of a micro-batch of several rows: with Ulysses CAD takes one packed row"
        )
    positions = np.concatenate([one.local.positions() for one in own])
    return Announcement(segments_from_positions(positions[None], positions[None] != PADDING))


def _shape(one: Announcement) -> str:
    return f"{one.local.tokens} tokens in rows of {one.unit}" if one.unit > 1 else f"{one.local.tokens} tokens"


def _say(position: int) -> str:
    return "padding" if position == PADDING else f"position {position} of a document"
