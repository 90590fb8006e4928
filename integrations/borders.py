"""Where the documents of a micro-batch begin, for layers that carry state from token to token, and how such a layer is
run so that none crosses a border.

In: the segments of this rank. Out: `Borders`, which ride on the micro-batch through the model as an argument of its
layers, so that a recompute finds them too. `B` batch rows, `S` tokens of each, `T` = B · S.

How is found out on the layer itself, as packages and versions differ in what they do with borders: the first `Way` that
passes the probe. Of two tiny documents in a row, what the second gives must not change when the first does, and both
must give what they give alone. The probe has random numbers of its own, and calls the layer equally often everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from deepspeed_cad.attention.spanning import Spanning
from deepspeed_cad.layout import Ints, LocalSegments

NAME = "cad_borders"
"""The argument by which a decoder's layers get their borders."""

LENGTHS = (67, 70)
"""Tokens of the probe's documents: both longer than a chunk of the kernels (64), the border inside of one."""
LOUD = 30.0
"""How many times larger than the second document the first is. At the start of a training layers hand on little state,
and it grows with the square of this."""
VISIBLE = 1e-3
"""Share of its largest output by which the second document must change without borders; else the probe could not see a
leak, as where a layer's last projection is still zero."""
_NOISE = 2.0
"""The second document may change with the first by so many times what it changes from run to run. That is nothing with
kernels that give the same for the same, as those of forwards do: then not one bit may change, however small the state
that a layer hands on at the start of training."""
_ALONE = {torch.float64: 1e-3, torch.float32: 2e-2, torch.float16: 5e-2, torch.bfloat16: 0.1}
"""How far both may be from what they give alone, as a share of the largest output. Kernels round in fp32 or TF32."""


