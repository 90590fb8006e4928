"""What all ranks announced, put together: the micro-batches of replicas, and the documents of a step.

Ranks of a replica that are all given its tokens must have announced the same; where each is given a piece, the pieces
are put side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from deepspeed_cad.ahead.documents import Announcement
from deepspeed_cad.errors import CADDataError
from deepspeed_cad.layout import PADDING, Ints, segments_from_positions
from deepspeed_cad.notice import name_ranks
from deepspeed_cad.planner.deal import Step
from deepspeed_cad.shares import Shares


def of_replicas(announcements: Sequence[Announcement], shares: Shares) -> list[Announcement]:
    """[replicas] of the announcements of all ranks, in their order. Raises CADDataError, the same on every rank, where
    ranks of a replica were given different micro-batches."""
    if shares.count == 1:
        return list(announcements)
    each = []
    for ranks in shares.replicas.tolist():
        own = [announcements[rank] for rank in ranks]
        if not shares.pieces:
            compare(own, ranks)
        each.append(_join(own, ranks) if shares.pieces else own[0])
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
        for at, (mine, theirs) in enumerate(zip(first.local.positions(), other.local.positions())):
            if mine != theirs:
                found = f"at token {at} rank {ranks[0]} has {_say(mine)} and rank {rank} {_say(theirs)}"
                break
        raise CADDataError(
            f"{name_ranks(ranks)} divide the heads of one micro-batch among them, but were given different ones: "
            f"{found}. Let the sampler count replicas, not ranks: num_replicas and rank are those of data parallelism"
        )


def _join(own: Sequence[Announcement], ranks: Sequence[int]) -> Announcement:
    shapes = [_shape(one) for one in own]
    if len(set(shapes)) > 1 or own[0].unit > 1:
        raise CADDataError(
            f"{name_ranks(ranks)} have pieces of one micro-batch of these shapes: {'; '.join(shapes)}. With Ulysses "
            "CAD takes one packed row, of which each rank has as many tokens"
        )
    positions = np.concatenate([one.local.positions() for one in own])
    return Announcement(segments_from_positions(positions, positions[None] != PADDING))


def _shape(one: Announcement) -> str:
    return f"{one.local.tokens} tokens in rows of {one.unit}" if one.unit > 1 else f"{one.local.tokens} tokens"


def _say(position: int) -> str:
    return "padding" if position == PADDING else f"position {position} of a document"


NO_PADDING: Ints = np.zeros(0, np.int64)
STAYS, IN_ORDER = 0, 1
"""What a rank says in place of its fields: documents stay; micro-batches do so in their order, too."""


@dataclass(frozen=True, eq=False)
class StepMessage:
    micro_batches: Sequence[Announcement]
    fields: int = 0
    """Digest of their per-token fields, or STAYS, or IN_ORDER."""
    padding: Ints = field(default_factory=NO_PADDING.copy)

    def to_array(self) -> Ints:
        """Micro-batches, fields, and the lengths of padding and of each announcement; then all of these."""
        parts = [self.padding, *(one.to_array() for one in self.micro_batches)]
        return np.concatenate([np.array([len(self.micro_batches), self.fields, *map(len, parts)], np.int64), *parts])

    @classmethod
    def from_array(cls, values: Ints) -> StepMessage:
        count = int(values[0])
        padding, *micro_batches, _ = np.split(values[3 + count :], np.cumsum(values[2 : 3 + count]))
        return cls([Announcement.from_array(one) for one in micro_batches], int(values[1]), padding)


@dataclass(frozen=True, eq=False)
class StepDocuments:
    """The documents of a step of all ranks, and the segments that they are made of."""

    step: Step
    offset: Ints
    of: Ints
    """[segments] document, or padded sample, that each lies in."""
    begin: Ints
    end: Ints


def to_documents(said: Sequence[StepMessage], padded: bool) -> StepDocuments:
    """The documents of a step of all ranks, which have as many micro-batches each. `padded`: what may move are the
    samples of a batch, the padding behind each left out, and not single documents."""
    columns: list[tuple[Ints, ...]] = []
    count = 0
    for rank, message in enumerate(said):
        for micro_batch, one in enumerate(message.micro_batches):
            local = one.local
            end = local.offset + local.end - local.begin
            width = (one.unit if one.unit > 1 else local.tokens) if padded else 1
            mine = local.offset // width if padded else np.arange(len(local.begin))
            offset = np.arange(local.tokens // width) * width if padded else local.offset
            length = np.full(len(offset), int(padded))
            np.maximum.at(length, mine, end - offset[mine])
            columns.append((0 * offset + rank, 0 * offset + micro_batch, length, offset,
                            mine + count, local.begin, local.end))  # fmt: skip
            count += len(offset)
    rank_of, micro_batch_of, lengths, offsets, of, begin, end = map(np.concatenate, zip(*columns))
    tokens = np.array([[one.local.tokens for one in message.micro_batches] for message in said], np.int64)
    return StepDocuments(Step(rank_of, micro_batch_of, lengths, tokens, padded), offsets, of, begin, end)
