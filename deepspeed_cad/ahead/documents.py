"""Documents of a micro-batch as models receive it: the one reader of all host frameworks and of pipelines.

In: what a forward is given, a dict of input_ids, position_ids, seq_idx, cu_seq_lens_q, attention_mask and others. Out:
an `Announcement`, this rank's segments. No copies of the batch are kept. What each argument says is what attention of
transformers makes of it (a table of docs/getting-started.md); a document lies in one row of the batch. Arguments that
say something must say the same. Without any, each batch row is a document.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from deepspeed_cad import layout
from deepspeed_cad.errors import CADDataError, CADUnsupportedError
from deepspeed_cad.layout import Ints, LocalSegments, segments_from_cumulative, segments_from_positions
from deepspeed_cad.planner.plan import digest

CUMULATIVE = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens")
MASK = "attention_mask"
NUMBERING = "seq_idx"

OF_TEXT = 4
"""Axes of positions of which the first is that of text; with three there is none."""
PADDING, GOES_ON, BEGINS = 0, 1, 2
"""What a row of the micro-batch is: padding, a token of the document before it, or the first token of one."""
_IS = ("padding", "a token of the same document as the one before", "the first token of a document")
HIDING = -1e4
"""An additive mask hides a key by this or less. No score is as large, so softmax makes 0 of it."""
_PAIRS = 2**25
"""How many pairs of tokens of a ready-made mask are looked at together."""


@dataclass(frozen=True, eq=False)
class Announcement:
    """One rank's micro-batch: its segments and the rows between which it may be cut."""

    local: LocalSegments
    unit: int = 1
    """Cuts are multiples of it: the row length of a batch of several rows, else 1."""
    loaded: int = -1
    """Tokens that the loader gave for it, where documents were dealt out since; −1: as many as it has."""
    ids: int = 0
    """Fingerprint of the token ids, of ranks that must have the same or batches read ahead; 0 where nobody compares."""

    def to_array(self) -> Ints:
        """[4 + 3 × segments]: tokens, unit, tokens as loaded, fingerprint, then the segments."""
        head = self.local.tokens, self.unit, self.loaded, self.ids
        return np.r_[head, self.local.to_array().ravel()].astype(np.int64)

    @classmethod
    def from_array(cls, values: Ints) -> Announcement:
        tokens, unit, loaded, ids = map(int, values[:4])
        begin, end, offset = values[4:].reshape(-1, 3).T
        return cls(LocalSegments(begin, end, offset, tokens), unit, loaded, ids)


class _Source(NamedTuple):
    name: str
    rows: npt.NDArray[np.int8]
    """[tokens] PADDING, GOES_ON or BEGINS."""
    documents: bool = True
    """Whether it says where documents begin, and not only which rows are padding."""


def read_documents(given: Mapping[str, Any]) -> Announcement:
    """This rank's segments, from whatever the forward is given. A document whose positions begin above 0 in the first
    row goes on from another rank. Raises CADDataError where arguments contradict themselves or each other, and
    CADUnsupportedError for a mask that is not one of documents."""
    batch, width = batch_shape(given)
    if batch * width == 0:
        # Models cannot run on no tokens: they get one row of padding, see integrations.
        return Announcement(LocalSegments.none(1))
    unit = width if batch > 1 else 1
    sources = [
        *_read_lengths(given, batch, width),
        *_read_mask(given.get(MASK), batch, width),
        *_read_numbers(NUMBERING, given.get(NUMBERING), -1, batch, width),
    ]
    sources.sort(key=lambda source: not source.documents)
    for other in sources[1:]:
        _compare(sources[0], other, width)
    real = np.ones((batch, width), bool) if not sources else sources[0].rows.reshape(batch, width) > 0
    runs = real.copy()
    runs[:, 1:] &= ~real[:, :-1]
    positions, of_text = _read_positions(given.get("position_ids"), real)
    local = segments_from_positions(positions, real)
    start_again = len(local.begin) > runs.sum()
    if sources and sources[0].documents:
        if start_again:
            _compare(sources[0], _Source("position_ids", _rows(local)), width)
        else:
            local = _segments(sources[0].rows, local)
        return Announcement(local, unit)
    if start_again and not of_text:
        raise CADDataError(
            "position_ids of three axes (time, height, width) start again inside a batch row, but transformers takes "
            "no documents from them and would let these see each other. Put the positions of the text before them as "
            "a first of four axes, or pass cu_seq_lens_q"
        )
    resumed = runs & (real.cumsum(axis=1) > 1) & (positions != 0)
    if resumed.any():
        row, column = np.argwhere(resumed)[0]
        raise CADDataError(
            f"{sources[0].name} hides tokens before token {column} of batch row {row}, which goes on at position "
            f"{positions[row, column]}: padding inside a document. Put padding at the ends of a row; if a document "
            "begins there, let position_ids start again at 0"
        )
    return Announcement(local, unit)


