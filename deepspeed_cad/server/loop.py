"""What a server does: follow the leader's orders, exchange by exchange, and run what arrives.

In: orders, in the order in which all trainers exchange. Out: exchanges, with tensors of no rows as this rank's own.
On a GPU each nano-batch has a stream of its own, so what one has to wait for does not hold up the other.

Orders come in the order in which trainers start these exchanges (attention/overlap.py): the dispatches of the first
waves, then return after return, and behind each one the dispatch of the next wave. A server does as they do. It starts
what it is told to, serves a wave as soon as trainers would, that is when as many are out as have memory at once, and
waits for a return before another one takes its place.

What backward needs is held by (micro-batch, layer, nano-batch) from the forward until its backward ran, or until the
leader says that no backward can come any more.
"""

import logging
import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from deepspeed_cad.ahead.worker import Worker
from deepspeed_cad.attention.backward import Gradients, gradients_back, serve_arrived_backward, start_backward
from deepspeed_cad.attention.device_schedule import DeviceSchedule, upload_schedule
from deepspeed_cad.attention.forward import Kept, ServedOutputs, outputs_back, serve_arrived, start_forward
from deepspeed_cad.attention.layer import LayerKind, kernel_need
from deepspeed_cad.attention.microbatch import PlanKey
from deepspeed_cad.attention.serve import lse_dtype, new_gradients, new_outputs
from deepspeed_cad.attention.setup import CallCounts, CallSetup, Modes, WavesOut
from deepspeed_cad.errors import CADError
from deepspeed_cad.exchange.landing import NoRoomError
from deepspeed_cad.exchange.transport import Returned, Returning, Transport
from deepspeed_cad.exchange.waits import Busy
from deepspeed_cad.kernels.interface import Kernel, KernelNeed, MaskRule
from deepspeed_cad.layout import Ints, Layout, Segments, Tick
from deepspeed_cad.planner.plan import HeadShape
from deepspeed_cad.schedule import Schedule
from deepspeed_cad.schedule.waves import BACK, OUT, Cut, Room, schedule_waves
from deepspeed_cad.server.orders import DISPATCH, OPEN, PLAN, RELEASE, RETURN, ROOM, TRACE
from deepspeed_cad.server.sockets import Frame
from deepspeed_cad.trace import Tracer

logger = logging.getLogger("deepspeed_cad")

CallPlace = tuple[int, int]
"""Layer and nano-batch."""
PlannedTick = tuple[PlanKey, int]
"""Kind of layer and nano-batch."""
Serve = Callable[[int, list[torch.Tensor]], list[Returning]]
"""Runs what arrived of a wave; gives what goes back."""


@dataclass(eq=False)
class ServedPass:
    """One direction of one call."""

    setup: CallSetup
    backward: bool
    out: WavesOut
    serve: Serve
    served: int = 0
    returned: int = 0
    """Of these, told to come back."""
    _ready: list[Returning] = field(default_factory=list)
    """What goes back next, where it was served and is not asked for yet."""
    _backs: deque[Returned] = field(default_factory=deque)

    @property
    def is_over(self) -> bool:
        return self.returned == self.out.count

    def dispatch(self, wave: int) -> None:
        """A wave goes out. Raises CADError where it is another one's turn."""
        self._expect("dispatch", wave, self.out.started)
        if wave >= self.returned + OUT:
            raise CADError(f"{self._words} is told to dispatch wave {wave} before wave {self.returned} was returned")
        if wave >= BACK:
            # Its place on the way back is that of the wave so many before it.
            self._backs.popleft().wait()
        with self.setup.span("dispatch", self.backward):
            self.out.start_next()
        self._serve_next()

    def give_back(self, wave: int) -> None:
        """A wave comes back. Raises CADError where it is another one's turn."""
        self._expect("return", wave, self.returned)
        if self.served == wave:
            raise CADError(f"{self._words} is told to return wave {wave} before it was served")
        fields, self._ready = self._ready, []
        self._backs.append(self.setup.give_back(wave, fields, self.backward))
        self.returned += 1
        self._serve_next()
        while self.is_over and self._backs:
            self._backs.popleft().wait()

    def _serve_next(self) -> None:
        """Serve a wave where the one before is on its way back, and the one after, if there is any, on its way here."""
        wave = self.served
        if self.returned < wave or self.is_over or self.out.started < min(self.out.count, wave + OUT):
            return
        with self.setup.span("wait", self.backward):
            arrived = self.out.wait()
        self._ready = self.serve(wave, arrived)
        self.served += 1

    def _expect(self, what: str, wave: int, expected: int) -> None:
        if wave != expected or expected == self.out.count:
            raise CADError(
                f"{self._words} is told to {what} wave {wave}, where wave {expected} of {self.out.count} comes next: "
                "orders and plans do not belong together"
            )

    @property
    def _words(self) -> str:
        way = "backward" if self.backward else "forward"
        return f"the {way} of {self.setup.label} in micro-batch {self.setup.turn} (a server)"


