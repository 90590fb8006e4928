"""Document exchange: the per-token fields of whole documents travel between ranks, before the first forward of a step.

In: this rank's micro-batches of one step (dicts as models receive them) and an `Assignment`. Out: the micro-batches
that this rank trains instead. Tokens travel as bytes on the session's CPU group, on the look-ahead thread.

Shapes: `T` tokens of a row, `B` bytes of one token's fields together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from deepspeed_cad.ahead.assign import Assignment, StepDocuments
from deepspeed_cad.ahead.documents import CUMULATIVE, MASK, NUMBERING, Announcement
from deepspeed_cad.ahead.gather import Gatherer
from deepspeed_cad.exchange.failure.board import Liveness
from deepspeed_cad.layout import Ints

LONGEST = ("max_length_q", "max_length_k", "max_seqlen")
"""Fields that are the longest document's length. Like those of which documents are read they are computed again."""
IGNORED = -100
"""Label of a token that is no target."""


@dataclass(frozen=True)
class Field:
    """One per-token field: [1, T, *shape]."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Values per token."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def bytes(self) -> int:
        """Bytes of one token."""
        return self.size * self.dtype.itemsize


@dataclass(frozen=True)
class Fields:
    """What travels of a micro-batch, in the order of names."""

    per_token: tuple[Field, ...]
    derived: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """Bytes of one token's fields together."""
        return sum(one.bytes for one in self.per_token)


def read_fields(batch: Mapping[str, Any], mine: Announcement) -> Fields | str:
    """The fields of a micro-batch whose documents can be moved; otherwise the reason why they cannot."""
    ids = batch.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.shape[0] != 1:
        return "it is not one packed row: input_ids must have the shape [1, tokens]"
    shape, local = tuple(ids.shape), mine.local
    positions = batch.get("position_ids")
    if not isinstance(positions, torch.Tensor):
        return "it has no position_ids, which documents take along"
    if int((local.end - local.begin).sum()) != shape[1]:
        return "it has padding"
    if positions.shape == shape and positions[0].cpu().numpy()[local.offset].any():
        return "its position_ids do not start again at 0 at each document, as they must wherever it goes"
    per_token, derived = [], []
    for name in sorted(batch):
        value = batch[name]
        is_mask = name == MASK and getattr(value, "shape", None) == shape
        if name in CUMULATIVE or name in LONGEST or name == NUMBERING or is_mask:
            derived.append(name)
        elif isinstance(value, torch.Tensor) and tuple(value.shape[:2]) == shape and not value.requires_grad:
            per_token.append(Field(name, value.dtype, tuple(value.shape[2:])))
        elif value is not None and not isinstance(value, bool):
            what = f"of shape {tuple(value.shape)}" if hasattr(value, "shape") else f"({type(value).__name__})"
            return f'its field "{name}" {what} is not one value per token'
    if "labels" in batch and "shift_labels" not in batch:
        first = batch["labels"][0, torch.from_numpy(local.offset).to(ids.device)]
        if bool((first != IGNORED).any()):
            return (
                "its labels make the first token of a document a target of the document before; set it to -100 "
                "(DataCollatorWithFlattening and TRL's packing do)"
            )
    return Fields(tuple(per_token), tuple(derived))


@dataclass(frozen=True, eq=False)
class Moved:
    """A micro-batch of this rank after the exchange."""

    batch: dict[str, Any]
    """On the CPU where documents moved; the micro-batch itself where none did."""
    devices: Mapping[str, torch.device]
    """Where its new tensors belong; empty where none is new."""

    def on_device(self) -> dict[str, Any]:
        """The micro-batch where the model expects it. Called on the training thread."""
        for name, device in self.devices.items():
            self.batch[name] = self.batch[name].to(device, non_blocking=True)
        return self.batch


def exchange_documents(
    batches: Sequence[Any], fields: Fields, step: StepDocuments, assignment: Assignment, gatherer: Gatherer
) -> list[Moved]:
    """Carry out an assignment; every rank calls it for the same step.

    `batches`: this rank's micro-batches in the order of the step. Collective where any document changes its rank.
    """
    rank = gatherer.rank
    open_rows = np.flatnonzero(~step.fixed[rank]).tolist() if _takes_part(step, assignment, rank) else []
    # Those that stay may have other fields: they neither travel nor lend what is in no document.
    rows = {i: _as_bytes(batches[i], fields) for i in open_rows}
    like = batches[open_rows[0]] if open_rows else {}
    arrived = _send(rows, fields.bytes, step, assignment, gatherer)
    return [
        _row(batches, like, fields, step, assignment, rank, micro_batch, arrived)
        for micro_batch in range(step.micro_batches)
    ]  # fmt: skip


def _takes_part(step: StepDocuments, assignment: Assignment, rank: int) -> bool:
    return bool((assignment.source[rank] < 0).any()) or bool(((step.rank == rank) & (assignment.rank != rank)).any())


