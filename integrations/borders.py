"""Where the documents of a micro-batch begin, for layers that carry state from token to token.

In: the segments of this rank. Out: `Borders`, which ride on the micro-batch through the model as an argument of its
layers, so that a recompute finds them too. `B` batch rows, `S` tokens of each, `T` = B · S.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from deepspeed_cad.attention.spanning import Spanning
from deepspeed_cad.layout import LocalSegments

NAME = "cad_borders"
"""The argument by which a decoder's layers get their borders."""

Ints = npt.NDArray[np.int64]


def find_borders(local: LocalSegments, batch: int, width: int) -> Ints:
    """[pieces + 1] rows of the flattened batch at which state begins anew, and the end.

    Every batch row begins anew and every document does. Padding behind a document goes on with its state, as in the
    model itself; nobody reads it after.
    """
    begin = local.offset[local.end > local.begin]
    return np.unique(np.concatenate([np.arange(batch + 1, dtype=np.int64) * width, begin]))


class Borders:
    """The pieces of one micro-batch on one rank, in the forms that layers and kernels want.

    Not a dataclass: FSDP rebuilds dataclasses among a layer's arguments to cast the tensors in them.
    """

    __slots__ = (
        "_gapped", "_on_device", "_whole", "apart", "arrived", "batch", "begin", "checked", "due", "spanning", "width",
    )  # fmt: skip

    def __init__(
        self,
        begin: Ints,
        batch: int,
        width: int,
        due: bool = False,
        apart: bool = False,
        spanning: Spanning | None = None,
    ) -> None:
        """`begin` as from `find_borders`; `due`: the sampled check looks at this micro-batch; `apart`: run every
        document alone, whatever kernels can do, to compare with; `spanning`: documents that lie on several ranks."""
        self.spanning = spanning
        self._whole: Borders | None = None
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

    def whole(self) -> Borders:
        """Those of the rows that are in no document that spans ranks."""
        if self._whole is None:
            rows, starts = self._rows_whole(), np.zeros(self.batch * self.width, bool)
            starts[self.begin[:-1]] = True
            # Padding behind a document that spans ranks begins anew.
            starts[rows] |= np.diff(rows, prepend=-1) > 1
            self._whole = Borders(np.append(np.flatnonzero(starts[rows]), len(rows)), 1, len(rows))
        return self._whole

    def order(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows outside of documents that span ranks, rows inside, and where each row lies in the two joined. A rank
        that has none inside gives its first row to stand in for them."""
        assert self.spanning is not None
        whole, inside = self._rows_whole(), self.spanning.rows
        place = np.argsort(np.concatenate([whole, inside]))
        of = {"whole": whole, "inside": inside if len(inside) else np.zeros(1, np.int64), "place": place}
        return tuple(self._upload(what, rows, device) for what, rows in of.items())  # type: ignore[return-value]

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
        found = self._on_device.get((what, device))
        if found is None:
            found = torch.from_numpy(np.ascontiguousarray(values)).to(device, non_blocking=True)
            self._on_device[what, device] = found
        return found
