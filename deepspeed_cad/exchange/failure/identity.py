"""What an exchange is: a number that ranks send along with it and compare, so that none is taken for another.

Exchanges are paired by order: the n-th of one rank with the n-th of every other. Where a rank leaves a part out, say
because its script caught an exception and went on, the order is the same and the meaning is not. So each exchange has
a number that says where in training it lies, computed at both ends from what they know.

Ranks compare on the host, behind the GPU. Numbers arrive in a ring in device memory, [RING, ranks], row n % RING for
exchange n: peers write them just before their flag, or they are received ahead of messages. Once the stream has passed
that point, the watchdog's thread copies the ring to the host on a stream of its own. A stream that waited until numbers
are equal might have to be rescued, and a rank that is merely behind would look like one that differs. So what was
computed in between is lost: all ranks end with an error within a second, landing areas become NaN, no exchange can
start any more, and `finish` looks once more before a transport is closed.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from deepspeed_cad.exchange.failure.patience import EXCHANGE_PAUSE_S, wait_until
from deepspeed_cad.notice import name_ranks
from deepspeed_cad.schedule import Schedule
from deepspeed_cad.threads import is_over

# From the top: the last 14 bits of the micro-batch's turn, 5 of the wave, 10 of the layer, nano-batch, backward,
# return; then 30 bits of a hash over all of this, the schedule, and every exchange before. The first 32 can be read,
# the others tell apart what they cannot say; through the hash, exchanges that once differed differ for ever, so that
# comparing some of them is as good as comparing all.
_TURN_BITS, _WAVE_BITS, _LAYER_BITS, _CHECK_BITS = 14, 5, 10, 30
_LAYER_AT, _WAVE_AT, _TURN_AT = 3, 3 + _LAYER_BITS, 3 + _LAYER_BITS + _WAVE_BITS
_WORD = (1 << 64) - 1


@dataclass(frozen=True)
class Moment:
    """Where in training an exchange lies: equal on all ranks that take part in it."""

    turn: int = 0
    """Counts micro-batches."""
    layer: int = 0
    """Counts the layers of a micro-batch in the order in which their attention was first called."""
    backward: bool = False
    wave: int = 0
    """Which part of what a tick moves; exchanges of different ones may overlap."""


@dataclass(frozen=True)
class Identity:
    index: int
    """1, 2, … in the order in which the transport starts them."""
    number: int
    """62 bits: what ranks compare."""

    def __str__(self) -> str:
        return f"core-attention exchange {self.index}: {describe(self.number)}"


class Register:
    def __init__(self) -> None:
        self._history = 0

    def next(self, index: int, moment: Moment, nano_batch: int, is_return: bool, schedule: Schedule) -> Identity:
        turn, layer = moment.turn % (1 << _TURN_BITS), moment.layer % (1 << _LAYER_BITS)
        words = turn << _TURN_AT | (moment.wave % (1 << _WAVE_BITS)) << _WAVE_AT | layer << _LAYER_AT
        words |= (nano_batch & 1) << 2 | int(moment.backward) << 1 | int(is_return)
        # A multiplication and a shift spread every bit of the sum over the upper bits that are kept.
        mixed = ((self._history ^ (words << 32 | schedule.digest)) * 0x9E3779B97F4A7C15 + moment.turn) & _WORD
        self._history = ((mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9) & _WORD
        return Identity(index, words << _CHECK_BITS | self._history >> (64 - _CHECK_BITS))


def describe(number: int) -> str:
    words = number >> _CHECK_BITS
    turn, layer = words >> _TURN_AT, words >> _LAYER_AT & ((1 << _LAYER_BITS) - 1)
    way = "return" if words & 1 else "dispatch"
    wave = words >> _WAVE_AT & ((1 << _WAVE_BITS) - 1)
    part = (", nano-batch 1" if words & 4 else "") + (f", wave {wave}" if wave else "")
    return f"the {way} in the {'backward' if words & 2 else 'forward'} of micro-batch {turn}, layer {layer}{part}"


def compare(numbers: dict[int, int]) -> str:
    """Of ranks and the numbers of what they exchange: why these do not belong together; "" where they do."""
    if len(set(numbers.values())) < 2:
        return ""
    said: dict[str, list[int]] = {}
    for rank, number in sorted(numbers.items()):
        said.setdefault(describe(number), []).append(rank)
    what = "; ".join(f"{name_ranks(of)} {'are' if len(of) > 1 else 'is'} in {text}" for text, of in said.items())
    if len(said) == 1:
        what = f"all are in {next(iter(said))}, but with different schedules, or after different exchanges"
    return (
        f"ranks meet in different exchanges of core attention: {what}. Every rank must run the same forwards and "
        "backwards: a script that leaves one out after an exception must do so on all. An exception inside the decoder "
        "ends training"
    )


RING = 256
"""Exchanges whose numbers are kept."""
AHEAD = 128
"""No rank can be that many exchanges ahead of another: each waits for the others' last dispatch (landed.py)."""


