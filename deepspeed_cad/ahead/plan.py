"""From what all ranks announced to a planned micro-batch: layout, ticks, plans.

In: the announcements of a micro-batch and the kinds of layers to plan for. Out: a `MicroBatch`. Runs on the look-ahead
thread; plans of layers that are met first at their forward are made there. Everything is pure, so all ranks make the
same, and they compare fingerprints.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch

from deepspeed_cad.ahead.documents import Announcement
from deepspeed_cad.ahead.gather import Gatherer, Subject, What
from deepspeed_cad.ahead.held_up import begins
from deepspeed_cad.ahead.memory import NO_LIMIT, Limit, Memory
from deepspeed_cad.ahead.pace import Pace
from deepspeed_cad.ahead.traffic import Now, Traffic
from deepspeed_cad.ahead.worker import Worker
from deepspeed_cad.attention.linear import LinearTimes
from deepspeed_cad.attention.memory import ExchangeMemory, RowBytes, rows_kept, rows_resent
from deepspeed_cad.attention.microbatch import MicroBatch, MicroBatchOrders, PlanKey
from deepspeed_cad.attention.passes import Passes
from deepspeed_cad.attention.planned import Starts, whole_rank_tasks
from deepspeed_cad.attention.setup import CallCounts
from deepspeed_cad.config import CADConfig
from deepspeed_cad.cost import PAIRS, CostModel
from deepspeed_cad.errors import CADDataError
from deepspeed_cad.exchange.transport import Transport
from deepspeed_cad.layout import Ints, Layout, LocalSegments, Tick, assemble
from deepspeed_cad.notice import notice
from deepspeed_cad.planner import make_plan
from deepspeed_cad.planner.alternation import alternate
from deepspeed_cad.planner.constants import WAVES, WAVES_IN_TURN
from deepspeed_cad.planner.cut import PlanLayers, choose_cut, choose_interleaved_cut
from deepspeed_cad.planner.plan import Floats, HeadShape, Plan, PlanInput
from deepspeed_cad.profiles import Profile

logger = logging.getLogger("deepspeed_cad")


@dataclass(frozen=True, eq=False)
class Reserved:
    """Ranks behind the trainers that only serve, as plans see them."""

    servers: int
    open: Callable[[int, Layout, Ints | None], MicroBatchOrders] | None
    """Tells the servers of a micro-batch by its turn, its layout and its cut; None where another rank does."""
    helpers: int
    """Trainers that serve too."""
    linear: Callable[[int], Floats | None]
    """Seconds that each trainer's linear layers take per token, forward and backward, by model ([trainers]); None: not
    known, every rank gets as much attention."""
    speed: Floats | None = None
    """Of each rank in attention, beside what the costs say; 0 where it runs none. None: all are equal."""
    generation: int = 0
    """How often servers changed."""
    at_start: int = 0
    """Servers that the job began with. Cuts into nano-batches are made for these: trainers learn of a change at
    different moments, and a cut must be the same on all of them."""
    passes: Passes | None = None
    """Where servers may change."""
    hosts: np.ndarray | None = None
    """Number of each rank's host; None: see Plans."""
    transport: Transport | None = None
    """Over trainers and servers; None where one trainer is left alone, or see Plans."""


@dataclass(frozen=True, eq=False)
class Gathered:
    """What a micro-batch is planned from, whatever servers there are."""

    turn: int
    layout: Layout
    """Of the trainers."""
    cut: Ints | None
    """[trainers] rows of the first nano-batch."""
    linear: Floats | None
    """[trainers] seconds per token of linear layers."""
    late: Floats
    now: Now | None


class Beside(NamedTuple):
    """Linear layers that run while servers attend."""

    each: Floats
    """[trainers] seconds per token."""
    layout: Layout
    """Of trainers and servers, the whole micro-batch."""
    speed: Floats | None = None
    """[ranks] of attention; None: all are equal."""

    def seconds(self, tokens: Ints) -> Floats:
        """[ranks] of linear layers of so many tokens of each rank."""
        idle = self.layout.ranks - len(self.each)
        return np.append(self.each, np.zeros(idle)) * tokens

    def starts(self, tick: Tick, key: PlanKey, cost: CostModel) -> Starts:
        """What each rank computes while this nano-batch is attended, and how late its results may come."""
        segments, ranks = self.layout.segments, self.layout.ranks
        whole, own = (
            float(cost.of(rows.begin, rows.end, key.window).sum()) * key.shape.groups for rows in (segments, tick.query)
        )
        turns = alternate(
            max(whole - own, 0.0),
            self.seconds(tick.query_tokens),
            np.ones(ranks) if self.speed is None else self.speed,
            np.arange(ranks) >= len(self.each),
        )
        return Starts(self.seconds(self.layout.tokens - tick.query_tokens), np.zeros(ranks), turns)


