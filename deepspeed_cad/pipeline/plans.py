"""A pipeline's step ahead: from the documents of all its micro-batches to a plan for every tick.

In: what the first stage of every replica is about to train, and the program of ticks. Out: `PlannedPhase`s, in the
order in which they run; made on the look-ahead thread, each while those before it run. A forward tick and a backward
tick hold segments of different micro-batches, so each has a plan of its own. Everything is pure, so all ranks make the
same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

from deepspeed_cad.ahead.gather import Subject, What
from deepspeed_cad.ahead.plan import Plans
from deepspeed_cad.attention.layer import LayerKind
from deepspeed_cad.attention.memory import rows_of_ticks
from deepspeed_cad.attention.microbatch import MicroBatch, PlanKey
from deepspeed_cad.attention.setup import CallSetup, Modes
from deepspeed_cad.cost import CostModel
from deepspeed_cad.errors import CADError
from deepspeed_cad.feedback.link_speeds import Speeds
from deepspeed_cad.feedback.memory_limit import NO_LIMIT
from deepspeed_cad.kernels.interface import Kernel
from deepspeed_cad.layout import Layout, LocalSegments, Tick, assemble
from deepspeed_cad.pipeline.phase import ProgramTick
from deepspeed_cad.pipeline.rounds import Rounds, order_micro_batches
from deepspeed_cad.planner import make_plan
from deepspeed_cad.planner.plan import Plan, PlanInput

BACKWARD_PAIRS = 5 / 7
"""Share of the matrix products of a query-key pair that backward has."""


@dataclass(frozen=True)
class Place:
    stage: int
    replica: int


@dataclass(frozen=True, eq=False)
class PlannedPhase:
    """All that runs forward, or backward, in one round: a layout and its plans for every set of stages."""

    turn: int
    parts: dict[tuple[int, ...], MicroBatch]
    """By the stages that take part in a tick."""
    counted: MicroBatch
    """All plans of the phase, for statistics."""

    def setup(self, number: int, tick: ProgramTick, kernel: Kernel, modes: Modes, label: str) -> CallSetup:
        """This rank's call in one tick: the `number`th of the program."""
        part = self.parts[tick.stages]
        schedule = part.schedule(key_of(tick.kind), 0)
        return CallSetup(
            schedule, kernel, part.transport, tick.kind.rule, modes, part.counts,
            label=label, aside=part.aside if schedule.beside else None, turn=self.turn, layer=number,
        )  # fmt: skip


def key_of(kind: LayerKind) -> PlanKey:
    """What plans of a layer differ in."""
    return PlanKey(kind.rule.window, kind.shape)


def tick_cost(cost: CostModel, backward: bool) -> CostModel:
    """What tasks of one direction cost beside each other, in seconds of both directions, as transfers are weighed.

    A kernel multiplies two matrices per pair forward and five backward, at about one speed. What a KV row costs, it
    costs backward, where each task writes dK and dV for its whole prefix: forward is as fast with 128 rows of a task as
    with all. (H200, FlashAttention-4: benchmarks/results/kernels-h200.md.)
    """
    return replace(cost, key=cost.key / BACKWARD_PAIRS if backward else 0.0)


def phase_layout(
    places: Sequence[Place],
    documents: Sequence[Sequence[LocalSegments]],
    rounds: Rounds,
    round_: int,
    backward: bool,
    stages: Sequence[int],
) -> Layout:
    """Which segments meet in a tick. `documents[r][m]`: those of replica r's micro-batch m."""
    find = rounds.backward if backward else rounds.forward

    def of(place: Place) -> LocalSegments:
        micro_batch = find(round_, place.stage) if place.stage in stages else None
        return LocalSegments.none(0) if micro_batch is None else documents[place.replica][micro_batch]

    return assemble([of(place) for place in places])


Documents = list[list[LocalSegments]]
"""[replica][micro-batch]"""