def _as_bytes(batch: Mapping[str, Any], fields: Fields) -> torch.Tensor:
    """[T, B] bytes of a micro-batch's per-token fields."""
    columns = []
    for field in fields.per_token:
        value = batch[field.name].detach().cpu()[0].contiguous()
        columns.append(value.reshape(value.shape[0], field.size).view(torch.uint8))
    return torch.cat(columns, 1)


def _offsets(step: StepDocuments) -> Ints:
    """First token of each document in its row."""
    ends = np.cumsum(step.length)
    row = step.rank * step.micro_batches + step.micro_batch
    first = np.r_[True, row[1:] != row[:-1]] if len(row) else np.zeros(0, bool)
    base = np.where(first, ends - step.length, 0)
    return ends - step.length - np.maximum.accumulate(base) if len(row) else base


def _send(
    rows: Mapping[int, torch.Tensor], width: int, step: StepDocuments, assignment: Assignment, gatherer: Gatherer
) -> dict[int, torch.Tensor]:
    """Bytes [tokens, B] of every document that this rank builds new rows of, by number of the document.

    `rows`: [T, B] bytes of this rank's micro-batches whose documents may move.
    """
    rank = gatherer.rank
    offset, length = _offsets(step), step.length
    rebuilt = assignment.source[assignment.rank, assignment.micro_batch] < 0
    here: dict[int, torch.Tensor] = {}

    def own(document: int) -> torch.Tensor:
        begin = int(offset[document])
        return rows[int(step.micro_batch[document])][begin : begin + int(length[document])]

    for document in np.flatnonzero(rebuilt & (step.rank == rank) & (assignment.rank == rank)).tolist():
        here[document] = own(document)
    away = assignment.rank != step.rank
    if not away.any() or gatherer.group is None:
        return here
    outgoing = [np.flatnonzero(away & (step.rank == rank) & (assignment.rank == to)) for to in range(step.ranks)]
    incoming = [np.flatnonzero(away & (step.rank == of) & (assignment.rank == rank)) for of in range(step.ranks)]
    parts = [own(document) for to in outgoing for document in to.tolist()]
    sent = torch.cat(parts) if parts else torch.empty(0, width, dtype=torch.uint8)
    counts_out = [int(length[to].sum()) * width for to in outgoing]
    counts_in = [int(length[of].sum()) * width for of in incoming]
    documents = np.concatenate(incoming).tolist()
    received = torch.empty(int(length[documents].sum()), width, dtype=torch.uint8)
    with Liveness.watch(gatherer.liveness, "the other ranks' documents"):
        dist.all_to_all_single(received.reshape(-1), sent.reshape(-1), counts_in, counts_out, group=gatherer.group)
    pieces = received.split([int(length[one]) for one in documents])
    return here | dict(zip(documents, pieces, strict=True))


def _row(
    batches: Sequence[Any],
    like: Mapping[str, Any],
    fields: Fields,
    step: StepDocuments,
    assignment: Assignment,
    rank: int,
    micro_batch: int,
    arrived: dict[int, torch.Tensor],
) -> Moved:
    """One micro-batch of this rank; what is not per token is taken from `like`, one of those that move."""
    source = int(assignment.source[rank, micro_batch])
    if source >= 0:
        return Moved(batches[source], {})
    mine = np.flatnonzero((assignment.rank == rank) & (assignment.micro_batch == micro_batch))
    documents = mine[np.argsort(assignment.place[mine])].tolist()
    width = fields.bytes
    row = torch.cat([arrived[one] for one in documents] or [torch.empty(0, width, dtype=torch.uint8)])
    # What is not a tensor (None, flags) stays as it was.
    batch: dict[str, Any] = dict(like)
    at = 0
    for field in fields.per_token:
        column = row[:, at : at + field.bytes].clone(memory_format=torch.contiguous_format)
        at += field.bytes
        batch[field.name] = column.view(field.dtype).reshape(1, row.shape[0], *field.shape)
    _derive(batch, like, fields, step.length[documents])
    devices = {name: like[name].device for name in batch if isinstance(batch[name], torch.Tensor)}
    away = {name: device for name, device in devices.items() if device.type != "cpu"}
    for name in away:
        batch[name] = batch[name].pin_memory()
    return Moved(batch, away)


def _derive(batch: dict[str, Any], model: Mapping[str, Any], fields: Fields, length: Ints) -> None:
    """Fields that follow from the documents' lengths, in the types that they had."""
    longest = int(length.max(initial=0))
    for name in fields.derived:
        old = model[name]
        if old is None:
            continue
        if name in LONGEST:
            batch[name] = torch.tensor(longest, dtype=old.dtype).expand(old.shape) if torch.is_tensor(old) else longest
            continue
        if name == NUMBERING:
            new = np.repeat(np.arange(len(length)), length)[None]
        elif name == MASK:
            # Also where it numbered documents: positions tell them, and there is no padding.
            new = np.ones((1, int(length.sum())), np.int64)
        else:
            new = np.r_[0, np.cumsum(length)].reshape((1, -1) if old.ndim == 2 else (-1,))
        batch[name] = torch.from_numpy(new).to(old.dtype)
