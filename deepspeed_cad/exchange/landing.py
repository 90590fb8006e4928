"""Landing areas: device memory that every rank of a group maps, so that peers can copy into it.

In: sizes that all ranks compute alike. Out: a tensor on this rank and the address of everyone's. Growing is
collective: every rank decides it from the same plan, at the same exchange.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch

from deepspeed_cad.errors import CADError
from deepspeed_cad.exchange.meeting import Meeting
from deepspeed_cad.exchange.native_calls import Table, symmetric_memory
from deepspeed_cad.exchange.peers import PeerGroup

logger = logging.getLogger(__name__)

HEADROOM = 1.25
GRAIN = 8 << 20
"""Bytes: capacities are multiples."""


class SymmetricBuffer:
    """Memory of equal size on every rank, mapped by all. Making one is collective."""

    def __init__(self, size: int, peers: PeerGroup, device: torch.device, meeting: Meeting, what: str) -> None:
        """`what`: for an error, which is the same on all members where one of them has no memory left."""
        memory: Any = torch if peers.handle is None else symmetric_memory()
        tensor, problem = _allocate(memory, size, device)
        # Before the ranks map each other's memory: who waits there for a rank that has none waits for half an hour.
        meeting.agree(what, problem)
        assert tensor is not None
        self.tensor: torch.Tensor = tensor
        if peers.handle is None:
            self.addresses: Table = np.array([self.tensor.data_ptr()], np.int64)
            return
        with torch.cuda.device(device):
            self._handle = memory.rendezvous(self.tensor, peers.handle)
        shift = int(getattr(self._handle, "offset", 0) or 0)
        self.addresses = np.array([int(p) + shift for p in self._handle.buffer_ptrs], np.int64)
        """[members]: where each rank's memory begins, in this process."""
        rank = peers.place
        if int(self.addresses[rank]) != self.tensor.data_ptr():
            raise CADError(
                f"symmetric memory gave address {int(self.addresses[rank]):#x} for this rank's own buffer at "
                f"{self.tensor.data_ptr():#x}: torch {torch.__version__} places buffers in a way that is not known here"
            )


def _allocate(memory: Any, size: int, device: torch.device) -> tuple[torch.Tensor | None, str]:
    """Zeros of `size` bytes, or why there are none."""
    problem = ""
    for attempt in range(2):
        try:
            with torch.cuda.device(device):
                tensor = memory.empty(size, dtype=torch.uint8, device=device).fill_(0)
                torch.cuda.synchronize(device)
            return tensor, ""
        except RuntimeError as error:
            problem = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if attempt == 0:
            # Memory that torch keeps for later tensors is not free for the driver, of whom this memory is asked.
            torch.cuda.empty_cache()
    free, whole = torch.cuda.mem_get_info(device)
    return None, (
        f"{size >> 20} MiB were wanted, {free >> 20} of {whole >> 20} MiB are free on {device} after torch gave back "
        f"what it had cached ({problem}); use smaller micro-batches, or more checkpointing"
    )


class LandingArea:
    """One landing area that grows in lockstep."""

    def __init__(self, label: str, peers: PeerGroup, device: torch.device, meeting: Meeting) -> None:
        self.label, self.peers, self.device, self.meeting = label, peers, device, meeting
        self.capacity = 0
        self.generation = 0
        """How often it was made anew."""
        self.last_operation = 0
        """Number of the exchange that filled it last."""
        self._buffer: SymmetricBuffer | None = None

    @property
    def addresses(self) -> Table:
        """[members]: where the area begins at each rank."""
        return self._require().addresses

    @property
    def tensor(self) -> torch.Tensor:
        """This rank's area, uint8."""
        return self._require().tensor

    def ensure(self, needed: Table) -> bool:
        """Have room for `needed` bytes ([members]); every rank passes the same numbers and grows at the same exchange.

        Gives whether the memory is another than before.
        """
        most, generation = int(needed.max(initial=0)), self.generation
        if most > self.capacity or self._buffer is None:
            capacity = -(-int(max(most, 1) * HEADROOM) // GRAIN) * GRAIN
            logger.info("landing area %s grows from %d to %d MiB", self.label, self.capacity >> 20, capacity >> 20)
            # Copies and waits under way on this rank end here; making the new buffer meets all other ranks, so
            # afterwards nobody can still write into the old one.
            torch.cuda.synchronize(self.device)
            what = f"the growth of landing area {self.label}"
            grown = SymmetricBuffer(capacity, self.peers, self.device, self.meeting, what)
            self._buffer, self.capacity = grown, capacity
            self.last_operation = 0
            self.generation += 1
        if most > self.capacity:
            rank = int(self.peers.members[needed.argmax()])
            raise CADError(
                f"landing area {self.label} holds {self.capacity} bytes, the plan brings {most} to rank {rank}"
            )
        return self.generation != generation

    def field(self, begin: int, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """A field that landed here: [rows, width]."""
        size = rows * width * dtype.itemsize
        return self._require().tensor[begin : begin + size].view(dtype).view(rows, width)

    def release(self) -> None:
        """Give the memory back."""
        self._buffer, self.capacity = None, 0

    def _require(self) -> SymmetricBuffer:
        if self._buffer is None:
            raise CADError(f"landing area {self.label} was used before it was made, or after close()")
        return self._buffer
