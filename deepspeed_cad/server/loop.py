"""What a server does: follow the leader's orders, exchange by exchange, and run what arrives.

In: orders, in the order in which all trainers exchange. Out: exchanges, with tensors of no rows as this rank's own.
What is dispatched runs as soon as it is there; results go back when the order for that comes. On a GPU each nano-batch
has a stream of its own, so what one has to wait for does not hold up the other.

What backward needs is held by (micro-batch, layer, nano-batch) from the forward until its backward ran, or until the
leader says that no backward can come any more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from deepspeed_cad.ahead.worker import Worker
from deepspeed_cad.attention.backward import (
    Gradients,
    gradients_back,
    serve_arrived_backward,
    start_backward,
)
from deepspeed_cad.attention.device_schedule import DeviceSchedule, upload_schedule
from deepspeed_cad.attention.forward import (
    Kept,
    ServedOutputs,
    outputs_back,
    serve_arrived,
    start_forward,
)
from deepspeed_cad.attention.layer import LayerKind, kernel_need
from deepspeed_cad.attention.microbatch import PlanKey
from deepspeed_cad.attention.serve import lse_dtype, new_gradients, new_outputs
from deepspeed_cad.attention.setup import CallCounts, CallSetup, Modes
from deepspeed_cad.errors import CADError
from deepspeed_cad.exchange.transport import Returning, Transport
from deepspeed_cad.kernels.interface import Kernel, KernelNeed, MaskRule
from deepspeed_cad.layout import Ints, Layout, Segments, Tick
from deepspeed_cad.planner.plan import HeadShape
from deepspeed_cad.schedule import Schedule, build_slices, schedule_rank
from deepspeed_cad.schedule import native as schedule_native
from deepspeed_cad.server.busy import Busy
from deepspeed_cad.server.orders import DISPATCH, OPEN, PLAN, RELEASE, RETURN, TRACE
from deepspeed_cad.server.wire import Frame
from deepspeed_cad.trace.record import Tracer

logger = logging.getLogger("deepspeed_cad")

Place = tuple[int, int]
"""Layer and nano-batch."""


@dataclass(eq=False)
class Call:
    """One call of one layer."""

    setup: CallSetup
    returns: bool
    home: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """Q, K and V of this rank: no rows, but the shapes of rows."""
    sinks_H: torch.Tensor | None
    served: ServedOutputs | None = None
    """Held for backward."""
    pending: list[Returning] | None = None
    """Results that the leader has not asked for yet."""

    def held_bytes(self) -> int:
        """Memory that is held for backward."""
        if self.served is None:
            return 0
        tensors = [self.served.o_RGV, self.served.lse_RG, *(self.served.received or ())]
        return sum(one.numel() * one.element_size() for one in tensors)


@dataclass(eq=False)
class Opened:
    """One micro-batch."""

    ticks: tuple[Tick, ...]
    schedules: dict[tuple[PlanKey, int], Future[Schedule]] = field(default_factory=dict)
    uploaded: dict[tuple[PlanKey, int], DeviceSchedule] = field(default_factory=dict)
    calls: dict[Place, Call] = field(default_factory=dict)


class Loop:
    """Serves one job."""

    def __init__(
        self,
        rank: int,
        device: torch.device,
        transport: Transport | None,
        choose: Callable[[KernelNeed], Kernel],
        worker: Worker,
        budget: int | None,
    ) -> None:
        """A server that has nothing to do yet.

        Args:
            rank: CAD rank.
            device: where it computes.
            transport: over trainers and servers; None: it is not there yet.
            choose: gives the kernel for a need.
            worker: makes schedules ahead.
            budget: most bytes to hold for backward; None: no limit.
        """
        self.rank, self.device, self.transport, self.worker, self.budget = rank, device, transport, worker, budget
        self.micro_batches = 0
        self.busy, self.held, self.most_held = Busy(), 0, 0
        self.counts = CallCounts()
        self._choose, self._kernels = choose, dict[KernelNeed, Kernel]()
        self._opened: dict[int, Opened] = {}
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else []
        self._act: dict[str, Callable[[dict[str, Any], list[Ints]], None]] = {
            OPEN: self._open, PLAN: self._plan, DISPATCH: self._dispatch, RETURN: self._give_back,
            RELEASE: self._release, TRACE: self._trace,
        }  # fmt: skip

    def begin_again(self, rank: int, transport: Transport) -> None:
        """Servers have changed: whatever is held or was told is of no use any more."""
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
        self._opened[head["turn"]] = Opened(layout.cut(cut) if len(cut) else (layout.tick(),))

    def _plan(self, head: dict[str, Any], arrays: list[Ints]) -> None:
        opened, key, nano_batch = self._opened[head["turn"]], _key(head["key"]), head["nano_batch"]
        tick, tasks = opened.ticks[nano_batch], arrays[0]

        def make() -> Schedule:
            build = schedule_native.build_slices if schedule_native.is_available() else build_slices
            slices = build(tick, tasks, key.window)
            return schedule_rank(tick, slices, self.rank, key.shape.groups, key.window)

        opened.schedules[key, nano_batch] = self.worker.submit(make)

    def _schedule(self, opened: Opened, key: PlanKey, nano_batch: int) -> DeviceSchedule:
        found = opened.uploaded.get((key, nano_batch))
        if found is None:
            schedule = self.worker.wait(opened.schedules[key, nano_batch], "a schedule")
            found = opened.uploaded[key, nano_batch] = upload_schedule(schedule, self.device)
        return found

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
        """Training ended: write what was recorded of the timeline."""
        if self.counts.tracer is not None:
            self.counts.tracer.finish()

    # Exchanges

    def _dispatch(self, head: dict[str, Any], arrays: list[Ints]) -> None:
        opened, place = self._opened[head["turn"]], (head["layer"], head["nano_batch"])
        with self._on_stream(place[1]):
            if head["backward"]:
                self._run_backward(opened.calls[place])
                return
            self.micro_batches += not opened.calls
            if place in opened.calls:  # a checkpointed layer runs again
                self._free(opened.calls[place])
            call = opened.calls[place] = self._new_call(opened, head)
            self._run_forward(call)

    def _new_call(self, opened: Opened, head: dict[str, Any]) -> Call:
        key = _key(head["key"])
        shape, dtype = key.shape, getattr(torch, head["dtype"])
        rule = MaskRule(head["scale"], key.window, head["softcap"])
        need = kernel_need(LayerKind(shape, rule, dtype), self.device, head["deterministic"])
        if need not in self._kernels:
            self._kernels[need] = self._choose(need)
        modes = Modes(False, False, head["keep"], sinks_travel=True, returns=head["returns"])
        setup = CallSetup(
            self._schedule(opened, key, head["nano_batch"]), self._kernels[need], self.transport, rule, modes,
            self.counts, head["nano_batch"], f"layer {head['layer']}", None, head["turn"], head["layer"],
        )  # fmt: skip
        home = tuple(
            torch.empty(0, heads, width, dtype=dtype, device=self.device)
            for heads, width in (
                (shape.query_heads, shape.head_dim), (shape.groups, shape.head_dim), (shape.groups, shape.value_dim)
            )
        )  # fmt: skip
        # Only its shape counts: values come from the trainers, row by row.
        sinks = torch.zeros(shape.query_heads, dtype=lse_dtype(dtype), device=self.device) if head["sinks"] else None
        return Call(setup, head["returns"], (home[0], home[1], home[2]), sinks)

    def _run_forward(self, call: Call) -> None:
        setup = call.setup
        started = start_forward(setup, *call.home, call.sinks_H)
        with setup.span("wait"):
            arrived = started.out.wait()
        q, _, v = call.home
        o, lse = new_outputs(setup.schedule, q, v)
        with self.busy.timed(self.device):
            served = serve_arrived(setup, 0, started, arrived, o, lse)
        call.pending = outputs_back(started, served, o, lse)
        if call.returns:
            call.served = served
            self._hold(call)

    def _run_backward(self, call: Call) -> None:
        setup, served = call.setup, call.served
        if served is None:
            raise CADError(
                f"server {self.rank}: a backward of {setup.label} in micro-batch {setup.turn} came, and what its "
                "forward left is freed: with reserved servers each forward has one backward"
            )
        q, k, v = call.home
        o, lse = new_outputs(setup.schedule, q, v)
        started = start_backward(setup, Kept(o, lse, (served,), None, 0), torch.empty_like(o), q, k, v)
        with setup.span("wait", backward=True):
            arrived = started.out.wait()
        own = Gradients(*new_gradients(setup.schedule, q, k, v))
        with self.busy.timed(self.device):
            made = serve_arrived_backward(setup, 0, started, served, arrived, own)
        call.pending = gradients_back(made, own, (torch.empty_like(k), torch.empty_like(v)))
        self._free(call)

    def _give_back(self, head: dict[str, Any], arrays: list[Ints]) -> None:
        call = self._opened[head["turn"]].calls[head["layer"], head["nano_batch"]]
        fields, call.pending = call.pending, None
        assert fields is not None
        with self._on_stream(head["nano_batch"]):
            what = "dQ, dK, dV back" if head["backward"] else "O back"
            call.setup.give_back(what, 0, fields, head["backward"]).wait()

    # Memory

    def _hold(self, call: Call) -> None:
        self.held += call.held_bytes()
        self.most_held = max(self.most_held, self.held)
        if self.budget is not None and self.held > self.budget:
            raise CADError(
                f"server {self.rank} holds {self.held >> 20} MiB for backwards to come and has {self.budget >> 20} MiB "
                'for that: reserve more servers, use smaller micro-batches, or set "backward": "resend", with which a '
                "server keeps O but not Q, K and V"
            )

    def _free(self, call: Call) -> None:
        self.held -= call.held_bytes()
        call.served = None

    def _on_stream(self, nano_batch: int) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._streams[nano_batch]) if self._streams else nullcontext()


def _key(fields: list[Any]) -> PlanKey:
    return PlanKey(fields[0], HeadShape(*fields[1:]))
