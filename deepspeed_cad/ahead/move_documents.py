"""Documents change ranks before the first forward of a step: what each of their tokens has travels with them.

In: this rank's micro-batches of one step (dicts as models receive them), and where each document is trained. Out: the
micro-batches that this rank trains instead. Tokens travel as bytes on the session's CPU group, on the look-ahead
thread. What travels of a packed row `[1, T]` are documents; of a padded batch `[N, T]` samples, without the padding
behind them.

Shapes: `N` batch rows, `T` tokens of each, `B` bytes of one token's fields together.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from deepspeed_cad.ahead.announced import StepDocuments
from deepspeed_cad.ahead.documents import CUMULATIVE, MASK, NUMBERING, Announcement
from deepspeed_cad.ahead.gather import Gatherer
from deepspeed_cad.exchange.failure.board import Liveness
from deepspeed_cad.layout import PADDING, Ints
from deepspeed_cad.planner.deal import Dealt, Pieces

LONGEST = ("max_length_q", "max_length_k", "max_seqlen")
"""Fields that are the longest document's length. Like those of which documents are read they are computed again."""
POSITIONS = "position_ids"
TARGETS = ("labels", "shift_labels")
IGNORED = -100


@dataclass(frozen=True)
class Field:
    """One per-token field: [N, T, *shape], or [*front, N, T] with one axis in front."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    front: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        return int(np.prod(self.front + self.shape, dtype=np.int64)) * self.dtype.itemsize

    def to_bytes(self, value: torch.Tensor) -> torch.Tensor:
        """[N · T, bytes]"""
        value = value.detach().cpu()
        value = value.movedim(0, 2) if self.front else value
        return value.reshape(value.shape[0] * value.shape[1], -1).contiguous().view(torch.uint8)

    def from_bytes(self, column: torch.Tensor, rows: int) -> torch.Tensor:
        value = column.clone(memory_format=torch.contiguous_format).view(self.dtype)
        value = value.reshape(rows, column.shape[0] // rows, *self.front, *self.shape)
        return value.movedim(2, 0).contiguous() if self.front else value


@dataclass(frozen=True)
class Fields:
    """What travels of a micro-batch, in the order of names."""

    per_token: tuple[Field, ...]
    derived: tuple[str, ...]
    padded: bool

    @property
    def names(self) -> set[str]:
        return {one.name for one in self.per_token}

    @property
    def cuts(self) -> bool:
        """Whether documents may be cut: nothing but what is known is attached to tokens, targets among it."""
        known = self.names <= {"input_ids", POSITIONS, *TARGETS} and not any(one.front for one in self.per_token)
        return known and POSITIONS in self.names and not self.names.isdisjoint(TARGETS)

    @property
    def carries(self) -> bool:
        """Whether what is cut off takes along the token behind it, for its label: the target of the token before."""
        return "shift_labels" not in self.names

    @property
    def unknown(self) -> list[str]:
        """Those of which nobody knows what belongs into padding, but where some is seen."""
        return sorted(self.names - {"input_ids", "token_type_ids", POSITIONS, MASK, *TARGETS}) if self.padded else []

    @property
    def sizes(self) -> list[int]:
        return [one.bytes for one in self.per_token]

    def to_bytes(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """[N · T, B]"""
        return torch.cat([one.to_bytes(batch[one.name]) for one in self.per_token], 1)


def read_fields(batch: Mapping[str, Any], mine: Announcement) -> Fields | str:
    """The fields of a micro-batch whose documents can be moved; otherwise the reason why they cannot."""
    batch = {name: value for name, value in batch.items() if value is not None}
    ids = batch.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or 0 in ids.shape:
        return "it has no input_ids of the shape [batch, tokens]"
    if batch.get("output_router_logits"):
        return "output_router_logits is on, and the router's auxiliary loss depends on which documents meet"
    shape, local = tuple(ids.shape), mine.local
    positions, mask = batch.get(POSITIONS), batch.get(MASK)
    padded = shape[0] > 1 or positions is None
    if padded and (getattr(mask, "shape", None) != shape or shape[1] == 1):
        return "it has neither position_ids that documents take along nor an attention_mask that tells padding"
    if padded and not np.isin(local.offset // shape[1] * shape[1], local.offset).all():
        return "it is padded on the left"
    if not padded and isinstance(positions, torch.Tensor):
        if positions.reshape(-1, shape[1])[0].cpu().numpy()[local.offset].any():
            return "its position_ids do not start again at 0 at each document, as they must wherever it goes"
    per_token, derived = [], []
    for name, value in sorted(batch.items()):
        found = _read_field(name, value, shape)
        numbers = name in CUMULATIVE or name in LONGEST or name == NUMBERING
        if numbers and padded:
            return f'its field "{name}" numbers the tokens of a batch of several rows'
        counts_up = name == POSITIONS and padded and _counts_up(value, shape[1])
        if numbers or counts_up or (name == MASK and not padded and found is not None):
            derived.append(name)
        elif found is not None:
            per_token.append(found)
        elif not isinstance(value, bool):
            what = f"of shape {tuple(value.shape)}" if hasattr(value, "shape") else f"({type(value).__name__})"
            return f'its field "{name}" {what} is not one value per token'
    shifts = "labels" in batch and "shift_labels" not in batch
    if shifts and batch["labels"].shape == shape:
        labels = batch["labels"].to(ids.device)
        if bool(((labels != ids) & (labels != IGNORED)).any()):
            return (
                "its labels are not the token ids at their places, so its loss may be another than that of the next "
                'token (labels that are shifted already are "shift_labels")'
            )
    if shifts and not padded:
        if bool((batch["labels"][0, torch.from_numpy(local.offset[local.offset > 0]).to(ids.device)] != IGNORED).any()):
            return (
                "its labels make the first token of a document a target of the document before; set it to -100 "
                "(DataCollatorWithFlattening and TRL's packing do)"
            )
    behind = find_padding(mine, shape[1] if padded else 0)
    for name in TARGETS:
        if len(behind) and name in batch and bool((batch[name].cpu().reshape(-1)[behind] != IGNORED).any()):
            return f"its {name} count where it is padded; set them to -100 there"
    return Fields(tuple(per_token), tuple(derived), padded)


def _read_field(name: str, value: Any, shape: tuple[int, ...]) -> Field | None:
    if not isinstance(value, torch.Tensor) or value.requires_grad:
        return None
    if tuple(value.shape[:2]) == shape:
        return Field(name, value.dtype, tuple(value.shape[2:]))
    if tuple(value.shape[1:]) == shape:
        return Field(name, value.dtype, (), tuple(value.shape[:1]))
    return None


def _counts_up(value: Any, tokens: int) -> bool:
    return isinstance(value, torch.Tensor) and bool((value.cpu() == torch.arange(tokens)).all())


def find_padding(mine: Announcement, width: int) -> torch.Tensor:
    """Tokens that are left behind where documents travel: all in none, or with a `width` of batch rows those behind the
    last one of each, of which one token stays."""
    padding = (mine.local.positions() == PADDING).reshape(-1, width or mine.local.tokens)
    if width:
        padding = np.logical_and.accumulate(padding[:, ::-1], axis=1)[:, ::-1].copy()
        padding[:, 0] = False
    return torch.from_numpy(np.flatnonzero(padding))


def read_padding(batches: Sequence[Mapping[str, Any]], fields: Fields, mine: Sequence[Announcement]) -> Ints | str:
    """What tokens of padding hold, as whole numbers; none where there are none. The reason where they differ."""
    found: torch.Tensor | None = None
    for batch, one in zip(batches, mine):
        tokens = fields.to_bytes(batch)[find_padding(one, int(batch["input_ids"].shape[1]))]
        if not len(tokens):
            continue
        found = tokens[0] if found is None else found
        if bool((tokens != found).any()):
            at = int((tokens != found).any(0).nonzero()[0])
            field = fields.per_token[int(np.searchsorted(np.cumsum(fields.sizes), at, "right"))]
            return f'its field "{field.name}" differs in padding'
    if found is None:
        return np.zeros(0, np.int64)
    return np.frombuffer(found.numpy().tobytes().ljust(-(-len(found) // 8) * 8, b"\0"), np.int64).copy()


def pad_token(padding: Ints, fields: Fields) -> torch.Tensor:
    """[B] of a token of padding, from what `read_padding` gives; no target, hidden and zero where nobody has one."""
    if len(padding):
        return torch.from_numpy(padding.copy()).view(torch.uint8)[: sum(fields.sizes)]
    of_fields = []
    for one in fields.per_token:
        value = IGNORED if one.name in TARGETS else 0
        of_fields.append(torch.full((one.bytes // one.dtype.itemsize,), value, dtype=one.dtype).view(torch.uint8))
    return torch.cat(of_fields)


@dataclass(frozen=True, eq=False)
class Moved:
    batch: dict[str, Any]
    """On the CPU where documents moved; the micro-batch itself where none did."""
    devices: Mapping[str, torch.device]
    """Where its new tensors belong; empty where none is new."""

    def on_device(self) -> dict[str, Any]:
        """The micro-batch where the model expects it. Called on the training thread."""
        for name, device in self.devices.items():
            self.batch[name] = self.batch[name].to(device, non_blocking=True)
        return self.batch


def move_documents(
    batches: Sequence[Any], fields: Fields, padding: Ints, documents: StepDocuments, dealt: Dealt, gatherer: Gatherer
) -> list[Moved]:
    """Carry out what was dealt. Collective: every rank calls it for the same step. `batches`: this rank's micro-batches
    in the order of the step; `fields` of all of them and what tokens of padding hold are the same on all ranks."""
    rank, step, pieces = gatherer.rank, documents.step, dealt.pieces
    goes_on = pieces.end < step.length[pieces.document]
    stop = pieces.end + (goes_on & fields.carries)
    arrived = _send([fields.to_bytes(batch) for batch in batches], documents, pieces, stop, gatherer)
    moved = []
    for micro_batch in range(step.tokens.shape[1]):
        mine = pieces.order[(pieces.rank == rank)[pieces.order] & (pieces.micro_batch == micro_batch)[pieces.order]]
        of = pieces.document[mine]
        own = np.unique(step.micro_batch[of[step.rank[of] == rank]])
        if len(own) == 1 and not (goes_on | (pieces.begin > 0))[mine].any():
            if np.array_equal(of, np.flatnonzero((step.rank == rank) & (step.micro_batch == own[0]))):
                moved.append(Moved(batches[own[0]], {}))
                continue
        carried = bool(goes_on[mine[-1]] and fields.carries)
        moved.append(_row(batches[0], [arrived[one] for one in mine.tolist()], carried, fields, padding))
    return moved


def _send(
    tokens: Sequence[torch.Tensor], documents: StepDocuments, pieces: Pieces, stop: Ints, gatherer: Gatherer
) -> dict[int, torch.Tensor]:
    """Bytes [tokens, B] of every piece that this rank trains, by its number. `tokens`: [N · T, B] bytes of this rank's
    micro-batches; `stop`: [pieces] of their tokens in their documents."""
    rank, home, width = gatherer.rank, documents.step.rank[pieces.document], tokens[0].shape[1]
    count, begin = stop - pieces.begin, documents.offset[pieces.document] + pieces.begin
    row = documents.step.micro_batch[pieces.document]
    outgoing = [np.flatnonzero((home == rank) & (pieces.rank == to)).tolist() for to in range(gatherer.ranks)]
    incoming = [np.flatnonzero((home == of) & (pieces.rank == rank)).tolist() for of in range(gatherer.ranks)]
    parts = [tokens[row[one]][begin[one] : begin[one] + count[one]] for to in outgoing for one in to]
    sent = torch.cat([tokens[0][:0], *parts])
    counts_out, counts_in = ([int(count[own].sum()) * width for own in each] for each in (outgoing, incoming))
    arriving = [one for of in incoming for one in of]
    received = torch.empty(int(count[arriving].sum()), width, dtype=torch.uint8)
    with Liveness.watch(gatherer.liveness, "the other ranks' documents"):
        dist.all_to_all_single(received.reshape(-1), sent.reshape(-1), counts_in, counts_out, group=gatherer.group)
    return dict(zip(arriving, received.split(count[arriving].tolist()), strict=True))


def _row(like: Mapping[str, Any], pieces: list[torch.Tensor], carried: bool, fields: Fields, padding: Ints) -> Moved:
    """A micro-batch of documents, in their order in the step; what is not per token is taken from `like`. `carried`:
    the last token is one that the next rank has, too. Its label is the target of the token before it, and it is a
    document by itself."""
    length = np.array([len(one) for one in pieces], np.int64)
    rows, tokens = 1, torch.cat(pieces)
    if fields.padded:
        rows, tokens = len(pieces), pad_token(padding, fields).repeat(len(pieces) * int(length.max()), 1)
        tokens[torch.from_numpy((np.arange(length.max()) < length[:, None]).ravel())] = torch.cat(pieces)
    # What is not a tensor (None, flags) stays as it was.
    batch: Any = copy(like)
    for field, column in zip(fields.per_token, tokens.split(fields.sizes, 1)):
        batch[field.name] = field.from_bytes(column, rows)
    if not fields.padded and fields.names.intersection(TARGETS) == {"labels"}:
        # The first token of a row has nothing before it that predicts it, whatever was before it elsewhere.
        batch["labels"][0, np.cumsum(length) - length] = IGNORED
    if carried:
        batch[POSITIONS][0, -1] = 0
        length = np.append(length[:-1], [length[-1] - 1, 1])
    for name in fields.derived:
        batch[name] = _derive(name, like[name], length)
    devices = {name: like[name].device for name in batch if isinstance(batch[name], torch.Tensor)}
    away = {name: device for name, device in devices.items() if device.type != "cpu"}
    for name in away:
        batch[name] = batch[name].pin_memory()
    return Moved(batch, away)


def _derive(name: str, old: Any, length: Ints) -> Any:
    """A field that follows from the documents' lengths, as it was before in type and axes."""
    longest = int(length.max(initial=0))
    if name in LONGEST:
        return torch.tensor(longest, dtype=old.dtype).expand(old.shape) if torch.is_tensor(old) else longest
    if name == POSITIONS:
        up = torch.arange(longest, dtype=old.dtype)
        # [T], or one row for the whole batch, or one for each sample.
        rows = old.shape[-2] if old.ndim > 1 and old.shape[-2] == 1 else len(length)
        return up.expand(*old.shape[:-2], rows, longest) if old.ndim > 1 else up
    if name == NUMBERING:
        new = np.repeat(np.arange(len(length)), length)[None]
    elif name == MASK:
        # Also where it numbered documents: positions tell them, and there is no padding.
        new = np.ones((1, int(length.sum())), np.int64)
    else:
        new = np.r_[0, np.cumsum(length)].reshape((1, -1) if old.ndim == 2 else (-1,))
    return torch.from_numpy(new).to(old.dtype)