class _Take(torch.autograd.Function):
    """`index_select` of rows that are chosen once each, or need no gradient: its own backward adds atomically."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
        ctx.given = x.shape, dim, index
        return x.index_select(dim, index)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        shape, dim, index = ctx.given
        return gradient.new_zeros(shape).index_copy_(dim, index, gradient), None, None


take: Callable[[torch.Tensor, int, torch.Tensor], torch.Tensor] = _Take.apply


def find_borders(local: LocalSegments, batch: int, width: int) -> Ints:
    """[pieces + 1] rows of the flattened batch at which state begins anew, and the end. Every batch row begins anew and
    every document does. Padding behind a document goes on with its state, as in the model itself; nobody reads it."""
    begin = local.offset[local.end > local.begin]
    return np.unique(np.concatenate([np.arange(batch + 1, dtype=np.int64) * width, begin]))


class Borders:
    """The pieces of one micro-batch on one rank, in the forms that layers and kernels want. Not a dataclass: FSDP
    rebuilds dataclasses among a layer's arguments to cast the tensors in them."""

    def __init__(
        self, begin: Ints, batch: int, width: int, due: bool = False, apart: bool = False, spanning: Any = None
    ) -> None:
        """`begin` as from `find_borders`; `due`: the sampled check looks at this micro-batch; `apart`: run every
        document alone, whatever kernels can do, to compare with; `spanning`: documents that lie on several ranks."""
        self.spanning: Spanning | None = spanning
        self.begin, self.batch, self.width, self.due, self.apart = begin, batch, width, due, apart
        self.arrived = False
        """A decoder layer got them."""
        self.checked: set[Any] = set()
        """Kinds of layers that were checked in this micro-batch."""
        self._on_device: dict[tuple[str, torch.device], torch.Tensor] = {}
        self._gapped: dict[int, tuple[Borders, Ints]] = {}

    @classmethod
    def of_lengths(cls, lengths: Iterable[int]) -> Borders:
        """Borders of one batch row of documents."""
        begin = np.concatenate([[0], np.cumsum(np.fromiter(lengths, np.int64))])
        return cls(begin, 1, int(begin[-1]))

    @property
    def lengths(self) -> list[int]:
        """Tokens of each piece."""
        return [int(length) for length in np.diff(self.begin)]

    @property
    def are_batch_rows(self) -> bool:
        """Whether every piece is a whole batch row: then the model separates them by itself."""
        return len(self.begin) == self.batch + 1

    def alone(self) -> Borders:
        """The same, with every document run alone."""
        return Borders(self.begin, self.batch, self.width, apart=True)

    def cumulative(self, device: torch.device) -> torch.Tensor:
        """int32 [pieces + 1], as varlen kernels take it. The same tensor for all layers: FLA caches by identity."""
        return self._upload("cumulative", self.begin.astype(np.int32), device)

    def sequence(self, device: torch.device) -> torch.Tensor:
        """int32 [1, T]: the piece of each row, as causal-conv1d and mamba-ssm take it."""
        numbers = np.repeat(np.arange(len(self.begin) - 1, dtype=np.int32), self.lengths)
        return self._upload("sequence", numbers[None], device)

    @cached_property
    def whole(self) -> Borders:
        """Those of the rows that are in no document that spans ranks."""
        rows, starts = self._rows_whole(), np.zeros(self.batch * self.width, bool)
        starts[self.begin[:-1]] = True
        # Padding behind a document that spans ranks begins anew.
        starts[rows] |= np.diff(rows, prepend=-1) > 1
        return Borders(np.append(np.flatnonzero(starts[rows]), len(rows)), 1, len(rows))

    def order(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows outside of documents that span ranks, rows inside, and where each row lies in the two joined. A rank
        that has none inside gives its first row to stand in for them."""
        assert self.spanning is not None
        whole, inside = self._rows_whole(), self.spanning.rows
        place = np.argsort(np.concatenate([whole, inside]))
        of = {"whole": whole, "inside": inside if len(inside) else np.zeros(1, np.int64), "place": place}
        return tuple(self._upload(what, rows, device) for what, rows in of.items())  # type: ignore[return-value]

    @cached_property
    def all_span(self) -> bool:
        """Whether all rows are in documents that span ranks, and lie in their order."""
        assert self.spanning is not None
        return np.array_equal(self.spanning.rows, np.arange(self.batch * self.width))

    def _rows_whole(self) -> Ints:
        assert self.spanning is not None
        return np.setdiff1d(np.arange(self.batch * self.width), self.spanning.rows)

    def gapped(self, gap: int, device: torch.device) -> tuple[Borders, torch.Tensor]:
        """The same pieces with `gap` rows added behind each; and int64 [T], where each row lies among those."""
        if gap not in self._gapped:
            lengths = self.lengths
            rows = np.arange(sum(lengths)) + np.repeat(np.arange(len(lengths)) * gap, lengths)
            self._gapped[gap] = Borders.of_lengths(length + gap for length in lengths), rows
        wide, rows = self._gapped[gap]
        return wide, self._upload(f"rows {gap}", rows, device)

    def _upload(self, what: str, values: np.ndarray, device: torch.device) -> torch.Tensor:
        if (found := self._on_device.get((what, device))) is None:
            found = torch.from_numpy(np.ascontiguousarray(values)).to(device, non_blocking=True)
            self._on_device[what, device] = found
        return found


class Way(Enum):
    """How a layer runs a packed row. The order in which they are tried is that of the names here."""

    BORDERS = "its kernels take the borders"
    GAPS = "its recurrent kernel takes the borders, and blank rows between documents part its convolution"
    DOCUMENTS = "document by document"


Run = Callable[[Way, Borders, torch.Tensor], torch.Tensor]
"""Runs the layer one way on hidden states [1, T, D]."""
Whole = Callable[[torch.Tensor], torch.Tensor]
"""Runs the layer on hidden states [B, S, D], each batch row one document."""


@torch.compiler.disable
def find_way(run: Run, whole: Whole, like: torch.Tensor, ways: list[Way]) -> tuple[Way | None, list[str], bool]:
    """The first of `ways` that keeps documents apart, why those before it do not, and whether that is certain. None
    where no way does. Not certain: the layer shows no state now, so only DOCUMENTS, which needs no proof, is safe."""
    reasons: list[str] = []
    first, second = LENGTHS
    with _aside():
        drawn = torch.randn(2 * first + second, like.shape[-1], generator=torch.Generator().manual_seed(0))
        one, other, last = drawn.to(like.device, like.dtype).split([first, first, second])
        rows, changed = (torch.cat([LOUD * loud, last])[None] for loud in (one, other))
        alone = [whole(document[None]) for document in (LOUD * one, last)]
        largest, borders = float(alone[1].abs().max()), Borders.of_lengths(LENGTHS)
        if not _change(whole(rows), whole(changed)) > VISIBLE * largest:
            return Way.DOCUMENTS, ["its output does not show state yet"], False
        for way in ways:
            try:
                got, again, after = (run(way, borders, one) for one in (rows, rows, changed))
                reason = _why_wrong(got, again, after, alone, _ALONE[like.dtype])
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # what packages raise that do not know borders is of many kinds
                reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            if not reason:
                return way, reasons, True
            reasons.append(f"{way.name.lower()}: {reason}")
    return None, reasons, True


def _change(one: torch.Tensor, other: torch.Tensor) -> float:
    """Of what the second document gives."""
    return float((one[:, LENGTHS[0] :] - other[:, LENGTHS[0] :]).abs().max())


def _why_wrong(
    got: torch.Tensor, again: torch.Tensor, changed: torch.Tensor, alone: list[torch.Tensor], most: float
) -> str:
    """Empty where what came out of two runs, and of one behind another first document, is right."""
    leak, noise = _change(got, changed), _change(got, again)
    if not leak <= _NOISE * noise:
        share = leak / float(alone[1].abs().max())
        return f"a document changed by {share:.1e} of its largest value with the document before it"
    for document, expected in zip(got.split(LENGTHS, dim=1), alone):
        error = float((document - expected).abs().max() / expected.abs().max())
        if not error <= most:
            return f"a document differs by {error:.1e} of its largest value from what it gives alone"
    return ""


@contextmanager
def _aside() -> Iterator[None]:
    """Nothing that runs in here is recorded: not by autograd, not by selective checkpointing, not by autocast, which
    would keep weights that it cast without gradients for the forward around it."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.no_grad(), _disable_current_modes():
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)