class Plans:
    """Plans micro-batches of one session."""

    def __init__(
        self,
        config: CADConfig,
        device: torch.device,
        gatherer: Gatherer,
        worker: Worker,
        cost: Profile,
        pace: Pace,
        counts: CallCounts,
        transport: Callable[[], Transport | None],
        hosts: np.ndarray | None,
        aside: Callable[[], torch.cuda.Stream | None],
        traffic: Traffic | None = None,
        speeds: Floats | None = None,
        reserved: Reserved | None = None,
        memory: Memory | None = None,
    ) -> None:
        """What every micro-batch of the session has in common.

        Args:
            config: the "cad" block.
            device: where attention runs.
            gatherer: tells ranks' announcements and compares plans.
            worker: the look-ahead thread.
            cost: seconds or pairs of attention tasks.
            pace: base loads of ranks that the others wait for.
            counts: what the micro-batches' attention calls count.
            transport: gives the transport when a micro-batch is opened; None where there is one rank.
            hosts: number of each rank's host ([ranks]); None where there is one rank.
            aside: gives the stream on which served tasks run beside local ones, if they do, likewise.
            traffic: what links carry; None where there is one rank.
            speeds: in attention, of the ranks that the job began with, beside what the costs say; None: all are equal.
            reserved: servers beside the ranks that train; None where there are none.
            memory: what exchanges may take; None where nobody looks after that.
        """
        self.config, self.device, self.gatherer, self.worker = config, device, gatherer, worker
        self.cost, self.pace, self.counts, self.transport = cost, pace, counts, transport
        self.hosts, self.aside, self.traffic, self.reserved = hosts, aside, traffic, reserved
        self.speeds, self.memory = speeds, memory
        self.turn = 0
        """Micro-batches opened so far, the same on all ranks: the number of the next one."""
        self.abandoned = ""
        """Why this rank trains no further micro-batch. In words: an error has its frames, and while it is held whatever
        a layer has open in them stays open, such as the hooks of activation checkpointing in torch below 2.13."""
        self.admit: Callable[[int], None] = lambda came: None
        """Waits until so many reserved servers take part that came later."""
        self._said: set[str] = set()

    @property
    def ranks(self) -> int:
        """Ranks that run attention."""
        return self.gatherer.ranks + (0 if self.reserved is None else self.reserved.servers)

    def open(self, announcements: list[Announcement], keys: Mapping[PlanKey, int], model: int = 0) -> MicroBatch:
        """A micro-batch of all ranks, planned for layers of the given kinds. Runs on the look-ahead thread.

        `keys`: how many layers there are of each kind; `model`: which of those that have CAD trains it.
        """
        # One look: servers may change meanwhile, and then the micro-batch is planned again before it is used.
        reserved, trainers = self.reserved, len(announcements)
        idle = 0 if reserved is None else reserved.servers
        own = assemble([one.local for one in announcements])
        layout, linear, cut = _widen(own, idle), None, None
        if self.config.overlap_used in ("interleave", "pingpong"):
            spare = 0 if reserved is None else reserved.at_start
            unit = np.array([one.unit for one in announcements] + [1] * spare)
            linear = self._linear(model)
            cut = self._choose_cut(_widen(own, spare), unit, keys, linear)
            if cut is None and self.ranks > 1:
                self.say_once("a micro-batch was not cut into nano-batches: its documents span ranks, or it is tiny")
        # Nothing else may change what is learned of paces and links: plans are made on this thread and at the forward,
        # on every rank in another order.
        if self.pace.paused:
            self.say_once("slower ranks are not relieved: torch's deterministic algorithms are on, on some rank")
        at = None if cut is None else np.append(cut[:trainers], np.zeros(idle, np.int64))
        ticks = (layout.tick(),) if at is None else layout.cut(at)
        for key in keys:
            self.pace.expect(max(self._mean_attention(tick, key) for tick in ticks))
        now = None if self.traffic is None else self.traffic.now
        self.say_news()
        turn, self.turn = self.turn, self.turn + 1
        late = self.pace.late
        beside = None
        if linear is not None and at is not None:
            beside = Beside(linear, layout, None if reserved is None else reserved.speed)
        starts = cache(partial(self._starts, late, beside))
        rows = rows_kept if self.config.backward == "keep" else rows_resent
        micro_batch = MicroBatch(
            self.gatherer.rank, layout, ticks, self.device,
            partial(self.plan_tick, starts=starts, now=now, reserved=reserved), partial(self._agree, turn),
            self.transport(), self.counts, aside=self.aside(), turn=turn, era=now and now.era,
            longest=self._longest(), starts=starts, orders=_open_at_servers(reserved, turn, layout, at),
            memory=self.exchange_memory(self.limit, rows, len(ticks)),
            linear=None if reserved is None else self.counts.linear.setdefault(model, LinearTimes()),
        )  # fmt: skip
        if reserved is not None and reserved.passes is not None:
            micro_batch.generation, micro_batch.passes = reserved.generation, reserved.passes
            micro_batch.transport = reserved.transport
            micro_batch.came = self.gatherer.came
            gathered = Gathered(turn, own, None if cut is None else cut[:trainers], linear, late, now)
            micro_batch.renew = partial(self._renew, gathered)
            # Trainers plan again at different moments: the identity of each exchange compares their schedules.
            micro_batch.agree = lambda value, what: None
        if keys:
            micro_batch.plan_all(list(keys))
        return micro_batch

    def _renew(self, gathered: Gathered, micro_batch: MicroBatch) -> None:
        """Plan a micro-batch for the servers that there are now, if they are others than it was planned for."""
        reserved = self.reserved
        assert reserved is not None
        if micro_batch.generation == reserved.generation:
            return
        idle = np.zeros(reserved.servers, np.int64)
        layout, beside = _widen(gathered.layout, reserved.servers), None
        at = None if gathered.cut is None else np.append(gathered.cut, idle)
        if gathered.linear is not None and at is not None:
            beside = Beside(gathered.linear, layout, reserved.speed)
        micro_batch.plan_again(
            reserved.generation, layout, (layout.tick(),) if at is None else layout.cut(at),
            partial(
                self.plan_tick, starts=partial(self._starts, gathered.late, beside), now=gathered.now,
                reserved=reserved,
            ),
            reserved.transport, _open_at_servers(reserved, gathered.turn, layout, at),
        )  # fmt: skip

    def open_local(self, local: LocalSegments) -> MicroBatch:
        """A micro-batch that this rank attends alone: evaluation. Raises CADDataError if documents span ranks."""
        inside = local.begin[local.begin > 0]
        if len(inside):
            raise CADDataError(
                f"evaluation runs attention on each rank alone, but a document of rank {self.gatherer.rank} "
                f"starts at position {int(inside[0])}: evaluate on whole documents"
            )
        layout = assemble([local])
        return MicroBatch(
            0, layout, (layout.tick(),), self.device, lambda tick, key: _plan_alone(layout, key),
            lambda value, what: None, None, CallCounts(),
        )  # fmt: skip

    def plan_tick(
        self,
        tick: Tick,
        key: PlanKey,
        starts: Callable[[Tick, PlanKey], Starts | None],
        now: Now | None = None,
        reserved: Reserved | None = None,
    ) -> Plan:
        """The plan of one tick for layers of one kind.

        `starts`, `now`: when ranks begin, and links, as they were known when the micro-batch was gathered; None: links
        as the costs say. `reserved`: the servers that the tick is of; None: those that there are.
        """
        known = starts(tick, key)
        base = None if known is None else known.begin
        reserved = reserved or self.reserved
        transport = self.transport() if reserved is None or reserved.passes is None else reserved.transport
        waves = self._waves(transport, reserved, known)
        turns = None if known is None or max(waves) > max(WAVES_IN_TURN) else known.alternation
        if transport is None or not transport.two_ways:
            turns = None
        speed = self.speeds if reserved is None else reserved.speed
        hosts = self.hosts if reserved is None or reserved.passes is None else reserved.hosts
        cost = self.cost if now is None else self.cost.with_links(now.inside, now.between)
        plan = make_plan(
            PlanInput(
                tick, key.shape, cost.cost_for(key.shape), key.window, self.config.tolerance,
                self.config.granularity, base_load=base, speed=speed, hosts=hosts,
                waves=waves, keep=self.config.backward == "keep", alternation=turns,
            )
        )  # fmt: skip
        if base is None:
            return plan
        # Statistics speak of attention, not of when ranks finish.
        return replace(plan, load=plan.load - base, load_before=plan.load_before - base)

    def given_waves(self) -> tuple[int, ...]:
        """In how many waves they move where nobody looks for the best number."""
        return (1 if self.transport() is None or isinstance(self.config.waves, str) else self.config.waves,)

    def _waves(self, transport: Transport | None, reserved: Reserved | None, known: Starts | None) -> tuple[int, ...]:
        """In how many waves plans may move; the same on every rank."""
        if transport is None or not isinstance(self.config.waves, str):
            return self.given_waves()
        if reserved is not None:
            alternates = transport.two_ways and known is not None and known.alternation is not None
            return WAVES_IN_TURN if alternates else (1,)
        several_hosts = self.hosts is not None and len(np.unique(self.hosts)) > 1
        if not several_hosts or self.config.overlap == "none":
            return (1,)
        return tuple(count for count in WAVES if count <= transport.most_waves)

    def _longest(self) -> Callable[[Plan], float]:
        """What the exchanges of a plan's tick take at the most, where that is known."""
        transport = self.transport()
        # Torch's collectives on GPUs are not timed while training.
        if self.traffic is None or transport is None or (transport.name == "c10d" and self.device.type == "cuda"):
            return lambda plan: math.inf
        return partial(self.traffic.longest, copies=transport.name == "nvlink")

    def exchange_memory(
        self, limit: Limit, rows: Callable[[HeadShape], RowBytes], ticks: int = 1
    ) -> ExchangeMemory | None:
        """What the exchanges of a micro-batch may need at once; None where nobody looks after that.

        `limit`: as all ranks knew it when the micro-batch was gathered; `rows`: what travels of each row; `ticks`:
        nano-batches, which have memory of their own.
        """
        memory = self.memory
        if memory is None:
            return None
        return ExchangeMemory(
            limit.size / ticks, limit.source, limit.most / ticks, rows, self.config.granularity, ticks,
            lambda size: memory.needs(size * ticks), lambda limit: memory.lacks(limit * ticks),
        )  # fmt: skip

    @property
    def limit(self) -> Limit:
        """Of what exchanges may need, as it is known now."""
        return NO_LIMIT if self.memory is None else self.memory.now

    def _linear(self, model: int) -> Floats | None:
        """Seconds per token of every trainer's linear layers, where plans know of them and costs are seconds too."""
        if self.reserved is None or self.config.overlap_used != "interleave" or self.cost.unit != "seconds":
            return None
        return self.reserved.linear(model)

    def _choose_cut(
        self, layout: Layout, unit: Ints, keys: Mapping[PlanKey, int], linear: Floats | None
    ) -> Ints | None:
        if self.reserved is None or self.config.overlap_used != "interleave":
            return choose_cut(layout, unit)
        kinds = [
            PlanLayers(self.cost.cost_for(key.shape), key.window, key.shape.groups, layers)
            for key, layers in keys.items()
        ]
        # The slowest trainer is the one that servers and the others wait for.
        slowest = None if linear is None else float(linear.max())
        trainers = self.gatherer.ranks
        servers, helpers = float(self.reserved.at_start or self.reserved.servers), float(self.reserved.helpers)
        if self.speeds is not None:
            servers = float(self.speeds[trainers:].sum())
            helpers = float(self.speeds[:trainers].sum()) if helpers else 0.0
        return choose_interleaved_cut(layout, unit, kinds, servers, slowest, helpers)

    def say_once(self, text: str) -> None:
        """Log what a user may wonder about, the first time that it happens."""
        if text not in self._said:
            self._said.add(text)
            logger.info(text)

    def say_news(self) -> None:
        """On rank 0 what all ranks learned of links since this was called last."""
        if self.traffic is None:
            return
        for text, notable in self.traffic.news:
            if self.gatherer.rank == 0:
                notice(text) if notable else logger.info(text)
        self.traffic.news.clear()

    def _starts(self, late: np.ndarray, beside: Beside | None, tick: Tick, key: PlanKey) -> Starts | None:
        if self.reserved is not None:
            return None if beside is None else beside.starts(tick, key, self.cost.cost_for(key.shape))
        base = self.pace.base_load(late, self._mean_attention(tick, key))
        if base is None:
            return None
        begin = begins(base, tick, self.cost.cost_for(key.shape), key.shape.groups, key.window, self.speeds)
        return Starts(begin, begin - base)

    def _mean_attention(self, tick: Tick, key: PlanKey) -> float:
        each = self.cost.cost_for(key.shape).of(tick.query.begin, tick.query.end, key.window)
        speeds = self.ranks if self.speeds is None else float(self.speeds.sum())
        return float(each.sum()) * key.shape.groups / speeds

    def _agree(self, turn: int, value: int, what: str) -> None:
        self.worker.run(lambda: self.gatherer.agree(value, Subject(What.PLAN, index=turn)))


def _widen(layout: Layout, servers: int) -> Layout:
    """With ranks behind the trainers that have no tokens."""
    return Layout(layout.ranks + servers, layout.segments, np.append(layout.tokens, np.zeros(servers, np.int64)))


def _open_at_servers(reserved: Reserved | None, turn: int, layout: Layout, cut: Ints | None) -> MicroBatchOrders | None:
    return None if reserved is None or reserved.open is None else reserved.open(turn, layout, cut)


def _plan_alone(layout: Layout, key: PlanKey) -> Plan:
    tasks = whole_rank_tasks(layout, key.shape.groups)
    load = PAIRS.of(layout.segments.begin, layout.segments.end, key.window).sum(keepdims=True)
    nothing = np.zeros(1, np.int64)
    return Plan(tasks, load, load, nothing, nothing)
