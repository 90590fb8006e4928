"""The limit of memory: how much of each GPU the exchanges of attention may take, learned and agreed.

In: the key "memory", and what this rank sees of its GPU. Out: one limit, that of the rank with least.

"auto" is a share of the GPU's memory from the start: waves that fit into it mostly cost little. A tick that does not
fit, however it is cut, gets the least that there is a cut for. After the first backward a tick whose ranks waves would
hold up gets up to twice the share, and all that is no more than what training leaves free. Beside servers only that
counts: waves after the first two would hold up the linear layers that hide what servers do.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from deepspeed_cad.layout import Ints

SHARE = 1 / 32
"""Of a GPU's memory, with "auto". A choice: 4.4 GiB of an H200, more than 64K tokens of an 8B Llama need at once."""
ALL = 1.0
MARGIN = 0.03
"""Of a GPU's memory that stays free beyond the peak of the steps so far: steps differ, and memory is fragmented."""


class Limit(NamedTuple):
    size: float
    """Bytes on each rank; infinite where there is no limit."""
    source: str
    most: float = 0.0
    """Bytes for what no cut makes fit into `size`; if this is not above `size`, such a tick is an error."""


NO_LIMIT = Limit(float("inf"), "")


class MemoryLimit:
    """The limit of one group; a Reporter."""

    columns = 2
    """Most bytes (0: no limit), bytes that training leaves (0: nobody knows)."""

    def __init__(
        self,
        given: float | None,
        device: torch.device,
        members: Sequence[int],
        has_trained: Callable[[], bool] = lambda: False,
        pauses: Callable[[], bool] = lambda: False,
        share: float = SHARE,
    ) -> None:
        """`given`: GiB of the configuration; None for "auto", which only GPUs have. `members`: the ranks of the group.
        `has_trained`: whether a backward ran, so that the peak of training is known. `pauses`: while it holds on any
        rank, nothing depends on measured memory. `share`: of a GPU's memory, at most, with "auto"."""
        self.given = None if given is None else given * 2**30
        self.device, self.share, self._members = device, share, members
        self._has_trained, self._pauses = has_trained, pauses
        self.most_needed = self._peak = 0.0
        self._lacked = float("inf")
        self.now = NO_LIMIT if self.given is None else Limit(self.given, 'the key "memory"')

    def report(self, model: int) -> Ints:
        most, free = self._lacked, 0
        if self.given is not None:
            most = min(most, self.given)
        elif self.device.type == "cuda":
            left, whole = torch.cuda.mem_get_info(self.device)
            most = min(most, self.share * whole)
            if self._has_trained() and not self._pauses():
                # What torch keeps above its peak is given back where somebody asks for it. Scripts may reset that peak.
                self._peak = max(self._peak, torch.cuda.max_memory_allocated(self.device))
                unused = torch.cuda.memory_reserved(self.device) - self._peak
                free = max(1, int(max(left + unused + self.most_needed - MARGIN * whole, self.most_needed)))
        return np.array([0 if most == float("inf") else max(1, int(most)), free], np.int64)

    def hear(self, model: int, reports: Ints) -> None:
        sizes, free = reports.T
        self.now = NO_LIMIT
        if (sizes > 0).any():
            size = int(sizes[sizes > 0].min())
            source = 'the key "memory"'
            if self.given is None:
                source = f'"memory": "auto" (by rank {self._members[(sizes == size).argmax()]})'
            most = float(free.min()) if (free > 0).all() else float("inf")
            # What some rank lacked all ranks know.
            self.now = Limit(float(size), source, 0.0 if self.given is not None or self._lacked <= size else most)
        if (free > 0).all() and free.min() < self.now.size:
            self.now = Limit(float(free.min()), f"what training leaves free on rank {self._members[free.argmin()]}")

    def needs(self, size: float) -> None:
        """A tick needs so much, and has it."""
        self.most_needed = max(self.most_needed, size)

    def lacks(self, limit: float) -> None:
        """There was not more than this on some rank; heard by all with the next report."""
        self._lacked = min(self._lacked, limit)