@dataclass(eq=False)
class Call:
    setup: CallSetup
    home: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """Q, K and V of this rank: no rows, but the shapes of rows."""
    sinks_H: torch.Tensor | None
    served: list[ServedOutputs] = field(default_factory=list)
    """Held for backward, by waves."""
    running: ServedPass | None = None
    """Of which some wave has not come back."""


@dataclass(eq=False)
class ServedMicroBatch:
    ticks: tuple[Tick, ...]
    schedules: dict[PlannedTick, Future[tuple[Schedule, ...]]] = field(default_factory=dict)
    """By waves."""
    uploaded: dict[PlannedTick, DeviceSchedule] = field(default_factory=dict)
    calls: dict[CallPlace, Call] = field(default_factory=dict)


class Loop:
    def __init__(
        self, device: torch.device, choose: Callable[[KernelNeed], Kernel], worker: Worker, budget: int | None
    ) -> None:
        """A server that has no group yet. `worker` makes schedules ahead; `budget`: most bytes to hold for backward."""
        self.device, self.worker, self.budget = device, worker, budget
        self.rank = -1
        """In the present group."""
        self.transport: Transport | None = None
        """Over trainers and servers; None before the first group."""
        self.micro_batches = 0
        self.busy, self.held, self.most_held = Busy(), 0, 0
        self.counts = CallCounts()
        self._choose, self._kernels = choose, dict[KernelNeed, Kernel]()
        self._opened: dict[int, ServedMicroBatch] = {}
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else []
        self._act: dict[str, Callable[[dict[str, Any], list[Ints]], None]] = {
            OPEN: self._open, PLAN: self._plan, ROOM: self._make_room, DISPATCH: self._dispatch,
            RETURN: self._give_back, RELEASE: self._release, TRACE: self._trace,
        }  # fmt: skip

    def begin_with(self, rank: int, transport: Transport) -> None:
        """Serve in a group, the first one or another: whatever is held or was told in the one before is of no use."""
        self.rank, self.transport = rank, transport
        self._opened.clear()
        self.held = 0

    def follow(self, order: Frame) -> None:
        """Do what the leader says. Raises what exchanges and kernels raise."""
        self._act[order.head["do"]](order.head, order.arrays)

    # Micro-batches and plans

    def _open(self, head: dict[str, Any], arrays: list[Ints]) -> None:
        columns, tokens, cut = arrays
        layout = Layout(len(tokens), Segments(*columns.T), tokens)
        self._opened[head["turn"]] = ServedMicroBatch(layout.cut(cut) if len(cut) else (layout.tick(),))

    def _plan(self, head: dict[str, Any], arrays: list[Ints]) -> None:
        opened, (key, nano_batch) = self._opened[head["turn"]], _tick(head)
        make = partial(
            schedule_waves, opened.ticks[nano_batch], arrays[0], self.rank, key.shape.groups, key.window,
            Cut(*head["cut"]),
        )  # fmt: skip
        opened.schedules[key, nano_batch] = self.worker.submit(make)

    def _make_room(self, head: dict[str, Any], arrays: list[Ints]) -> None:
        schedules = self._schedules(self._opened[head["turn"]], _tick(head))
        assert self.transport is not None
        # How much there may be trainers know: this cut fits into it.
        room = Room(math.inf, tuple(head["out"]), tuple(head["back"]), headroom=head["headroom"])
        try:
            self.transport.make_room(schedules, room, head["nano_batch"])
        except NoRoomError as error:
            # All ranks have it. Trainers cut into smaller waves and say so, or they end, and this server with them.
            logger.info("server %d: %s", self.rank, error)

    def _schedules(self, opened: ServedMicroBatch, tick: PlannedTick) -> tuple[Schedule, ...]:
        return self.worker.wait(opened.schedules[tick], "a schedule")

    def _release(self, head: dict[str, Any], arrays: list[Ints]) -> None:
        for turn in head["turns"]:
            opened = self._opened.pop(turn, None)
            for call in () if opened is None else opened.calls.values():
                self._free(call)

    # Timeline

    def _trace(self, head: dict[str, Any], arrays: list[Ints]) -> None:
        """The next micro-batch is about to be trained. Paths are the trainers': a folder that all ranks see."""
        if self.counts.tracer is None:
            path, steps, ranks = head["path"], head["steps"], head["ranks"]
            self.counts.tracer = Tracer(path, steps, self.device, self.rank, ranks, serves=True)
        with self._on_stream(0):
            self.counts.tracer.next_micro_batch()

    def end_trace(self) -> None:
        if self.counts.tracer is not None:
            self.counts.tracer.finish()

    # Exchanges

    def _dispatch(self, head: dict[str, Any], arrays: list[Ints]) -> None:
        opened, place = self._opened[head["turn"]], (head["layer"], head["nano_batch"])
        with self._on_stream(place[1]):
            if head["wave"] == 0:
                self._begin_pass(opened, place, head)
            self._running(opened.calls[place], head).dispatch(head["wave"])

    def _give_back(self, head: dict[str, Any], arrays: list[Ints]) -> None:
        call = self._opened[head["turn"]].calls[head["layer"], head["nano_batch"]]
        with self._on_stream(head["nano_batch"]):
            running = self._running(call, head)
            running.give_back(head["wave"])
            if running.is_over:
                call.running = None
                if running.backward:
                    self._free(call)

    def _begin_pass(self, opened: ServedMicroBatch, place: CallPlace, head: dict[str, Any]) -> None:
        if head["backward"]:
            call = opened.calls[place]
            call.running = self._backward(call)
            return
        self.micro_batches += not opened.calls
        if place in opened.calls:  # a checkpointed layer runs again
            self._free(opened.calls[place])
        call = opened.calls[place] = self._new_call(opened, head)
        call.running = self._forward(call)

    def _running(self, call: Call, head: dict[str, Any]) -> ServedPass:
        if call.running is None or call.running.backward != head["backward"]:
            way = "backward" if head["backward"] else "forward"
            raise CADError(
                f"server {self.rank} is told of wave {head['wave']} of a {way} of {call.setup.label} in micro-batch "
                f"{call.setup.turn} that does not run"
            )
        return call.running

    def _new_call(self, opened: ServedMicroBatch, head: dict[str, Any]) -> Call:
        key, nano_batch = tick = _tick(head)
        shape, dtype = key.shape, getattr(torch, head["dtype"])
        rule = MaskRule(head["scale"], key.window, head["softcap"])
        need = kernel_need(LayerKind(shape, rule, dtype), self.device, head["deterministic"])
        if need not in self._kernels:
            self._kernels[need] = self._choose(need)
        modes = Modes(False, False, sinks_travel=True, returns=head["returns"])
        if tick not in opened.uploaded:
            opened.uploaded[tick] = upload_schedule(self._schedules(opened, tick), self.device)
        setup = CallSetup(
            opened.uploaded[tick], self._kernels[need], self.transport, rule, modes, self.counts, nano_batch,
            f"layer {head['layer']}", None, head["turn"], head["layer"],
        )  # fmt: skip
        sizes = (shape.query_heads, shape.head_dim), (shape.groups, shape.head_dim), (shape.groups, shape.value_dim)
        q, k, v = (torch.empty(0, *size, dtype=dtype, device=self.device) for size in sizes)
        # Only its shape counts: values come from the trainers, row by row.
        sinks = torch.zeros(shape.query_heads, dtype=lse_dtype(dtype), device=self.device) if head["sinks"] else None
        return Call(setup, (q, k, v), sinks)

    def _forward(self, call: Call) -> ServedPass:
        setup, (q, _, v) = call.setup, call.home
        started = start_forward(setup, *call.home, call.sinks_H, at_once=False)
        into = new_outputs(setup.schedule, q, v)

        def serve(wave: int, arrived: list[torch.Tensor]) -> list[Returning]:
            with self.busy.timed(self.device):
                served = serve_arrived(setup, wave, started, arrived, into)
            if setup.modes.returns:
                call.served.append(served)
                self._hold(served)
            return outputs_back(setup, started, served, into)

        return ServedPass(setup, False, started.out, serve)

    def _backward(self, call: Call) -> ServedPass:
        setup, (q, k, v) = call.setup, call.home
        if len(call.served) != len(setup.schedule.waves):
            raise CADError(
                f"server {self.rank}: a backward of {setup.label} in micro-batch {setup.turn} came, and what its "
                "forward left is freed: with reserved servers each forward has one backward"
            )
        kept = Kept(*new_outputs(setup.schedule, q, v), tuple(call.served), None, 0)
        started = start_backward(setup, kept, torch.empty_like(kept.o_THV), q, k, v, at_once=False)
        own, landing = Gradients(*new_gradients(setup.schedule, q, k, v)), (torch.empty_like(k), torch.empty_like(v))

        def serve(wave: int, arrived: list[torch.Tensor]) -> list[Returning]:
            with self.busy.timed(self.device):
                made = serve_arrived_backward(setup, wave, started, kept.served[wave], arrived, own)
            return gradients_back(made, own, landing)

        return ServedPass(setup, True, started.out, serve)

    # Memory

    def _hold(self, served: ServedOutputs) -> None:
        self.held += sum(tensor.nbytes for tensor in served)
        self.most_held = max(self.most_held, self.held)
        if self.budget is not None and self.held > self.budget:
            raise CADError(
                f"server {self.rank} holds {self.held >> 20} MiB for backwards to come and has {self.budget >> 20} MiB "
                "for that: reserve more servers, or use smaller micro-batches"
            )

    def _free(self, call: Call) -> None:
        self.held -= sum(tensor.nbytes for served in call.served for tensor in served)
        call.served.clear()

    def _on_stream(self, nano_batch: int) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._streams[nano_batch]) if self._streams else nullcontext()


def _tick(head: dict[str, Any]) -> PlannedTick:
    window, *shape = head["key"]
    return PlanKey(window, HeadShape(*shape)), head["nano_batch"]
