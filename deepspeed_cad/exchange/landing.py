"""Landing areas: device memory that every rank of a group maps, so that peers can copy into it; and lanes, the places
that waves of a nano-batch take in turn, each with areas of its own.

In: sizes that all ranks compute alike. Out: a tensor on this rank and the address of everyone's. Growing is collective:
every rank decides it from the same plan, at the same exchange.

Why memory is never overwritten too early. All ranks start the same exchanges in the same order, numbered 1, 2, …; flag
p of a rank says the number of p's last finished pushes, and p starts pushing only after what was queued before on the
stream that is current then. For a dispatch that is the training stream, which has waited for all earlier exchanges; so
"flag p ≥ n", n a dispatch, means that p is done with all it did before. A return may start on another stream: the
training stream waits for that before it places what came back. Where ways are apart, flag p is the one of the way of n.
  Dispatch: one area per lane. What landed is read before its return starts, on the same stream; so the area is free at
  a peer whose flag has reached that return. Only where dispatches follow each other without a return (timed links, and
  `Spanning.bring`), a second area takes turns with the first: free where a flag has reached the last dispatch.
  Return: one area per lane. A return must be waited for before the next dispatch starts whose return takes its lane
  (checked), so the area is free at a peer whose flag has reached that dispatch.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deepspeed_cad.errors import CADError, in_one_line
from deepspeed_cad.exchange.copies import ALIGNMENT
from deepspeed_cad.exchange.failure.roll_call import RollCall
from deepspeed_cad.exchange.group import PeerGroup
from deepspeed_cad.exchange.native_calls import Table, symmetric_memory
from deepspeed_cad.exchange.transport import Returned
from deepspeed_cad.schedule import Schedule
from deepspeed_cad.schedule.waves import BACK, HEADROOM, OUT, Room, lane_bytes

logger = logging.getLogger(__name__)

GRAIN = 8 << 20
"""Bytes: capacities are multiples."""
FIELDS = 8
"""At most of one exchange."""


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
    """Buffers of the same sizes on every rank, allocated before ranks meet. Collective. Where one rank lacks one, all
    raise the same NoRoomError, `what` in it, and nothing is left behind."""
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
            problem = in_one_line(error)
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


@dataclass(eq=False)
class LandingArea:
    label: str
    capacity: int = 0
    last_operation: int = 0
    """Number of the exchange that filled it last."""
    memory: SymmetricBuffer | None = None
    unfinished: Returned | None = None
    """What is under way on the way back."""

    @property
    def buffer(self) -> SymmetricBuffer:
        if self.memory is None:
            raise CADError(f"landing area {self.label} was used before it was made, or after close()")
        return self.memory

    def field(self, begin: int, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        return self.buffer.tensor[begin : begin + rows * width * dtype.itemsize].view(dtype).view(rows, width)


@dataclass(eq=False)
class OutLane:
    """A place on the way out: its areas, and the numbers of the exchanges that used it last."""

    areas: tuple[LandingArea, LandingArea]
    """The second one only where dispatches follow each other without a return."""
    filled: int = 1
    dispatch: int = 0
    give_back: int = 0
    """The return of that dispatch; 0 before it started."""

    @property
    def guard(self) -> int:
        """The exchange that peers must have reached, so that the area of the next dispatch is free there."""
        return self.give_back or self.dispatch

    def next_area(self) -> LandingArea:
        self.filled = 0 if self.give_back else 1 - self.filled
        return self.areas[self.filled]


class Lanes:
    def __init__(self, peers: PeerGroup, device: torch.device, roll_call: RollCall) -> None:
        self.peers, self.device, self.roll_call = peers, device, roll_call
        self._out: dict[tuple[int, int], OutLane] = {}
        self._back: dict[tuple[int, int], LandingArea] = {}

    def out(self, nano_batch: int, wave: int) -> OutLane:
        """Where a wave of a nano-batch lands at its servers."""
        key = nano_batch, wave % OUT
        if key not in self._out:
            self._out[key] = OutLane((_area("out", *key), _area("out (odd)", *key)))
        return self._out[key]

    def begin(self, nano_batch: int, wave: int) -> None:
        """Raises CADError where the last return there was not waited for."""
        back = self.back(nano_batch, wave)
        if back.unfinished is not None and not back.unfinished.waited:
            raise CADError(
                f"rank {self.peers.members[self.peers.place]}: an exchange on nano-batch {nano_batch} starts before "
                f"the return of exchange {back.unfinished.parcel.identity.index} on it was waited for"
            )
        back.unfinished = None

    def back(self, nano_batch: int, wave: int) -> LandingArea:
        key = nano_batch, wave % BACK
        if key not in self._back:
            self._back[key] = _area("back", *key)
        return self._back[key]

    def make_room(self, schedules: Sequence[Schedule], room: Room, nano_batch: int) -> bool:
        """Have memory for all waves of a tick. Collective; gives whether some is new. Raises NoRoomError."""
        out = lane_bytes([one.served_rows for one in schedules], room.out, OUT)
        back = lane_bytes([one.landed_rows for one in schedules], room.back, BACK)
        areas = [self.out(nano_batch, number).areas[0] for number in range(len(out))]
        areas += [self.back(nano_batch, number) for number in range(len(back))]
        # Each field begins at a multiple of an alignment.
        needed = [(area, size + FIELDS * ALIGNMENT) for area, size in zip(areas, out + back, strict=True)]
        return self.grow(needed, room.headroom)

    def grow(self, areas: list[tuple[LandingArea, Table]], headroom: float = HEADROOM) -> bool:
        """Have room for so many bytes ([ranks]) in each of these areas, as much as the fullest rank needs on all hosts,
        or raise NoRoomError and keep what was. Every rank passes the same, at the same exchange. An area that grows
        becomes `headroom` times as large as it must be. Gives whether any has other memory than before."""
        growing = [
            (area, -(-int(max(most, 1) * headroom) // GRAIN) * GRAIN)
            for area, most in ((area, int(needed.max(initial=0))) for area, needed in areas)
            if area.memory is None or most > area.capacity
        ]
        if not growing:
            return False
        # Copies and waits under way on this rank end here; making new buffers meets all other ranks, so afterwards
        # nobody can still write into the old ones.
        # Where servers change, another stream may wait for a trainer that waits for this one; and new areas replace
        # none.
        if any(area.capacity for area, _ in growing) or not self.roll_call.alarm.goes_on:
            torch.cuda.synchronize(self.device)
        labels = ", ".join(area.label for area, _ in growing)
        what = f"the growth of landing area{'s' if len(growing) > 1 else ''} {labels}"
        buffers = make_buffers([size for _, size in growing], self.peers, self.device, self.roll_call, what)
        for (area, size), buffer in zip(growing, buffers, strict=True):
            logger.info("landing area %s grows from %d to %d MiB", area.label, area.capacity >> 20, size >> 20)
            area.memory, area.capacity, area.last_operation = buffer, size, 0
        return True

    def areas(self) -> Iterator[LandingArea]:
        for out in self._out.values():
            yield from out.areas
        yield from self._back.values()

    def release(self) -> None:
        self._out.clear()
        self._back.clear()


def _area(what: str, nano_batch: int, number: int) -> LandingArea:
    return LandingArea(f"{what} {nano_batch}" + (f", wave {number}" if number else ""))
