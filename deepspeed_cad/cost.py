"""Cost: seconds for a CA task (forward and backward) and seconds for bytes over a link.

A task of one head group with `pairs` query-key pairs, `rows` query rows and `keys` KV rows takes
`pair * pairs + row * rows + key * keys + task` seconds. The `key` term is what makes short shards with long prefixes
dear: in backward every shard writes a dK/dV for its whole prefix. On an H200 with FlashAttention-4 one such row costs
as much as about 250 pairs, and the four terms predict the measured kernels over 64 to 4096 rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class CostModel:
    """Linear cost of a CA task of one head group, forward and backward together, and of moving bytes."""

    name: str = "pairs"
    unit: str = "pairs"
    """"seconds", or "pairs" where nothing was measured."""
    pair: float = 1.0
    """Per query-key pair of one head group."""
    row: float = 0.0
    key: float = 0.0
    """Per KV row read by a task, per head group."""
    task: float = 0.0
    byte_inside: float = 0.0
    """Per byte of one layer's forward from a rank of the same host, forward and backward together."""
    byte_between: float = 0.0
    """The same between hosts, where each rank sends and receives at once."""

    def of(self, q_begin: npt.ArrayLike, q_end: npt.ArrayLike, window: int | None = None) -> npt.NDArray[np.float64]:
        """Cost of query rows [q_begin, q_end) of a document for one head group, elementwise."""
        begin, end = np.asarray(q_begin, np.int64), np.asarray(q_end, np.int64)
        rows = end - begin
        keys = end - window_start(begin, window)
        cost = self.pair * count_pairs(begin, end, window) + self.row * rows + self.key * keys + self.task
        return np.where(rows > 0, cost, 0.0)

    def of_forward(self, share: float) -> CostModel:
        """The cost of the forward alone; `share`: of the forward in the cost of pairs and rows. Keys cost in backward
        only, and what one byte costs is counted where passes are timed."""
        return replace(self, pair=self.pair * share, row=self.row * share, key=0.0, task=self.task * share)


PAIRS = CostModel()
"""One per query-key pair: no measurement needed, and exact where kernels run at one speed."""
TILE = 128
"""Keys that kernels read at once, at most."""


def window_start(q_begin: npt.ArrayLike, window: int | None) -> npt.NDArray[np.int64]:
    """First key position that rows from `q_begin` on are given: all from the tile on that has the window − 1 before it.

    Kernels add up keys tile by tile, so a row has the same bits wherever its document is cut. csrc/window.h has it too.
    """
    begin = np.asarray(q_begin, np.int64)
    return np.zeros_like(begin) if window is None else np.maximum(begin - window + 1, 0) // TILE * TILE


def count_pairs(q_begin: npt.ArrayLike, q_end: npt.ArrayLike, window: int | None = None) -> npt.NDArray[np.int64]:
    """Query-key pairs of rows [q_begin, q_end): row i reads min(i + 1, window) keys."""
    begin, end = np.asarray(q_begin, np.int64), np.asarray(q_end, np.int64)

    def up_to(x: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        ramp = x if window is None else np.minimum(x, window)
        return ramp * (ramp + 1) // 2 + (x - ramp) * (0 if window is None else window)

    return up_to(end) - up_to(begin)