def with_ids(mine: Announcement, given: Mapping[str, Any]) -> Announcement:
    """The same with the fingerprint of its token ids, where the forward is given any."""
    if (ids := given.get("input_ids")) is None:
        return mine
    return replace(mine, ids=digest(np.asarray(_numpy(ids), np.int64)) >> 2)


def batch_shape(given: Mapping[str, Any]) -> tuple[int, int]:
    for name in ("input_ids", "inputs_embeds"):
        if (value := given.get(name)) is not None:
            return int(value.shape[0]), int(value.shape[1])
    raise CADDataError("the model was called without input_ids and inputs_embeds")


def _compare(first: _Source, other: _Source, width: int) -> None:
    most = BEGINS if first.documents and other.documents else GOES_ON
    rows = np.stack([first.rows, other.rows]).clip(max=most)
    if len(wrong := np.flatnonzero(rows[0] != rows[1])):
        token = f"token {wrong[0] % width} of batch row {wrong[0] // width}"
        by_first, by_other = (_IS[one] if most == BEGINS else ("padding", "a token")[one] for one in rows[:, wrong[0]])
        raise CADDataError(
            f"{first.name} and {other.name} disagree: {token} is {by_first} by {first.name}, and {by_other} by "
            f"{other.name}. Pass one of them, or let both say the same"
        )


def _read_lengths(given: Mapping[str, Any], batch: int, width: int) -> Iterator[_Source]:
    for name in CUMULATIVE:
        if given.get(name) is None:
            continue
        rows = _rows(segments_from_cumulative(_numpy(given[name]), batch * width, name))
        if len(crossed := np.flatnonzero(rows.reshape(batch, width)[:, 0] == GOES_ON)):
            raise CADDataError(
                f"{name} and the shape of the micro-batch, [{batch}, {width}], disagree: a document goes on from batch "
                f"row {crossed[0] - 1} to {crossed[0]}. Let documents end with their row, or flatten the batch to one"
            )
        yield _Source(name, rows)


def _read_mask(mask: Any, batch: int, width: int) -> Iterator[_Source]:
    mask = torch.from_numpy(mask) if isinstance(mask, np.ndarray) else mask
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.ndim not in (2, 4)):
        raise _refuse_ready_made(f"a {type(mask).__name__}", "CAD reads tensors of two and of four axes")
    if mask is not None and mask.ndim == 4:
        yield _Source(MASK, _read_ready_made(mask, batch, width))
    else:
        yield from _read_numbers(MASK, mask, 0, batch, width)


def _read_numbers(name: str, given: Any, padding: int, batch: int, width: int) -> Iterator[_Source]:
    if given is None:
        return
    values = _numpy(given)
    values = values.astype(np.int8) if values.dtype == bool else values
    if values.shape != (batch, width):
        more = ""
        if name == MASK and values.shape[-1] > width:
            more = "; with CAD neither a prefix (PEFT's prefix tuning) nor a KV cache may stand before its tokens"
        raise CADDataError(f"{name} has shape {values.shape}, but the micro-batch is [{batch}, {width}]{more}")
    wrong = np.argwhere((values < padding) | (values != np.floor(values)))
    if len(wrong):
        row, column = wrong[0]
        raise CADDataError(
            f"{name}[{row}, {column}] is {values[row, column]}: expected {padding} for padding, {padding + 1} for "
            "tokens of a first document, and other whole numbers for those of others"
        )
    real = values != padding
    begins = real.copy()
    begins[:, 1:] &= values[:, 1:] != values[:, :-1]
    documents = bool(values.max() > padding + 1)
    if documents:
        row, column = np.nonzero(begins)
        number = values[row, column]
        _, first = np.unique(np.stack([row, number]), axis=1, return_index=True)
        if len(again := np.setdiff1d(np.arange(len(number)), first)):
            raise CADDataError(
                f"{name}[{row[again[0]]}, {column[again[0]]}] goes back to document {number[again[0]]}, which ended "
                "before: the tokens of a document lie together"
            )
    if documents or not real.all():
        yield _Source(name, (real.astype(np.int8) + begins).ravel(), documents)


