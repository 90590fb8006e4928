"""What one core-attention call is made of, and its two ways to other ranks. Nothing here changes while it runs."""

from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepspeed_cad.attention.device_schedule import DeviceSchedule
from deepspeed_cad.attention.parking import Parking
from deepspeed_cad.exchange.failure.identity import Moment
from deepspeed_cad.exchange.transport import Dispatched, Outgoing, Returned, Returning, Transport
from deepspeed_cad.exchange.waits import Waits
from deepspeed_cad.feedback.layer_times import Stretches, StretchTimes
from deepspeed_cad.kernels.interface import Kernel, MaskRule
from deepspeed_cad.schedule import Schedule
from deepspeed_cad.schedule.waves import OUT
from deepspeed_cad.trace import NOT_TRACED, Tracer


@dataclass
class CallCounts:
    """What was executed: tests and the monitor read it."""

    forwards: int = 0
    backwards: int = 0
    replays: int = 0
    waits: Waits = field(default_factory=Waits)
    stretch_times: defaultdict[int, StretchTimes] = field(default_factory=lambda: defaultdict(StretchTimes))
    """What all that is not attention takes, by model."""
    tracer: Tracer | None = None
    """Records a timeline, where one is wanted."""


@dataclass(frozen=True)
class Modes:
    """How a call overlaps, keeps and recomputes."""

    local_first: bool = True
    """Run local batches while the dispatch is under way."""
    recompute: bool = False
    """Let activation checkpointing run core attention again instead of keeping O and LSE."""
    sinks_travel: bool = False
    """Sinks go along with Q: some server has no model to take them from."""
    returns: bool = True
    """A backward will come, as far as is known in the forward."""
    parking: Parking | None = None
    """Where what is kept waits for backward; None: on the device."""
    results_travel: bool = False
    """O and LSE of all rows are kept at home and go along with dO: a row's backward may run on another rank than its
    forward, as in a pipeline, so servers keep nothing."""


CallOrders = Callable[[bool, bool, int], None]
"""Tells servers of one call, ahead of each of its exchanges: whether it is a return, whether it is of a
backward, and its wave."""


@dataclass(eq=False)
class WavesOut:
    """The exchanges out of one pass: those under way, the first before the others, and how later ones start."""

    count: int
    """Waves of the pass; 0 where there is nobody to exchange with."""
    start: Callable[[int], Dispatched]
    fields: list[Outgoing]
    under_way: deque[Dispatched] = field(default_factory=deque)
    started: int = 0

    def begin(self) -> None:
        """Start as many as have memory at once."""
        while self.started < min(self.count, OUT):
            self.start_next()

    def start_next(self) -> None:
        """Start the next one: what had its place is over."""
        self.under_way.append(self.start(self.started))
        self.started += 1

    def wait(self) -> list[Tensor]:
        return self.under_way.popleft().wait()

    def nothing(self) -> list[Tensor]:
        """What a wave brings of which nothing is served here."""
        return [one.home.new_empty(0, one.home.shape[-1]) for one in self.fields]


@dataclass(frozen=True, eq=False)
class CallSetup:
    """Core attention of one layer, one micro-batch and one nano-batch: all that is known before it runs."""

    schedule: DeviceSchedule
    kernel: Kernel
    transport: Transport | None
    """None: nothing is exchanged."""
    rule: MaskRule
    modes: Modes
    counts: CallCounts
    nano_batch: int = 0
    label: str = "attention"
    """The layer, in error messages and on the timeline."""
    aside: torch.cuda.Stream | None = None
    """On which served batches run beside local ones; None: all run on the current stream, one after the other."""
    turn: int = 0
    layer: int = 0
    """Which micro-batch and which of its layers: equal on all ranks, see exchange.failure.identity.Moment."""
    orders: CallOrders | None = None
    """On the rank that leads servers."""
    stretches: Stretches | None = None
    """Where what lies between attentions of this nano-batch is timed."""
    load: float = 0.0
    """Seconds that both passes were planned to take on this rank at speed 1; 0 where no plan goes by them."""

    @property
    def device(self) -> torch.device:
        return self.schedule.padding.device

    def dispatch(self, fields: list[Outgoing], backward: bool = False) -> WavesOut:
        """The exchanges out of a pass, none of which has started; each sends `fields` as they are then."""
        count = 0 if self.transport is None else len(self.schedule.waves)

        def start(wave: int) -> Dispatched:
            transport, host, moment = self._exchange(wave, backward, is_return=False)
            with self._on_host():
                return transport.dispatch(host, fields, self.nano_batch, moment)

        return WavesOut(count, start, fields)

    def begin(self, out: WavesOut, backward: bool = False) -> None:
        """Start the exchanges out of the first waves; later ones start as these end."""
        if out.count:
            with self.span("dispatch", backward):
                out.begin()

    def give_back(self, wave: int, fields: list[Returning], backward: bool = False) -> Returned:
        """Start the exchange back of one wave, on the stream that runs served tasks."""
        transport, host, moment = self._exchange(wave, backward, is_return=True)
        with self.span("return", backward, aside=self.aside is not None), self._on_host():
            return transport.give_back(host, fields, self.nano_batch, moment)

    def _exchange(self, wave: int, backward: bool, is_return: bool) -> tuple[Transport, Schedule, Moment]:
        """What an exchange that is about to start is made of; servers are told of it."""
        assert self.transport is not None  # nothing is exchanged without one
        if self.orders is not None:
            self.orders(is_return, backward, wave)
        return self.transport, self.schedule.waves[wave].host, Moment(self.turn, self.layer, backward, wave)

    def _on_host(self) -> AbstractContextManager[None]:
        """On a CPU an exchange starts when all ranks are there, so starting one is waiting too."""
        return NOT_TRACED if self.aside or self.device.type != "cpu" else self.counts.waits.timed(self.device)

    def leave_attention(self, backward: bool) -> None:
        """This nano-batch goes on with what is not attention."""
        if self.stretches is not None:
            self.stretches.begin(self.layer, backward, self.load)

    def enter_attention(self, backward: bool) -> None:
        """That is over: its next attention is about to be dispatched."""
        if self.stretches is not None:
            self.stretches.end(self.layer, backward)

    def span(self, what: str, backward: bool = False, aside: bool = False) -> AbstractContextManager[None]:
        tracer = self.counts.tracer
        return NOT_TRACED if tracer is None else tracer.span(what, self.nano_batch, self.label, backward, aside)
