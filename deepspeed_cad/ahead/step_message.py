"""What a rank tells the others about the micro-batches of one step, and the documents that all of it adds up to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deepspeed_cad.ahead.assign import StepDocuments
from deepspeed_cad.ahead.documents import Announcement
from deepspeed_cad.errors import CADPeerError
from deepspeed_cad.layout import Ints


@dataclass(frozen=True, eq=False)
class StepMessage:
    """One rank's micro-batches of a step."""

    micro_batches: Sequence[Announcement]
    fixed: Sequence[bool]
    """Of each micro-batch: whether its documents must stay in it."""
    fields: int = 0
    """Digest of the per-token fields of those whose documents may move; 0 where none may."""

    def to_array(self) -> Ints:
        """Micro-batches, fields; then of each micro-batch: fixed, length of its announcement, the announcement."""
        parts = [np.array([len(self.micro_batches), self.fields], np.int64)]
        for one, fixed in zip(self.micro_batches, self.fixed, strict=True):
            array = one.to_array()
            parts += [np.array([int(fixed), len(array)], np.int64), array]
        return np.concatenate(parts)

    @classmethod
    def from_array(cls, values: Ints) -> StepMessage:
        """The inverse of `to_array`."""
        micro_batches, fixed, at = [], [], 2
        for _ in range(int(values[0])):
            length = int(values[at + 1])
            fixed.append(bool(values[at]))
            micro_batches.append(Announcement.from_array(values[at + 2 : at + 2 + length]))
            at += 2 + length
        if at != len(values):
            raise CADPeerError(f"a step's message has {len(values)} numbers where its parts have {at}")
        return cls(micro_batches, fixed, int(values[1]))


def to_documents(said: Sequence[StepMessage]) -> StepDocuments:
    """The documents of a step of all ranks, which have as many micro-batches each."""
    rows = [
        (rank, micro_batch, one.local)
        for rank, message in enumerate(said)
        for micro_batch, one in enumerate(message.micro_batches)
    ]
    count = [len(local.begin) for _, _, local in rows]
    return StepDocuments(
        np.repeat(np.array([rank for rank, _, _ in rows], np.int64), count),
        np.repeat(np.array([micro_batch for _, micro_batch, _ in rows], np.int64), count),
        np.concatenate([local.begin for _, _, local in rows]),
        np.concatenate([local.end for _, _, local in rows]),
        np.array([[one.local.tokens for one in message.micro_batches] for message in said], np.int64),
        np.array([message.fixed for message in said], bool),
    )
