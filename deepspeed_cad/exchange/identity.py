"""What an exchange is: a number that ranks send along with it, so that none is taken for another.

Exchanges are paired by order: the n-th of one rank with the n-th of every other. Where a rank leaves a part out, say
because its script caught an exception and went on, the order is the same and the meaning is not. So each exchange has
a number that says where in training it lies; both ends have computed it from what they know, and they compare. In:
`Moment`, nano-batch, direction and schedule of every exchange. Out: one `Identity` each, and words for what differs.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed_cad.schedule import Schedule

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
    """One exchange of this rank."""

    index: int
    """1, 2, … in the order in which the transport starts them."""
    number: int
    """62 bits: what ranks compare."""

    def __str__(self) -> str:
        return f"core-attention exchange {self.index}: {describe(self.number)}"


class Register:
    """Gives every exchange of one transport its identity."""

    def __init__(self) -> None:
        self._history = 0

    def next(self, index: int, moment: Moment, nano_batch: int, is_return: bool, schedule: Schedule) -> Identity:
        """The identity of the exchange that starts now; called once for each, in their order."""
        turn, layer = moment.turn % (1 << _TURN_BITS), moment.layer % (1 << _LAYER_BITS)
        wave = moment.wave % (1 << _WAVE_BITS)
        words = turn << _TURN_AT | wave << _WAVE_AT | layer << _LAYER_AT
        words |= (nano_batch & 1) << 2 | int(moment.backward) << 1 | int(is_return)
        # A multiplication and a shift spread every bit of the sum over the upper bits that are kept.
        mixed = ((self._history ^ (words << 32 | schedule.digest)) * 0x9E3779B97F4A7C15 + moment.turn) & _WORD
        self._history = ((mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9) & _WORD
        return Identity(index, words << _CHECK_BITS | self._history >> (64 - _CHECK_BITS))


def describe(number: int) -> str:
    """What the upper bits of a number say."""
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
    if len(said) == 1:
        what = f"all are in {next(iter(said))}, but with different schedules, or after different exchanges"
    else:
        what = "; ".join(
            f"rank {ranks[0]} is in {text}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} are in {text}"
            for text, ranks in said.items()
        )
    return (
        f"ranks meet in different exchanges of core attention: {what}. Every rank must run the same forwards and "
        "backwards: a script that catches an exception on one rank and goes on must do so on all, or stop"
    )