class HostCopy:
    """Device memory as the host sees it. Nobody waits: a copy is begun, and found at a later look."""

    def __init__(self, source: torch.Tensor, priority: int = 0) -> None:
        # Made here and not by the thread that looks: pinning memory may wait for a GPU that hangs.
        self.host = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
        self._source, self._stream = source, torch.cuda.Stream(source.device, priority=priority)
        self._copied: torch.cuda.Event | None = None

    @property
    def under_way(self) -> bool:
        return self._copied is not None

    def begin(self) -> None:
        with torch.cuda.stream(self._stream):
            self.host.copy_(self._source, non_blocking=True)
            self._copied = self._stream.record_event()

    def is_there(self) -> bool:
        """Whether the copy under way is over; asked until it is."""
        if self._copied is None or not is_over(self._copied):
            return False
        self._copied = None
        return True


class Flags:
    """How far all ranks have come, by the int32 numbers that they write in this rank's device memory. For a host that
    waits where no stream may (Watchdog.wait_for)."""

    def __init__(self, numbers_R: torch.Tensor) -> None:
        self._copy = HostCopy(numbers_R, priority=-1)
        self.least = 0
        """The least number that was read last: no rank is behind it."""

    def reached(self, number: int) -> bool:
        """Whether all ranks have come to a number. Never waits."""
        if self.least < number:
            if not self._copy.under_way:
                self._copy.begin()
            elif self._copy.is_there():
                # As a GPU compares: no rank is half a round behind another, so the nearer way round is the right one.
                ahead_R = (self._copy.host.long() - number + (1 << 31)) % (1 << 32) - (1 << 31)
                self.least = number + int(ahead_R.min())
        return self.least >= number


class Comparison:
    """The numbers that reach one transport of one rank."""

    def __init__(self, ring: torch.Tensor, rank: int, in_job: Callable[[int], int]) -> None:
        """`in_job`: the number that a rank of the group has in the job."""
        self.ring, self.rank, self.in_job, self._copy = ring, rank, in_job, HostCopy(ring)
        self.newest = 0
        """Index of the last exchange that this rank has started."""
        self._arrived: deque[tuple[Identity, Sequence[int]]] = deque()
        self._reading: list[tuple[Identity, Sequence[int]]] = []

    def arrived(self, identity: Identity, peers: Sequence[int]) -> None:
        """The numbers of these ranks for an exchange are in the ring by now."""
        if len(peers):
            self._arrived.append((identity, peers))

    def look(self) -> str:
        """What differs, or "". Never waits: it begins a copy of the ring, and a later call compares."""
        if self._copy.under_way:
            return self._compare() if self._copy.is_there() else ""
        if self._arrived:
            # First what is to be compared, then the copy: everything in the list lies in the ring when it is read.
            self._reading = [self._arrived.popleft() for _ in range(len(self._arrived))]
            self._copy.begin()
        return ""

    def finish(self, patience_s: float = 5.0) -> str:
        """The same for all that has arrived; waits for the copies."""

        def ask() -> str | bool:
            return self.look() or not (self._copy.under_way or self._arrived)

        found = wait_until(ask, patience_s, longest_pause_s=EXCHANGE_PAUSE_S)
        return found if isinstance(found, str) else ""

    def _compare(self) -> str:
        rows, started = self._copy.host.tolist(), self.newest
        for identity, peers in self._reading:
            # The ring has come round since: a later number, whose hash covers this one, speaks for it.
            if started - identity.index > RING - AHEAD:
                continue
            row = rows[identity.index % RING]
            numbers = {self.rank: identity.number, **{int(peer): row[peer] for peer in peers}}
            if found := compare({self.in_job(rank): number for rank, number in numbers.items()}):
                return found
        return ""