class StepPlans:
    """The plans of one optimizer step."""

    def __init__(
        self,
        plans: Plans,
        places: Sequence[Place],
        program: Sequence[ProgramTick],
        gather: Callable[[], Documents | None],
        rounds: Rounds,
        step: int,
    ) -> None:
        """Begin to gather and to plan; called by all ranks for the same steps.

        `gather` gives what all ranks train, None where a loader ended; it runs on the look-ahead thread.
        """
        self.plans, self.places, self.program, self.rounds = plans, places, program, rounds
        self.order: list[list[int]] = []
        """[replica]: in which order its micro-batches are trained, as numbers of those that it loaded."""
        self._documents: Documents | None = None
        self._links: Speeds | None = None
        self._limit = NO_LIMIT
        self._gathered = plans.worker.submit(partial(self._gather, gather))
        self._phases: dict[tuple[int, bool], Future[PlannedPhase]] = {}
        self._fingerprint = 0
        submit = plans.worker.submit
        for r in range(rounds.count):
            for backward, runs in ((False, rounds.has_forward(r)), (True, rounds.has_backward(r))):
                if runs:
                    self._phases[r, backward] = submit(partial(self._plan, r, backward))
        # Each exchange compares its schedule with the other ranks; this also names plans as the cause.
        self._agreed = submit(partial(self._agree, step))

    @property
    def known(self) -> bool:
        """Whether all ranks have this step; waits until that is known. Raises what gathering raised."""
        self.plans.worker.trains_here()
        return bool(self.plans.worker.wait(self._gathered, "documents of a step"))

    def take(self, round_: int, backward: bool) -> PlannedPhase:
        """The plans of a phase that runs now; waits until they are made."""
        worker = self.plans.worker
        return worker.wait(self._phases.pop((round_, backward)), "the plan of a round")

    def finish(self) -> None:
        """After the last phase. Raises CADPeerError where ranks made different plans."""
        self.plans.worker.wait(self._agreed, "the comparison of plans")

    # On the look-ahead thread

    def _gather(self, gather: Callable[[], Documents | None]) -> bool:
        given = gather()
        # What was learned of links and memory travelled with the documents: now it is the same on all ranks.
        self._links = self.plans.links
        self._limit = self.plans.limit
        self.plans.warn_of_links()
        if given is None:
            return False
        kinds = list(dict.fromkeys(key_of(tick.kind) for tick in self.program))
        if self.plans.config.documents == "in_order":
            self.order = [list(range(len(own))) for own in given]
        else:
            costs = [(self.plans.cost.cost_for(kind.shape), kind) for kind in kinds]
            work = [
                [sum(float(cost.of(one.begin, one.end, kind.window).sum()) * kind.shape.groups for cost, kind in costs)
                 for one in own] for own in given
            ]  # fmt: skip
            self.order = order_micro_batches(work)
        self._documents = [[own[m] for m in order] for own, order in zip(given, self.order, strict=True)]
        return True

    def _agree(self, step: int) -> None:
        if self._documents is not None:
            self.plans.gatherer.agree(self._fingerprint, Subject(What.PLAN, index=step))

    def _plan(self, round_: int, backward: bool) -> PlannedPhase:
        plans = self.plans
        if self._documents is None:
            raise CADError("a step of the pipeline is planned that a loader did not reach")
        turn, plans.turn = plans.turn, plans.turn + 1
        parts: dict[tuple[int, ...], MicroBatch] = {}
        for stages in dict.fromkeys(tick.stages for tick in self.program):
            layout = phase_layout(self.places, self._documents, self.rounds, round_, backward, stages)
            part = MicroBatch(
                plans.gatherer.shares.replica, layout, (layout.tick(),), plans.device,
                partial(self._plan_tick, backward), self._remember, plans.crew.transport, plans.counts,
                aside=plans.aside, turn=turn, memory=plans.exchange_memory(self._limit, rows_of_ticks),
            )  # fmt: skip
            part.plan_all(list(dict.fromkeys(key_of(tick.kind) for tick in self.program if tick.stages == stages)))
            parts[stages] = part
        plans_of = [{(key, i): one for (key, _), one in part.planned.items()} for i, part in enumerate(parts.values())]
        counted = replace(next(iter(parts.values())), planned={k: v for one in plans_of for k, v in one.items()})
        return PlannedPhase(turn, parts, counted)

    def _plan_tick(self, backward: bool, tick: Tick, key: PlanKey) -> Plan:
        plans, links = self.plans, self._links
        cost = plans.cost if links is None else plans.cost.with_links(*links)
        return make_plan(
            PlanInput(
                tick, key.shape, tick_cost(cost.cost_for(key.shape), backward), key.window, plans.config.tolerance,
                plans.config.granularity, speed=plans.crew.speeds, hosts=plans.crew.hosts, waves=plans.given_waves(),
            )
        )  # fmt: skip

    def _remember(self, fingerprint: int, what: str) -> None:
        self._fingerprint = (self._fingerprint * 1000003 + fingerprint) & ((1 << 62) - 1)
