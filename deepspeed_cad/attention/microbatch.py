"""One micro-batch on its way through a model: its layout, its plans, and the attention calls it has made.

The `MaskDescriptor` is what a model's layers receive in place of an attention mask. It carries its micro-batch, so that
any number of micro-batches can be in flight.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepspeed_cad.attention.call import AttentionCall, Calls
from deepspeed_cad.attention.device_schedule import DeviceSchedule, upload_schedule
from deepspeed_cad.attention.layer import LayerInput, MicroBatchOrders, PlanKey, PlannedTick, kernel_need
from deepspeed_cad.attention.memory import NO_LIMIT, ExchangeMemory
from deepspeed_cad.attention.nano_batches import hand_over, in_backward
from deepspeed_cad.attention.setup import CallCounts, CallSetup, Modes
from deepspeed_cad.attention.spanning import Spanning
from deepspeed_cad.errors import CADError
from deepspeed_cad.exchange.transport import Transport
from deepspeed_cad.feedback.layer_times import Stretches, StretchTimes
from deepspeed_cad.kernels.interface import Kernel, KernelNeed, MaskRule
from deepspeed_cad.layout import Ints, Layout, LocalSegments, Tick
from deepspeed_cad.planner.plan import Floats, HeadShape, Plan
from deepspeed_cad.schedule import Schedule
from deepspeed_cad.schedule.waves import OUT, Waves


@dataclass(eq=False)
class MicroBatch:
    """Everything one forward and its backward share on this rank."""

    rank: int
    """Of this process in `layout`. Not that of the session: a layout of evaluation has one rank."""
    layout: Layout
    ticks: tuple[Tick, ...]
    """One, or two where the micro-batch is cut into nano-batches."""
    device: torch.device
    make_plan: Callable[[Tick, PlanKey], Plan]
    """Pure: gives the same plan on every rank."""
    agree: Callable[[int, str], None]
    """Compare a number with the other ranks; raises where it differs."""
    transport: Transport | None
    counts: CallCounts
    aside: torch.cuda.Stream | None = None
    """On which served tasks run beside local ones, where they do."""
    turn: int = 0
    """How many micro-batches were opened before it, the same on every rank."""
    loaded: Ints | None = None
    """[trainers] tokens before documents were dealt out; None: as in `layout`."""
    orders: MicroBatchOrders | None = None
    """Where this rank tells servers what comes."""
    generation: int = 0
    """How often servers had changed when it was planned."""
    calls: Calls = Calls()
    memory: ExchangeMemory | None = None
    """What its exchanges may need at once; None where nobody looks after that."""
    stretch_times: StretchTimes | None = None
    """Where what is not attention is timed; None where nobody plans with that."""
    speeds: Floats | None = None
    """[ranks] with which it is planned, where later plans go by how long its attention takes."""
    check: Any = None
    """What an integration compares attention calls with, where it verifies them."""
    planned: dict[tuple[PlanKey, int], PlannedTick] = field(default_factory=dict)
    """By kind of layer and tick; grows while the forward meets kinds that were not known."""
    _in_chunks: dict[tuple[int, int], Tick] = field(default_factory=dict)
    _schedules: dict[tuple[PlanKey, int], DeviceSchedule] = field(default_factory=dict)
    _calls: dict[tuple[Hashable, int], AttentionCall] = field(default_factory=dict)
    _layers: dict[Hashable, tuple[int, PlanKey]] = field(default_factory=dict)
    """Number and kind of each, in the order in which attention was first called: the same on all ranks."""
    _first_keys: dict[Hashable, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _stretches: dict[int, Stretches] = field(default_factory=dict)

    def local(self, nano_batch: int | None = None) -> LocalSegments:
        """What lies on this rank: of the micro-batch, or of the rows whose output one nano-batch computes."""
        layout = self.layout if nano_batch is None else self.ticks[nano_batch].rows()
        return layout.local(self.rank)

    def spanning(self) -> Spanning | None:
        """Its documents that span ranks, for layers that carry state; None where there are none on any rank."""
        if not self.layout.segments.begin.any():
            return None
        assert self.transport is not None  # a document on several ranks
        return Spanning(self.layout, self.rank, self.transport, self.turn, self.device, self.memory or NO_LIMIT)

    def rows(self, nano_batch: int) -> int:
        """Rows of this rank whose output a nano-batch computes, padding included."""
        return int(self.ticks[nano_batch].query_tokens[self.rank])

    def schedule(self, key: PlanKey, nano_batch: int) -> DeviceSchedule:
        """The schedule of one tick for one kind of layer, planned now if the look-ahead did not know of it.

        Uploads happen here, on the training thread and its stream, not where plans are made; but for `Wave.group`."""
        place = key, nano_batch
        if place not in self._schedules:
            if place not in self.planned:
                self.plan_all([key])
            schedules = self._with_room(key, nano_batch)
            # Waves that a plan asked for hide slow links behind own batches on another stream. Those that memory asks
            # for run in turn with shares of own batches: a rank that ran all of its own first would hold up, from the
            # third wave on, whoever waits for its keys.
            beside = self.aside is not None and len(schedules) <= max(self.planned[place].plan.waves, OUT)
            self._schedules[place] = upload_schedule(schedules, self.device, two_streams=beside)
        return self._schedules[place]

    def plan_all(self, keys: list[PlanKey]) -> None:
        """Plan every tick for the given kinds of layers and compare the plans with the other ranks."""
        digest, places = 0, [(key, nano_batch) for key in keys for nano_batch in range(len(self.ticks))]
        try:
            for key, nano_batch in places:
                begin = time.perf_counter()
                plan = self.make_plan(self.tick(key, nano_batch), key)
                cut, schedules = self._in_waves(key, nano_batch, plan)
                self.planned[key, nano_batch] = PlannedTick(plan, schedules, time.perf_counter() - begin, cut)
                digest = (digest * 1000003 + plan.fingerprint() + len(schedules)) & ((1 << 62) - 1)
        finally:  # ranks with other shares of heads meet here, and may have the memory that these lack
            if self.calls.compares_plans:
                self.agree(digest, "plan")
        if self.orders is not None:
            for place in places:
                self.orders.plan(*place, self.planned[place].plan, self.planned[place].cut)

    def _in_waves(self, key: PlanKey, nano_batch: int, plan: Plan) -> Waves:
        return (self.memory or NO_LIMIT).waves(self.tick(key, nano_batch), plan, self.rank, key.window, key.shape)

    def tick(self, key: PlanKey, nano_batch: int) -> Tick:
        """The documents of a nano-batch as layers of one kind see them."""
        if key.chunk is None:
            return self.ticks[nano_batch]
        return self._in_chunks.setdefault((key.chunk, nano_batch), self.ticks[nano_batch].in_chunks(key.chunk))

    def _with_room(self, key: PlanKey, nano_batch: int) -> tuple[Schedule, ...]:
        """This rank's schedules of a tick, for which all ranks have memory now."""
        planned, orders = self.planned[key, nano_batch], self.orders
        if self.memory is None or self.transport is None:
            return planned.schedules

        def again() -> tuple[Schedule, ...]:
            cut, schedules = self._in_waves(key, nano_batch, planned.plan)
            self.planned[key, nano_batch] = replace(planned, schedules=schedules, cut=cut)
            if orders is not None:
                orders.plan(key, nano_batch, planned.plan, cut)
            return schedules

        tell = (lambda room: None) if orders is None else partial(orders.room, key, nano_batch)
        return self.memory.make_room(self.transport, planned.schedules, key.shape, nano_batch, again, tell)

    def plan_again(
        self, generation: int, layout: Layout, ticks: tuple[Tick, ...], make_plan: Callable[[Tick, PlanKey], Plan],
        transport: Transport | None, orders: MicroBatchOrders | None,
    ) -> None:  # fmt: skip
        """Other servers: forget what was planned; a kind of layer is planned again when it is next called."""
        self.generation, self.layout, self.ticks = generation, layout, ticks
        self.make_plan, self.transport, self.orders = make_plan, transport, orders
        self.planned, self._schedules, self._in_chunks = {}, {}, {}

    @property
    def keys(self) -> list[PlanKey]:
        return list(dict.fromkeys(key for key, _ in self.planned))

    @property
    def layers(self) -> dict[PlanKey, int]:
        return dict(Counter(key for _, key in self._layers.values()))

    def number_layer(self, layer: Hashable, key: PlanKey) -> int:
        return self._layers.setdefault(layer, (len(self._layers), key))[0]

    def call(self, layer: Hashable, nano_batch: int, build: Callable[[], AttentionCall], label: str) -> AttentionCall:
        """The call of a layer: a new one in the forward, the same one when the layer is recomputed in the backward."""
        call, recomputes = self._calls.get((layer, nano_batch)), in_backward()
        if call is None:
            # What is checkpointed may ask a reference in a backward: that attends here alone, and has none itself.
            if recomputes and (self.transport is not None or torch.is_grad_enabled()):
                raise CADError(
                    f"{label} runs in a backward, but did not in the forward of its micro-batch. Where a whole model "
                    "is checkpointed, checkpoint its layers instead"
                )
            call = self._calls[layer, nano_batch] = build()
        elif not recomputes:
            raise CADError(
                f"{label} was called twice in one forward. Each forward needs a plan of its own, and layers that share "
                "an attention module are not supported"
            )
        return call

    def first_keys(
        self, layer: Hashable, nano_batch: int, k_UKD: Tensor, v_UKV: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """K and V that a nano-batch reads besides its own: rows of documents that the second has from the first."""
        if len(self.ticks) == 1:
            return None
        if nano_batch == 0:
            self._first_keys[layer] = (k_UKD, v_UKV)
            return None
        k_first, v_first = self._first_keys.pop(layer)
        base = int(self.ticks[1].key_base[self.rank])
        return None if base == k_first.shape[0] else (k_first[base:], v_first[base:])

    def stretches(self, nano_batch: int) -> Stretches | None:
        """Where what lies between two attentions of a nano-batch is timed."""
        if self.stretch_times is None:
            return None
        made = Stretches(self.stretch_times, self.device, self.rows(nano_batch), self.counts.waits)
        return self._stretches.setdefault(nano_batch, made)

    def forget_calls(self) -> None:
        """The forward begins again, on every rank."""
        for made in (self._calls, self._layers, self._first_keys, self._stretches):
            made.clear()

    @property
    def begun(self) -> bool:
        return bool(self._calls)


class NotInterleaved(Exception):
    """Why the nano-batches of a model cannot alternate, in words; found before anything was sent."""


class MaskDescriptor:
    """Stands where a model's layers expect an attention mask: the micro-batch and the mask's window.

    Not a dataclass: FSDP rebuilds dataclasses among a layer's arguments to cast the tensors in them."""

    __slots__ = ("chunk", "gradients", "interleaved", "kernel", "micro_batch", "modes", "nano_batch", "window")

    def __init__(
        self, micro_batch: MicroBatch, window: int | None, kernel: Callable[[KernelNeed], Kernel], modes: Modes,
        nano_batch: int | None = None, interleaved: bool = False, chunk: int | None = None,
    ) -> None:  # fmt: skip
        """`kernel` chooses that of a layer. `nano_batch`: the one that reads this; None: the whole micro-batch.
        `interleaved`: nano-batches alternate. `chunk`: tokens of a document that see each other; None: all."""
        self.micro_batch, self.window, self.kernel, self.modes = micro_batch, window, kernel, modes
        self.nano_batch, self.interleaved, self.chunk = nano_batch, interleaved, chunk
        self.gradients = torch.is_grad_enabled()
        """Around the layers: a layer without them is under reentrant checkpointing, or frozen."""

    def part(self, nano_batch: int, interleaved: bool = True) -> MaskDescriptor:
        return MaskDescriptor(
            self.micro_batch, self.window, self.kernel, self.modes, nano_batch, interleaved, self.chunk
        )

    @property
    def runs_again(self) -> bool:
        """A checkpointed layer of an interleaved nano-batch runs in the backward: the second nano-batch first, and
        neither hands over."""
        return self.interleaved and in_backward()

    def attend(self, layer: LayerInput) -> Tensor:
        label, sinks, micro_batch = layer.label, layer.sinks_H, self.micro_batch
        if self.interleaved and self.gradients and not torch.is_grad_enabled() and not micro_batch.begun:
            raise NotInterleaved(
                "reentrant checkpointing runs the backward of a layer in one piece (set use_reentrant to false)"
            )
        if layer.q_THD.shape[1] == 0:
            return self._without_heads(layer)
        if self.nano_batch is None and len(self.micro_batch.ticks) == 2:
            return self._in_turn(layer)
        q, k, v = given = layer.rows()
        kind, tokens = layer.kind(given), q.shape[0]
        nano_batch = self.nano_batch or 0
        rows = self.micro_batch.rows(nano_batch)
        stand_in = rows == 0
        if stand_in:
            # The other nano-batch has all rows of this rank; the model ran on a stand-in whose output is dropped.
            q, k, v = q[:0], k[:0], v[:0]
        elif rows != tokens:
            raise CADError(f"{label} got {tokens} tokens where its micro-batch has {rows}")

        def build() -> AttentionCall:
            key, need = PlanKey(self.window, kind.shape, self.chunk), kernel_need(kind, q.device)
            number = micro_batch.number_layer(layer.layer, key)
            # Not the layer's input itself: whatever sets a call up again would hold it.
            given = number, key, need, self.kernel(need), layer.rule, label, sinks is not None
            return micro_batch.calls.make(partial(self._set_up, *given))

        call = micro_batch.call(layer.layer, nano_batch, build, label)
        first = call.first_keys if self.runs_again else micro_batch.first_keys(layer.layer, nano_batch, k, v)
        if first is not None:
            if self.interleaved and not self.runs_again and torch.is_grad_enabled():
                call.first_keys = _own(first[0]), _own(first[1])
            k, v = torch.cat([first[0], k]), torch.cat([first[1], v])
        token = call.dispatch(q, k, v, sinks)
        if self.interleaved and not self.runs_again:
            hand_over()
        token = call.serve(token)
        o_THV = call.collect(token, q, k, v, sinks)
        if stand_in:
            o_THV = torch.cat([o_THV, o_THV.new_zeros(tokens, *o_THV.shape[1:])])
        return o_THV

    def _set_up(
        self, number: int, key: PlanKey, need: KernelNeed, kernel: Kernel, rule: MaskRule, label: str, has_sinks: bool
    ) -> CallSetup:
        """What a call of a layer is made of, as planned for the servers that there are now."""
        one, modes, nano_batch = self.micro_batch, self.modes, self.nano_batch or 0
        one.calls.renew(one)
        schedule, orders = one.schedule(key, nano_batch), None
        if one.orders is not None:
            orders = one.orders.call((number, nano_batch), key, need, rule, modes, has_sinks)
        # Where nothing moves nobody is met; but servers take part in every exchange.
        meets = schedule.moves or (one.loaded is not None and len(one.loaded) < one.layout.ranks)
        # Between two attentions of nano-batches in turn lies attention of the other one.
        timed, load = modes.returns and (self.interleaved or self.nano_batch is None), 0.0
        if one.speeds is not None and self.nano_batch is None:
            load = float(one.planned[key, nano_batch].plan.load[one.rank] * one.speeds[one.rank])
        return CallSetup(
            schedule, kernel, one.transport if meets else None, rule, modes, one.counts, nano_batch, label,
            one.aside if schedule.beside else None, one.turn, number, orders,
            one.stretches(nano_batch) if timed else None, load,
        )  # fmt: skip

    def _in_turn(self, layer: LayerInput) -> Tensor:
        """O [T, H, V] of both nano-batches, one after the other: that they cannot alternate came out later."""
        rows = [self.micro_batch.rows(nano_batch) for nano_batch in (0, 1)]
        if not any(rows):  # the model runs on a stand-in
            rows[1] = layer.q_THD.shape[0]
        if layer.q_THD.shape[0] != sum(rows):
            raise CADError(f"{layer.label} got {layer.q_THD.shape[0]} tokens where its micro-batch has {sum(rows)}")
        parts = zip(*(x.split(rows) for x in (layer.q_THD, layer.k_TKD, layer.v_TKV)))
        return torch.cat(
            [
                self.part(nano_batch, interleaved=False).attend(layer._replace(q_THD=q, k_TKD=k, v_TKV=v))
                for nano_batch, (q, k, v) in enumerate(parts)
            ]
        )

    def _without_heads(self, layer: LayerInput) -> Tensor:
        """O [T, 0, V] on a rank to which none of a layer's heads fell: it only plans, because ranks with other
        shares compare their plans, and all ranks of a job take part in every collective."""
        (q, k, v), micro_batch = (layer.q_THD, layer.k_TKD, layer.v_TKV), self.micro_batch
        key = PlanKey(self.window, HeadShape(1, 1, q.shape[2], v.shape[2], q.element_size()), self.chunk)
        micro_batch.number_layer(layer.layer, key)
        if (key, 0) not in micro_batch.planned:
            micro_batch.plan_all([key])
        if self.interleaved and not self.runs_again:
            hand_over()  # as the others of this replica, whose collectives come in this order
        # All three are in the graph: their projections add up gradients of all shares.
        return q.new_zeros(q.shape[0], 0, v.shape[2]) + q.sum() + k.sum() + v.sum()


def _own(x: Tensor) -> Tensor:
    """To be kept until backward: as it is, or a copy where it would keep much more memory alive than it has."""
    x = x.detach()
    return x.clone() if x.untyped_storage().nbytes() > 2 * x.numel() * x.element_size() else x
