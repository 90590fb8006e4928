"""Parking: what attention keeps until backward waits in host memory, and copy engines bring it there and back.

In: tensors of one call, as its forward leaves them. Out: a `Parcel`, which gives them back on the device. One stream
carries both ways; the host waits for nothing:

    forward of a layer    park ─► the copy out begins     the next layer begins ─► settle: device memory is given back
    backward of a layer   fetch_before ─► the parcel of the layer before begins to come back     take ─► it is there

The layer that ran last has not settled when backward begins, so what it needs at once never leaves. On a CPU the copies
are plain ones and everything else is the same.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from deepspeed_cad.errors import CADError, in_one_line
from deepspeed_cad.exchange.transport import leave_to_streams

logger = logging.getLogger("deepspeed_cad")

BLOCK = 64 << 20
"""Bytes of one block of host memory, a power of two: torch's pinned allocator rounds up to one. A parcel wastes less
than a block."""
ALIGNMENT = 256
"""Bytes: where tensors begin in a parcel."""
RESERVE = 1 << 30
"""Bytes of host memory that parking leaves to others: a host that has none left ends processes without a word."""


class Packed(NamedTuple):
    """Where a tensor lies in its parcel, and what it looks like."""

    begin: int
    shape: torch.Size
    """With its dimensions in the order in which they lie in memory."""
    back: tuple[int, ...]
    dtype: torch.dtype


class Parking:
    """Host memory for what is kept, in blocks that are used again, and the stream that copies."""

    def __init__(self, device: torch.device, block: int = BLOCK) -> None:
        self.device, self.block = device, block
        self.blocks = 0
        """How many blocks were made; they stay until the session closes."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.free: list[Tensor] = []
        self._parcels: WeakValueDictionary[int, Parcel] = WeakValueDictionary()
        """Those that are wanted early, in the order in which they were parked."""
        self._leaving: list[Parcel] = []
        """Their device memory is still there."""
        self._count = 0

    @property
    def host_bytes(self) -> int:
        return self.blocks * self.block

    def park(self, tensors: Sequence[Tensor], label: str, wanted_early: bool = True) -> Parcel:
        """Begin to copy tensors to the host, behind what the current stream has to do.

        `label` names the layer in errors; with `wanted_early`, `fetch_before` brings the parcel back. Raises CADError
        where the host has no memory left."""
        self._count += 1
        parcel = Parcel(self, self._count, label, tensors)
        if wanted_early:
            self._parcels[self._count] = parcel
        self._leaving.append(parcel)
        return parcel

    def settle(self) -> None:
        """Give back the device memory of what was parked; what the current stream does next may use it.

        Called when the next layer begins: by then the copies are done, and the current stream waits for nothing.
        Raises CADError where a model changed in place what was parked."""
        leaving, self._leaving = self._leaving, []
        for parcel in leaving:
            parcel.leave()

    def let_go(self, parcel: Parcel) -> None:
        if self.stay(parcel):
            parcel.leave()

    def stay(self, parcel: Parcel) -> bool:
        """A parcel is wanted again before it has left; False where it has."""
        leaves = parcel in self._leaving
        self._leaving = [one for one in self._leaving if one is not parcel]
        return leaves

    def fetch_before(self, number: int) -> None:
        """Begin to bring back what was parked just before a parcel, of what is wanted early: backward needs it next."""
        if before := [one for one in self._parcels.values() if one.number < number and one.is_away]:
            max(before, key=lambda one: one.number).fetch()

    def take_blocks(self, size: int, label: str) -> list[Tensor]:
        """Blocks for `size` bytes.

        One thread at a time takes, but blocks are given back at any moment (Parcel.__del__), also between two steps
        here. So there are never fewer than were counted, and each is taken by one step. A lock would not do: garbage
        is collected on the thread that holds it, too."""
        count = -(-size // self.block)
        if (missing := count - len(self.free)) > 0:
            self._grow(missing, label)
        return [self.free.pop() for _ in range(count)]

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> torch.cuda.Event | None:
        """Copy second ones into first ones, after what the current stream has to do by now; when that is done."""
        stream = self._stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            for to, of in pairs:
                to.copy_(of, non_blocking=True)
        return None if stream is None else stream.record_event()

    def wait_for(self, copied: torch.cuda.Event | None) -> None:
        """Let the current stream wait; the host goes on."""
        if copied is not None:
            torch.cuda.current_stream(self.device).wait_event(copied)

    def _grow(self, count: int, label: str) -> None:
        wanted, problem = count * self.block, ""
        available = available_host_memory()
        if available is not None and wanted + RESERVE > available:
            problem = f"{RESERVE >> 20} MiB are left to others"
        else:
            try:
                pin = self.device.type == "cuda"
                made = [torch.empty(self.block, dtype=torch.uint8, pin_memory=pin) for _ in range(count)]
            except RuntimeError as error:
                problem = in_one_line(error)
        if problem:
            have = "an unknown amount" if available is None else f"{available >> 20} MiB"
            raise CADError(
                f'{label}: "keep": "host" needs {wanted >> 20} MiB more host memory beside the {self.host_bytes >> 20} '
                f"MiB that this rank holds, and {have} is available on this host ({problem}). Use fewer tokens per "
                'rank, or set "keep" to "device", with which attention keeps this on the GPU, or '
                '"recompute_attention": true, with which it keeps nothing'
            )
        self.free += made
        self.blocks += count
        logger.debug("parking holds %d MiB of host memory", self.host_bytes >> 20)


class Parcel:
    """Tensors of one call: on the device, in host memory, or on the way. Made by Parking.park."""

    def __init__(self, parking: Parking, number: int, label: str, tensors: Sequence[Tensor]) -> None:
        self._blocks: list[Tensor] = []
        self.parking, self.number, self.label = parking, number, label
        self._here: list[Tensor] | None = list(tensors)
        self._versions = [x._version for x in tensors]
        self._packed: list[Packed] = []
        sources, size = [], 0
        for x in tensors:
            source, order = in_memory_order(x)
            self._packed.append(Packed(size, source.shape, tuple(map(order.index, range(x.dim()))), x.dtype))
            sources.append(source)
            size += -(-source.numel() * source.element_size() // ALIGNMENT) * ALIGNMENT
        self._copying: list[Tensor] | None = sources
        """What copies read or write, held meanwhile: a copy of a tensor with gaps is nobody else's."""
        self._blocks = parking.take_blocks(size, label)
        self._copied = parking.copy(self._pieces(sources))

    @property
    def is_away(self) -> bool:
        return self._here is None and bool(self._blocks)

    def leave(self) -> None:
        """Hold no more device memory."""
        self._check_unchanged()
        # Memory belongs to the current stream: what it does next must not overwrite what is still read.
        self.parking.wait_for(self._copied)
        self._here = self._copying = None

    def fetch(self) -> None:
        """Begin to copy them back, into memory of the current stream, behind what that has to do."""
        # Where memory runs out here, the parcel stays as it is.
        self._copying = [
            torch.empty(packed.shape, dtype=packed.dtype, device=self.parking.device) for packed in self._packed
        ]
        self._copied = self.parking.copy((part, host) for host, part in self._pieces(self._copying))
        self._here = [x.permute(packed.back) for x, packed in zip(self._copying, self._packed, strict=True)]
        self._versions = [x._version for x in self._here]

    def take(self) -> list[Tensor]:
        """The tensors, for the current stream; the parcel holds them no longer."""
        self.parking.stay(self)
        if self._here is None:
            self.fetch()
        self._check_unchanged()
        here = self._here
        assert here is not None
        # Either they are arriving, or a copy still reads them and whoever gets their memory next must not be early.
        self.parking.wait_for(self._copied)
        self._here = self._copying = None
        self._give_blocks()
        return here

    def _pieces(self, tensors: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Parts of blocks and the parts of tensors, as bytes, that belong together."""
        block = self.parking.block
        for x, packed in zip(tensors, self._packed, strict=True):
            flat, done = x.view(-1).view(torch.uint8), 0
            while done < len(flat):
                number, begin = divmod(packed.begin + done, block)
                count = min(block - begin, len(flat) - done)
                yield self._blocks[number][begin : begin + count], flat[done : done + count]
                done += count

    def _check_unchanged(self) -> None:
        """Raise where a tensor was changed in place, as autograd does for what it holds."""
        if self._here is not None and any(x._version != v for x, v in zip(self._here, self._versions, strict=True)):
            raise CADError(
                f"{self.label}: its output, or what it was given, was changed in place, and its backward needs it as "
                "it was. Change a copy in the model (x = x * y instead of x *= y or x.mul_(y))"
            )

    def _give_blocks(self) -> None:
        """They hold nothing any more. Whoever is next copies on the same stream, after all that was queued."""
        blocks, self._blocks = self._blocks, []
        self.parking.free.extend(blocks)

    def __del__(self) -> None:
        # No backward came. Where garbage was collected this is any thread, whose stream says nothing of whose memory
        # this is, and copies may be under way.
        if self._blocks:
            if (stream := self.parking._stream) is not None:
                leave_to_streams([*(self._here or ()), *(self._copying or ())], [stream])
            self._give_blocks()


def in_memory_order(x: Tensor) -> tuple[Tensor, list[int]]:
    """The tensor with its dimensions in the order in which they lie in memory, contiguous, and that order.

    A copy where its memory has gaps."""
    order = sorted(range(x.dim()), key=lambda d: (-x.stride()[d], d))
    # Dimensions of size 1 may have any stride.
    arranged = x.detach().permute(order)
    if arranged.is_contiguous():
        return arranged, order
    return x.detach().contiguous(), list(range(x.dim()))


def available_host_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still take on this host, by the kernel and by its control group; None: unknown."""
    found = []
    if (available := _number(root / "proc/meminfo", "MemAvailable:")) is not None:
        found.append(available << 10)
    for folder, most, used, cache in (
        ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, taken = _number(root / folder / most), _number(root / folder / used)
        if limit is not None and taken is not None:
            # Files that were read count as used, and go when memory is wanted.
            found.append(limit - taken + (_number(root / folder / "memory.stat", cache) or 0))
    return min(found) if found else None


def _number(path: Path, name: str = "") -> int | None:
    """The number behind a name at the beginning of a line, or at the beginning of the file; None: there is none."""
    try:
        words = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return None
    numbers = [line[1] if name else line[0] for line in words if line and (not name or line[0] == name)]
    return int(numbers[0]) if numbers and numbers[0].isdigit() else None
