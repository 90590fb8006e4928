"""From what all ranks announced to a planned micro-batch: layout, ticks, plans.

In: the announcements of a micro-batch and the kinds of layers to plan for. Out: a `MicroBatch`. Runs on the look-ahead
thread; plans of layers that are met first at their forward are made there. Everything is pure, so all ranks make the
same, and they compare fingerprints.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from deepspeed_cad.ahead.announced import StepDocuments, of_replicas
from deepspeed_cad.ahead.crew import Crew
from deepspeed_cad.ahead.documents import Announcement
from deepspeed_cad.ahead.gather import Gatherer, Subject, What
from deepspeed_cad.ahead.worker import Worker
from deepspeed_cad.attention.layer import MicroBatchOrders, Starts, whole_rank_tasks
from deepspeed_cad.attention.memory import ExchangeMemory, RowBytes, rows_of_layers
from deepspeed_cad.attention.microbatch import MicroBatch, PlanKey
from deepspeed_cad.attention.setup import CallCounts
from deepspeed_cad.config import CADConfig
from deepspeed_cad.cost import PAIRS, CostModel
from deepspeed_cad.errors import CADDataError
from deepspeed_cad.feedback.layer_times import LayerTimes
from deepspeed_cad.feedback.link_speeds import LinkSpeeds, Speeds
from deepspeed_cad.feedback.memory_limit import NO_LIMIT, Limit, MemoryLimit
from deepspeed_cad.layout import Ints, Layout, LocalSegments, Tick, assemble
from deepspeed_cad.notice import notice
from deepspeed_cad.planner import make_plan
from deepspeed_cad.planner.constants import FORWARD_SHARE, WAVES, WAVES_IN_TURN
from deepspeed_cad.planner.cut import LINEAR_PAIRS, PlanLayers, choose_cut, choose_interleaved_cut
from deepspeed_cad.planner.deal import Costs
from deepspeed_cad.planner.finish import alternate, begin_in_place
from deepspeed_cad.planner.plan import Floats, HeadShape, Plan, PlanInput
from deepspeed_cad.profiles import Profile

logger = logging.getLogger("deepspeed_cad")

SLOW, SETTLED = 1.5, 16
"""Times the median outside attention, and micro-batches before: a choice. GPUs of one kind differ by 3 %."""


@dataclass(frozen=True, eq=False)
class Gathered:
    """What a micro-batch is planned from, whatever servers there are."""

    turn: int
    layout: Layout
    cut: Ints | None
    """[trainers] rows of the first nano-batch."""
    seconds: Floats | None
    """[trainers] per token outside attention; None: not known."""
    links: Speeds | None
    backward: bool = True
    hosts_pace: bool = False
    """Whether layers take as long as their launching, and plans count on it."""
    speeds: Floats | None = None
    """[trainers] in attention, as learned, beside what costs say; None: those of the crew."""


@dataclass(frozen=True, eq=False)
class Learned:
    """What ranks learn of each other while they train; None where nothing is exchanged."""

    links: LinkSpeeds | None = None
    memory: MemoryLimit | None = None
    layer_times: LayerTimes | None = None


class Plans:
    def __init__(
        self, config: CADConfig, device: torch.device, gatherer: Gatherer, worker: Worker, cost: Profile,
        counts: CallCounts, crew: Crew, learned: Learned, aside: torch.cuda.Stream | None,
    ) -> None:  # fmt: skip
        """`crew`: replaced where servers change; `aside`: the stream on which served tasks run beside local ones."""
        self.config, self.device, self.gatherer, self.worker = config, device, gatherer, worker
        self.cost, self.counts, self.crew, self.learned, self.aside = cost, counts, crew, learned, aside
        self._speeds_at_start = crew.speeds
        self.turn = 0
        """Micro-batches opened so far, the same on all ranks: the number of the next one."""
        self.references = 0
        """Models that are only looked at and that all ranks have run together."""
        self.abandoned = ""
        """Why this rank trains no further micro-batch. In words: an error has its frames, and while it is held whatever
        a layer has open in them stays open, such as the hooks of activation checkpointing in torch below 2.13."""
        self.in_one_part: set[int] = set()
        """Models whose nano-batches cannot alternate; changed on the look-ahead thread once training has begun."""
        self._said: set[str] = set()

    def open(
        self, announcements: list[Announcement], keys: Mapping[PlanKey, int], model: int = 0, backward: bool = True
    ) -> MicroBatch:
        """A micro-batch of all replicas, planned for layers of the given kinds. Runs on the look-ahead thread.

        `announcements`: of all ranks; `keys`: how many layers there are of each kind; `model`: its number."""
        # One look: servers may change meanwhile, and then the micro-batch is planned again before it is used.
        crew = self.crew
        announcements = of_replicas(announcements, self.gatherer.shares)
        layout = assemble([announcement.local for announcement in announcements])
        # Beside servers a forward alone makes attention even.
        seconds, cut = self._seconds(model, backward) if backward or crew.servers is None else None, None
        if self.config.overlap_used == "interleave" and model not in self.in_one_part:
            spare = 0 if crew.servers is None else crew.servers.at_start
            unit = np.array([announcement.unit for announcement in announcements] + [1] * spare)
            cut = self._choose_cut(crew.widen(layout, spare), unit, keys, seconds if backward else None)
            if cut is None and crew.ranks > 1:
                self.say_once("a micro-batch was not cut into nano-batches: its documents span ranks, or it is tiny")
        self.warn(seconds if self.turn >= SETTLED else None)
        turn, self.turn = self.turn, self.turn + 1
        known, speeds = self.learned.layer_times, self.learned_speeds(model)
        whole = seconds is not None and cut is None and crew.servers is None
        hosts_pace = whole and known is not None and known.hosts_pace(model)
        if hosts_pace:
            self.say_once("GPUs wait for their hosts: attention moves only where whole layers are uneven")
        # Nothing else may change what is learned: plans are made on this thread and at the forward, on every rank in
        # another order.
        cut = None if cut is None else cut[: crew.trainers]
        gathered = Gathered(turn, layout, cut, seconds, self.links, backward, hosts_pace, speeds)
        widened, ticks, orders = self._ticks(gathered, crew)
        micro_batch = MicroBatch(
            self.gatherer.shares.replica, widened, ticks, self.device, partial(self.plan_tick, gathered, crew),
            partial(self._agree, turn), crew.transport, self.counts, aside=self.aside, turn=turn,
            loaded=np.array([one.local.tokens if one.loaded < 0 else one.loaded for one in announcements]),
            orders=orders, memory=self.exchange_memory(self.limit, rows_of_layers, len(ticks)),
            stretch_times=None if known is None else self.counts.stretch_times[model], speeds=speeds,
            generation=crew.generation, calls=crew.calls(partial(self._renew, gathered)),
        )  # fmt: skip
        if keys:
            micro_batch.plan_all(list(keys))
        return micro_batch

    def _ticks(self, gathered: Gathered, crew: Crew) -> tuple[Layout, tuple[Tick, ...], MicroBatchOrders | None]:
        layout, at = crew.widen(gathered.layout), None
        if gathered.cut is not None:
            at = np.append(gathered.cut, np.zeros(crew.ranks - crew.trainers, np.int64))
        return layout, (layout.tick(),) if at is None else layout.cut(at), crew.tell(gathered.turn, layout, at)

    def _renew(self, gathered: Gathered, micro_batch: MicroBatch) -> None:
        """Plan a micro-batch for the servers that there are now, if they are others than it was planned for."""
        crew = self.crew
        if micro_batch.generation != crew.generation:
            layout, ticks, orders = self._ticks(gathered, crew)
            planner = partial(self.plan_tick, gathered, crew)
            micro_batch.plan_again(crew.generation, layout, ticks, planner, crew.transport, orders)

    def open_local(self, local: LocalSegments) -> MicroBatch:
        """A micro-batch that a rank attends alone, as in evaluation. Raises CADDataError where documents span ranks."""
        if len(inside := local.begin[local.begin > 0]):
            raise CADDataError(
                f"a forward without backward runs attention on each rank alone, but a document of rank "
                f"{self.gatherer.rank} starts at position {int(inside[0])}, so it began on another rank. Set "
                '"forward_only": "balanced", with which all ranks run such forwards together, or give each rank whole '
                "documents"
            )
        layout = assemble([local])
        return MicroBatch(
            0, layout, (layout.tick(),), self.device, _plan_alone, lambda value, what: None, None, CallCounts()
        )

    def plan_tick(self, gathered: Gathered, crew: Crew, tick: Tick, key: PlanKey) -> Plan:
        """The plan of one tick of a micro-batch for layers of one kind."""
        known = self._starts(gathered, crew, tick, key)
        base = None if known is None else known.begin
        waves = self._waves(crew, known)
        takes_turns = crew.transport is not None and crew.transport.two_ways and max(waves) <= max(WAVES_IN_TURN)
        turns = known.alternation if known is not None and takes_turns else None
        plan = make_plan(PlanInput(
            tick, key.shape, self._cost(gathered, key, gathered.links), key.window, self.config.tolerance,
            self.config.granularity, base_load=base, speed=crew.speeds if gathered.speeds is None else gathered.speeds,
            hosts=crew.hosts, waves=waves, alternation=turns, backward=gathered.backward,
        ))  # fmt: skip
        # Statistics speak of attention, not of when ranks finish.
        return plan if base is None else replace(plan, load=plan.load - base, load_before=plan.load_before - base)

    def _cost(self, gathered: Gathered, key: PlanKey, links: Speeds | None = None) -> CostModel:
        cost = (self.cost if links is None else self.cost.with_links(*links)).cost_for(key.shape)
        return cost if gathered.backward else cost.of_forward(FORWARD_SHARE)

    def weights(self, keys: Mapping[PlanKey, int]) -> list[tuple[CostModel, int | None, int]]:
        """What orders micro-batches: cost of a head group, window, and how many groups there are in all layers.

        In chunks a row reads at most what it does in a window. Ranks that divide heads train in one order, whatever
        fell to each, so there the windows alone count."""
        if self.gatherer.shares.count > 1:
            return [(PAIRS, window, 1) for window in dict.fromkeys(key.window or key.chunk for key in keys)]
        return [
            (self.cost.cost_for(key.shape), key.window or key.chunk, layers * key.shape.groups)
            for key, layers in keys.items()
        ]

    def step_costs(self, documents: StepDocuments, keys: Mapping[PlanKey, int], model: int) -> Costs:
        """What the documents of a step cost, in the unit of the profile: attention, and all else by the token. What is
        not attention is measured while training; before that, and where plans count pairs, it is taken for LINEAR_PAIRS
        a token."""
        kinds = self.weights(keys) or [(PAIRS, None, 1)]  # before the first forward no kind of layer is known
        work = np.zeros(len(documents.step.length))
        for cost, window, times in kinds:
            np.add.at(work, documents.of, cost.of(documents.begin, documents.end, window) * times)
        seconds, ones = self._seconds(model) if keys else None, np.ones(self.crew.trainers)
        by_pairs = ones * sum(cost.pair * times for cost, _, times in kinds) * LINEAR_PAIRS
        each = by_pairs if seconds is None else seconds * sum(keys.values())
        speeds = self.learned_speeds(model) if self.crew.speeds is None else self.crew.speeds[: self.crew.trainers]
        return Costs(work, each, ones if speeds is None else speeds)

    def given_waves(self) -> tuple[int, ...]:
        return (1 if self.crew.transport is None or isinstance(self.config.waves, str) else self.config.waves,)

    def _waves(self, crew: Crew, known: Starts | None) -> tuple[int, ...]:
        """In how many waves plans may move; the same on every rank."""
        if (transport := crew.transport) is None or not isinstance(self.config.waves, str):
            return self.given_waves()
        if crew.servers is not None:
            alternates = transport.two_ways and known is not None and known.alternation is not None
            return WAVES_IN_TURN if alternates else (1,)
        if not crew.several_hosts or self.config.overlap == "none":
            return (1,)
        return tuple(count for count in WAVES if count <= transport.most_waves)

    def exchange_memory(
        self, limit: Limit, rows: Callable[[HeadShape], RowBytes], ticks: int = 1
    ) -> ExchangeMemory | None:
        """What the exchanges of a micro-batch may need at once; None where nobody looks after that. `limit`: as all
        ranks knew it when the micro-batch was gathered; `rows`: what travels of each row; `ticks`: nano-batches, which
        have memory of their own."""
        memory = self.learned.memory
        return None if memory is None else ExchangeMemory(
            limit.size / ticks, limit.source, limit.most / ticks, rows, self.config.granularity, ticks,
            lambda size: memory.needs(size * ticks), lambda limit: memory.lacks(limit * ticks),
        )  # fmt: skip

    @property
    def limit(self) -> Limit:
        return NO_LIMIT if self.learned.memory is None else self.learned.memory.now

    @property
    def links(self) -> Speeds | None:
        return None if self.learned.links is None else self.learned.links.now

    def _seconds(self, model: int, backward: bool = True) -> Floats | None:
        """[trainers] per token outside attention; None where that is not known, or plans count pairs."""
        known = self.learned.layer_times
        return None if known is None or self.cost.unit != "seconds" else known.seconds(model, backward)

    def learned_speeds(self, model: int) -> Floats | None:
        """[trainers] in attention, as learned; None beside servers, and where plans count pairs."""
        known = self.learned.layer_times
        return None if known is None or self.crew.servers or self.cost.unit != "seconds" else known.speeds(model)

    def _choose_cut(
        self, layout: Layout, unit: Ints, keys: Mapping[PlanKey, int], seconds: Floats | None
    ) -> Ints | None:
        crew, speeds = self.crew, self._speeds_at_start
        if crew.servers is None:
            return choose_cut(layout, unit)
        kinds = [
            PlanLayers(self.cost.cost_for(key.shape), key.window, key.shape.groups, layers)
            for key, layers in keys.items()
        ]
        # The slowest trainer is the one that servers and the others wait for.
        slowest = None if seconds is None else float(seconds.max())
        servers, helpers = float(crew.servers.at_start or crew.servers.count), float(crew.trainers)
        if speeds is not None:
            helpers, servers = (float(part.sum()) for part in np.split(speeds, [crew.trainers]))
        return choose_interleaved_cut(layout, unit, kinds, servers, slowest, helpers)

    def say_once(self, text: str, say: Callable[[str], None] = logger.info) -> None:
        """Log what a user may wonder about, the first time that it happens."""
        if text not in self._said:
            self._said.add(text)
            say(text)

    def warn(self, seconds: Floats | None = None) -> None:
        """Of what looks broken, on rank 0. `seconds`: [trainers] per token outside attention."""
        texts = [] if self.learned.links is None else [self.learned.links.warning]
        if seconds is not None and seconds.max() > SLOW * np.sort(seconds)[(len(seconds) - 1) // 2]:
            who = f"{'rank' if self.gatherer.shares.count == 1 else 'replica'} {seconds.argmax()}"
            texts += [f"{who} takes far longer than most outside attention: is its GPU hot?"]
        for text in filter(None, texts if self.gatherer.rank == 0 else ()):
            self.say_once(text, notice)

    def _starts(self, gathered: Gathered, crew: Crew, tick: Tick, key: PlanKey) -> Starts | None:
        """When ranks begin to attend in a tick; None where nothing is known, or that is no concern of plans."""
        if gathered.seconds is None:
            return None
        if crew.servers is None:
            # Nano-batches hide from each other when they begin.
            if gathered.cut is not None:
                return None
            # Launching takes as long whatever the tokens. All of it is given, so the tolerance is one of whole layers.
            if gathered.hosts_pace:
                return Starts(np.full(tick.ranks, (gathered.seconds * tick.query_tokens).mean()))
            cost = self._cost(gathered, key)
            begin = begin_in_place(gathered.seconds, tick, cost, key.shape.groups, key.window, gathered.speeds)
            return None if begin is None else Starts(begin)
        if gathered.cut is None:
            return None
        layout = crew.widen(gathered.layout)
        each = np.append(gathered.seconds, np.zeros(crew.ranks - crew.trainers))
        whole, own = (
            float(self._cost(gathered, key).of(rows.begin, rows.end, key.window).sum()) * key.shape.groups
            for rows in (layout.segments, tick.query)
        )
        turns = alternate(
            max(whole - own, 0.0),
            each * tick.query_tokens,
            np.ones(crew.ranks) if crew.speeds is None else crew.speeds,
            np.arange(crew.ranks) >= crew.trainers,
        )
        return Starts(each * (layout.tokens - tick.query_tokens), turns)

    def _agree(self, turn: int, value: int, what: str) -> None:
        self.worker.run(lambda: self.gatherer.agree(value, Subject(What.PLAN, index=turn)))


def _plan_alone(tick: Tick, key: PlanKey) -> Plan:
    layout = tick.rows()
    load = PAIRS.of(layout.segments.begin, layout.segments.end, key.window).sum(keepdims=True)
    nothing = np.zeros(1, np.int64)
    return Plan(whole_rank_tasks(layout, key.shape.groups), load, load, nothing, nothing)
