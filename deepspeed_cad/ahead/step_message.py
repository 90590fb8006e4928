"""What a rank tells the others about the micro-batches of one step, and the documents that all of it adds up to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from deepspeed_cad.ahead.documents import Announcement
from deepspeed_cad.errors import CADPeerError
from deepspeed_cad.layout import Ints
from deepspeed_cad.planner.deal import Step


def _nothing() -> Ints:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class StepMessage:
    """One rank's micro-batches of a step."""

    micro_batches: Sequence[Announcement]
    fields: int = 0
    """Digest of their per-token fields; 0 where its documents stay."""
    padding: Ints = field(default_factory=_nothing)
    """What these hold in a token of padding; empty where this rank has none."""

    def to_array(self) -> Ints:
        """Micro-batches, fields, length of padding, padding; then of each micro-batch the length of its announcement
        and the announcement."""
        parts = [np.array([len(self.micro_batches), self.fields, len(self.padding)], np.int64), self.padding]
        for one in self.micro_batches:
            array = one.to_array()
            parts += [np.array([len(array)], np.int64), array]
        return np.concatenate(parts)

    @classmethod
    def from_array(cls, values: Ints) -> StepMessage:
        """The inverse of `to_array`."""
        micro_batches, at = [], 3 + int(values[2])
        for _ in range(int(values[0])):
            length = int(values[at])
            micro_batches.append(Announcement.from_array(values[at + 1 : at + 1 + length]))
            at += 1 + length
        if at != len(values):
            raise CADPeerError(f"a step's message has {len(values)} numbers where its parts have {at}")
        return cls(micro_batches, int(values[1]), values[3 : 3 + int(values[2])])


@dataclass(frozen=True, eq=False)
class StepDocuments:
    """The documents of a step of all ranks, and the segments that they are made of."""

    step: Step
    offset: Ints
    """[documents] first token of each in its row."""
    of: Ints
    """[segments] document, or padded sample, that each lies in."""
    begin: Ints
    end: Ints

    @property
    def spans_ranks(self) -> bool:
        """Whether a document goes on from one rank to the next: micro-batches then belong together across ranks."""
        return bool((self.begin > 0).any())


def to_documents(said: Sequence[StepMessage], padded: bool) -> StepDocuments:
    """The documents of a step of all ranks, which have as many micro-batches each.

    `padded`: what may move are the samples of a batch, the padding behind each left out, and not single documents.
    """
    columns: list[list[Ints]] = [[], [], [], [], []]
    of, begin, end, count = [], [], [], 0
    for rank, message in enumerate(said):
        for micro_batch, one in enumerate(message.micro_batches):
            local = one.local
            width = (one.unit if one.unit > 1 else local.tokens) if padded else 1
            mine = local.offset // width if padded else np.arange(len(local.begin))
            rows = local.tokens // width if padded else len(mine)
            offset = np.arange(rows) * width if padded else local.offset
            length = np.ones(rows, np.int64) if padded else local.end - local.begin
            np.maximum.at(length, mine, local.offset + local.end - local.begin - offset[mine])
            for column, values in zip(columns, (np.full(rows, rank), np.full(rows, micro_batch), length, offset)):
                column.append(values)
            of.append(mine + count)
            begin.append(local.begin)
            end.append(local.end)
            count += rows
    tokens = np.array([[one.local.tokens for one in message.micro_batches] for message in said], np.int64)
    rank_of, micro_batch_of, lengths, offsets = (np.concatenate(column) for column in columns[:4])
    return StepDocuments(
        Step(rank_of, micro_batch_of, lengths, tokens, padded), offsets, *map(np.concatenate, (of, begin, end))
    )