def _read_ready_made(mask: torch.Tensor, batch: int, width: int) -> npt.NDArray[np.int8]:
    """What the rows are by a mask [batch or 1, heads, tokens, tokens]: True or 0 shows a key, False or HIDING hides it.
    Documents are read beside the diagonal, and the whole mask is compared with the one that they make. On the mask's
    own device, a number of queries at a time."""
    what = f"of shape {list(mask.shape)}"
    if mask.shape[0] not in (1, batch) or mask.shape[2:] != (width, width) or 0 in mask.shape:
        raise _refuse_ready_made(what, f"the micro-batch is [{batch}, {width}]")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise _refuse_ready_made(what, f"its type is {mask.dtype}, neither bool nor one that is added to scores")

    def shown(part: torch.Tensor) -> torch.Tensor:
        return part if part.dtype == torch.bool else part == 0

    real = shown(mask[:, 0].diagonal(dim1=-2, dim2=-1))
    begins = real.clone()
    begins[:, 1:] &= ~(real[:, :-1] & shown(mask[:, 0].diagonal(-1, dim1=-2, dim2=-1)))
    document = begins.cumsum(1).masked_fill(~real, 0)
    step = max(1, _PAIRS // (mask.shape[0] * mask.shape[1] * width))
    key = torch.arange(width, device=mask.device)
    for first in range(0, width, step):
        part, query = mask[:, :, first : first + step], slice(first, first + step)
        expected = (document[:, query, None] == document[:, None]) & real[:, query, None]
        expected &= key <= key[query, None]
        wrong = shown(part) != expected[:, None]
        if mask.is_floating_point():
            wrong |= ~expected[:, None] & ~(part <= HIDING)
        if bool(wrong.any()):
            row, head, query_at, key_at = wrong.nonzero()[0].tolist()
            value = part[row, head, query_at, key_at].item()
            does = "show" if bool(expected[row, query_at, key_at]) else "hide"
            at = f"[{row}, {head}, {first + query_at}, {key_at}]"
            raise _refuse_ready_made(what, f"{at} is {value}, but documents would {does} that key")
    return (real.to(torch.int8) + begins).expand(batch, width).reshape(-1).cpu().numpy()


def _refuse_ready_made(what: str, found: str) -> CADUnsupportedError:
    return CADUnsupportedError(
        f"a ready-made attention mask {what} was passed that is not one of packed documents, block-diagonal and "
        f"causal: {found}. Pass position_ids that start again at 0 at each document, or cu_seq_lens_q, and no mask; or "
        "a 2-D mask of padding"
    )


def _read_positions(positions: Any, real: npt.NDArray[np.bool_]) -> tuple[np.ndarray, bool]:
    """[batch, tokens] positions of text, and whether transformers takes documents from them; `real`: no padding."""
    batch, width = real.shape
    array = np.arange(width)[None] if positions is None else _numpy(positions)
    if array.ndim == 3 and array.shape[0] == OF_TEXT:
        array = array[0]
    of_text = array.ndim != 3
    if not of_text and array.shape == (3, batch, width):
        array = array[0] if (array == array[:1]).all() else _count_tokens(array, real)
    array = np.atleast_2d(array)
    if array.shape == (1, width):
        array = np.repeat(array, batch, axis=0)
    if array.shape != (batch, width):
        raise CADDataError(
            f"position_ids has shape {array.shape}, but the micro-batch is [{batch}, {width}]: CAD reads positions "
            "of text, of time, height and width, or of all four"
        )
    return array, of_text


def _count_tokens(axes: np.ndarray, real: npt.NDArray[np.bool_]) -> Ints:
    """Positions of text [batch, tokens] by those of three axes: a document begins where all are 0."""
    token = np.broadcast_to(np.arange(real.shape[1]), real.shape)
    begins = real & (axes == 0).all(axis=0)
    headless = np.argwhere(real & (real.cumsum(axis=1) == 1) & ~begins)
    if len(headless):
        row, column = headless[0]
        raise CADDataError(
            f"position_ids of three axes (time, height, width) are {axes[:, row, column].tolist()} at token {column} "
            f"of batch row {row}, its first: which token of its document it is cannot be read from them. Put the "
            "positions of the text before them as a first of four axes"
        )
    return token - np.maximum.accumulate(np.where(begins, token, 0), axis=1)


def _rows(local: LocalSegments) -> npt.NDArray[np.int8]:
    rows = (local.positions() != layout.PADDING).astype(np.int8)
    rows[local.offset[(local.begin == 0) | (local.offset == 0)]] = BEGINS
    return rows


def _segments(rows: npt.NDArray[np.int8], by_positions: LocalSegments) -> LocalSegments:
    """Segments of what the rows are; the first document begins at the position that it has."""
    offset = np.flatnonzero(rows == BEGINS)
    stop = np.flatnonzero((rows != PADDING) & (np.append(rows[1:], PADDING) != GOES_ON)) + 1
    begin = np.zeros(len(offset), np.int64)
    begin[:1] = by_positions.begin[:1]
    return LocalSegments(begin, begin + stop - offset, offset, len(rows))


def _numpy(value: Any) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        value = (value.float() if value.dtype == torch.bfloat16 else value).detach().cpu()
    return np.asarray(value)
