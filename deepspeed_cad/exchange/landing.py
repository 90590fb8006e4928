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
from deepspeed_cad.exchange.failure.roll_call import RollCall
from deepspeed_cad.exchange.native_calls import Table, symmetric_memory
from deepspeed_cad.exchange.peers import PeerGroup
from deepspeed_cad.schedule.room import HEADROOM

logger = logging.getLogger(__name__)

GRAIN = 8 << 20
"""Bytes: capacities are multiples."""


class NoRoomError(CADError):
    """Some rank has no memory left for what lands there: the same on all ranks, and all keep what they had."""


class SymmetricBuffer:
    """Memory of equal size on every rank, mapped by all."""

    def __init__(self, tensor: torch.Tensor, peers: PeerGroup, device: torch.device) -> None:
        """Map it; `tensor` is this rank's. Collective."""
        self.tensor = tensor
        if peers.handle is None:
            self.addresses: Table = np.array([tensor.data_ptr()], np.int64)
            return
        with torch.cuda.device(device):
            memory: Any = symmetric_memory()
            self._handle = memory.rendezvous(tensor, peers.handle)
        shift = int(getattr(self._handle, "offset", 0) or 0)
        self.addresses = np.array([int(p) + shift for p in self._handle.buffer_ptrs], np.int64)
        """[members]: where each rank's memory begins, in this process."""
        rank = peers.place
        if int(self.addresses[rank]) != tensor.data_ptr():
            raise CADError(
                f"symmetric memory gave address {int(self.addresses[rank]):#x} for this rank's own buffer at "
                f"{tensor.data_ptr():#x}: torch {torch.__version__} places buffers in a way that is not known here"
            )


def make_buffers(
    sizes: list[int], peers: PeerGroup, device: torch.device, roll_call: RollCall, what: str
) -> list[SymmetricBuffer]:
    """Buffers of the same sizes on every rank. Collective.

    All are allocated before ranks meet. Where one rank lacks one of them, all raise the same NoRoomError, `what` in it,
    and nothing is left behind.
    """
    memory: Any = torch if peers.handle is None else symmetric_memory()
    tensors, problem = _allocate(memory, sizes, device, roll_call.alarm.goes_on)
    # Before the ranks map each other's memory: who waits there for a rank that has none waits for half an hour.
    roll_call.agree(what, problem, NoRoomError)
    return [SymmetricBuffer(tensor, peers, device) for tensor in tensors]


def _allocate(
    memory: Any, sizes: list[int], device: torch.device, this_stream_only: bool
) -> tuple[list[torch.Tensor], str]:
    """Zeros of these sizes in bytes, or why there are none. Waits for the GPU, or for the current stream of it only."""
    problem = ""
    for attempt in range(2):
        tensors: list[torch.Tensor] = []
        try:
            with torch.cuda.device(device):
                for size in sizes:
                    tensors.append(memory.empty(size, dtype=torch.uint8, device=device).fill_(0))
                if this_stream_only:
                    torch.cuda.current_stream(device).synchronize()
                else:
                    torch.cuda.synchronize(device)
            return tensors, ""
        except RuntimeError as error:
            problem = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        tensors.clear()
        if attempt == 0:
            # Memory that torch keeps for later tensors is not free for the driver, of whom this memory is asked.
            torch.cuda.empty_cache()
    free, whole = torch.cuda.mem_get_info(device)
    return [], (
        f"{sum(sizes) >> 20} MiB were wanted, {free >> 20} of {whole >> 20} MiB are free on {device} after torch gave "
        f'back what it had cached ({problem}); set "memory" to fewer GiB, or use smaller micro-batches or more '
        "checkpointing"
    )


class LandingArea:
    """One landing area that grows in lockstep."""

    def __init__(self, label: str, peers: PeerGroup, device: torch.device, roll_call: RollCall) -> None:
        self.label, self.peers, self.device, self.roll_call = label, peers, device, roll_call
        self.capacity = 0
        self.generation = 0
        """How often it was made anew."""
        self.last_operation = 0
        """Number of the exchange that filled it last."""
        self._buffer: SymmetricBuffer | None = None

    def holds(self, needed: Table) -> bool:
        """Whether `needed` bytes ([members]) fit as it is."""
        return self._buffer is not None and int(needed.max(initial=0)) <= self.capacity

    @property
    def buffer(self) -> SymmetricBuffer:
        """Its memory."""
        if self._buffer is None:
            raise CADError(f"landing area {self.label} was used before it was made, or after close()")
        return self._buffer

    def ensure(self, needed: Table, headroom: float = HEADROOM) -> bool:
        """Have room for `needed` bytes ([members]); every rank passes the same numbers and grows at the same exchange.

        Gives whether the memory is another than before.
        """
        return grow_together([(self, needed)], headroom)

    def take(self, buffer: SymmetricBuffer, capacity: int) -> None:
        logger.info("landing area %s grows from %d to %d MiB", self.label, self.capacity >> 20, capacity >> 20)
        self._buffer, self.capacity = buffer, capacity
        self.last_operation = 0
        self.generation += 1

    def field(self, begin: int, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """A field that landed here: [rows, width]."""
        size = rows * width * dtype.itemsize
        return self.buffer.tensor[begin : begin + size].view(dtype).view(rows, width)

    def release(self) -> None:
        self._buffer, self.capacity = None, 0


def grow_together(areas: list[tuple[LandingArea, Table]], headroom: float = HEADROOM) -> bool:
    """Have room for so many bytes ([members]) in each of these areas of one group, or raise NoRoomError and keep what
    was. Every rank passes the same areas and numbers, at the same exchange. An area that grows becomes `headroom` times
    as large as it must be.

    Gives whether any has other memory than before.
    """
    growing = [(area, _capacity(needed, headroom)) for area, needed in areas if not area.holds(needed)]
    if not growing:
        return False
    first = growing[0][0]
    # Copies and waits under way on this rank end here; making new buffers meets all other ranks, so afterwards nobody
    # can still write into the old ones.
    # Where servers change, another stream may wait for a trainer that waits for this one; and new areas replace none.
    if any(area.capacity for area, _ in growing) or not first.roll_call.alarm.goes_on:
        torch.cuda.synchronize(first.device)
    labels = ", ".join(area.label for area, _ in growing)
    what = f"the growth of landing area{'s' if len(growing) > 1 else ''} {labels}"
    buffers = make_buffers([size for _, size in growing], first.peers, first.device, first.roll_call, what)
    for (area, size), buffer in zip(growing, buffers, strict=True):
        area.take(buffer, size)
    return True


def _capacity(needed: Table, headroom: float) -> int:
    return -(-int(max(needed.max(initial=0), 1) * headroom) // GRAIN) * GRAIN
