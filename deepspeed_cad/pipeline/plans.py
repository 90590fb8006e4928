"""A pipeline's step ahead: what all ranks tell each other of it, and a plan for every tick.

In: this rank's layers, what it is about to train, and the program of ticks. Out: layers and documents of all, the same
on every rank or one error on all of them; and `PlannedPhase`s, in the order in which they run. All of it is made on the
look-ahead thread, each phase while those before it run. A forward tick and a backward tick hold segments of different
micro-batches, so each has a plan of its own.
"""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import astuple, dataclass, replace
from functools import partial

import numpy as np
import torch

from deepspeed_cad.ahead.announced import StepMessage, compare
from deepspeed_cad.ahead.documents import Announcement
from deepspeed_cad.ahead.gather import Gatherer, State, Subject, What
from deepspeed_cad.ahead.plan import Plans
from deepspeed_cad.attention.layer import LayerKind
from deepspeed_cad.attention.memory import rows_of_ticks
from deepspeed_cad.attention.microbatch import MicroBatch, PlanKey
from deepspeed_cad.cost import CostModel
from deepspeed_cad.errors import CADDataError, CADError, CADUnsupportedError
from deepspeed_cad.kernels.interface import MaskRule
from deepspeed_cad.layout import Layout, LocalSegments, Tick, assemble
from deepspeed_cad.notice import name_ranks
from deepspeed_cad.pipeline.phase import ProgramTick
from deepspeed_cad.pipeline.rounds import Rounds, order_micro_batches
from deepspeed_cad.planner import make_plan
from deepspeed_cad.planner.plan import HeadShape, Plan, PlanInput

BACKWARD_PAIRS = 5 / 7
"""Share of the matrix products of a query-key pair that backward has: five, beside two forward, at about one speed."""
Documents = list[list[LocalSegments]]
"""[replica][micro-batch]"""


@dataclass(frozen=True)
class Place:
    stage: int
    replica: int


def gather_layers(gatherer: Gatherer, places: Sequence[Place], mine: Sequence[LayerKind]) -> list[list[LayerKind]]:
    """The attention layers of every stage. Raises CADUnsupportedError where there are none, or replicas differ."""
    rows = [[*astuple(shape), *astuple(rule), str(dtype).removeprefix("torch.")] for shape, rule, dtype in mine]
    message = np.frombuffer(json.dumps(rows).encode(), np.uint8).astype(np.int64)
    said = gatherer.gather(Subject(What.LAYERS, index=1), message)
    stages: dict[int, list[list]] = {}
    for rank, place in zip(gatherer.shares.members, places, strict=True):
        rows = json.loads(said[rank].payload.astype(np.uint8).tobytes())
        if stages.setdefault(place.stage, rows) != rows:
            raise CADUnsupportedError(
                f"stage {place.stage} has other attention layers on rank {rank} (replica {place.replica}) than on "
                "replica 0: build the same PipelineModule on all ranks"
            )
    if not any(stages.values()):
        raise CADUnsupportedError(
            "no stage of the pipeline ran attention that CAD can move: its layers need attention modules of "
            "transformers (deepspeed_cad.to_pipeline makes a pipeline of a model)"
        )
    return [
        [LayerKind(HeadShape(*row[:5]), MaskRule(*row[5:8]), getattr(torch, row[8])) for row in stages[stage]]
        for stage in sorted(stages)
    ]


def gather_documents(
    gatherer: Gatherer, places: Sequence[Place], mine: Sequence[Announcement] | None, step: int, count: int
) -> Documents | None:
    """Documents of every replica's micro-batches; None where some loader ended before it had `count` of them.

    `mine`: of this rank's micro-batches; empty on a stage that loads nothing, None where its loader ended.
    Raises CADDataError where ranks of a replica, or its first and its last stage, load different micro-batches."""
    message = StepMessage(list(mine or [])).to_array()
    state = State.ENDED if mine is None else State.GOING
    said = gatherer.gather(Subject(What.STEP, index=step), message, state=state)
    if any(one.state == State.ENDED for one in said):
        return None
    given = [StepMessage.from_array(one.payload).micro_batches for one in said]
    for ranks in gatherer.shares.replicas.tolist():
        counts = [len(given[rank]) for rank in ranks]
        if len(set(counts)) > 1:
            raise CADDataError(f"{name_ranks(ranks)} divide the heads of a stage, but load {counts} micro-batches")
        for same in zip(*(given[rank] for rank in ranks)):
            compare(same, ranks)
    at = {place: given[rank] for place, rank in zip(places, gatherer.shares.members)}
    last = max(place.stage for place in places)
    documents = [at[place] for place in sorted(at, key=lambda place: place.replica) if place.stage == 0]
    for replica, own in enumerate(documents):
        for m, (first, other) in enumerate(zip(own, at[Place(last, replica)])):
            if not first.local.same_as(other.local) or first.ids != other.ids:
                shapes = [f"{one.local.tokens} tokens in {len(one.local.begin)} documents" for one in (first, other)]
                if first.local.same_as(other.local):
                    shapes[1] = "as many, but other ones,"
                raise CADDataError(
                    f"micro-batch {m} of replica {replica} has {shapes[0]} on the first stage and {shapes[1]} on the "
                    "last: both must read the same data in the same order. Give all ranks of a replica the same loader "
                    "and the same seed"
                )
    if any(len(one) != count for one in documents):
        raise CADDataError(
            f"replicas have {[len(one) for one in documents]} micro-batches in this step; expected {count} of each"
        )
    return [[one.local for one in own] for own in documents]


@dataclass(frozen=True, eq=False)
class PlannedPhase:
    """All that runs forward, or backward, in one round: a layout and its plans for every set of stages."""

    parts: dict[tuple[int, ...], MicroBatch]
    """By the stages that take part in a tick."""
    counted: MicroBatch
    """All plans of the phase, for statistics."""


def key_of(kind: LayerKind) -> PlanKey:
    return PlanKey(kind.rule.window, kind.shape)


def tick_cost(cost: CostModel, backward: bool) -> CostModel:
    """What tasks of one direction cost beside each other, in seconds of both directions, as transfers are weighed.

    What a KV row costs, it costs backward, where each task writes dK and dV for its whole prefix: forward is as fast
    with 128 rows of a task as with all. (H200, FlashAttention-4: benchmarks/results/kernels-h200.md.)"""
    return replace(cost, key=cost.key / BACKWARD_PAIRS if backward else 0.0)


class StepPlans:
    def __init__(
        self, plans: Plans, places: Sequence[Place], program: Sequence[ProgramTick],
        gather: Callable[[], Documents | None], rounds: Rounds, step: int, orders: bool,
    ) -> None:  # fmt: skip
        """Begin to gather and to plan; called by all ranks for the same steps.

        `gather` gives what all ranks train, None where a loader ended; it runs on the look-ahead thread. `orders`:
        whether micro-batches may be trained in another order."""
        self._orders = orders and plans.config.documents != "in_order"
        self.plans, self.places, self.program, self.rounds = plans, places, program, rounds
        self.order: list[list[int]] = []
        """[replica]: in which order its micro-batches are trained, as numbers of those that it loaded."""
        self._documents: Documents | None = None
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
        return self.plans.worker.wait(self._gathered, "documents of a step")

    def take(self, round_: int, backward: bool) -> PlannedPhase:
        """The plans of a phase that runs now; waits until they are made."""
        return self.plans.worker.wait(self._phases.pop((round_, backward)), "the plan of a round")

    def finish(self) -> None:
        """After the last phase. Raises CADPeerError where ranks made different plans."""
        self.plans.worker.wait(self._agreed, "the comparison of plans")

    # On the look-ahead thread

    def _gather(self, gather: Callable[[], Documents | None]) -> bool:
        given = gather()
        # What was learned of links and memory travelled with the documents: now it is the same on all ranks.
        self._links, self._limit = self.plans.links, self.plans.limit
        self.plans.warn()
        if given is None:
            return False
        kinds = self.plans.weights(dict.fromkeys(self._kinds(), 1))

        def work(one: LocalSegments) -> float:
            return sum(float(cost.of(one.begin, one.end, window).sum()) * times for cost, window, times in kinds)

        self.order = [list(range(len(own))) for own in given]
        if self._orders:
            self.order = order_micro_batches([[work(one) for one in own] for own in given])
        self._documents = [[own[m] for m in order] for own, order in zip(given, self.order, strict=True)]
        return True

    def _kinds(self, stages: tuple[int, ...] | None = None) -> list[PlanKey]:
        """Of layers in ticks of these stages; None: in any."""
        return list(dict.fromkeys(key_of(tick.kind) for tick in self.program if stages in (None, tick.stages)))

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
            layout = self._layout(self._documents, round_, backward, stages)
            part = MicroBatch(
                plans.gatherer.shares.replica, layout, (layout.tick(),), plans.device,
                partial(self._plan_tick, backward), self._remember, plans.crew.transport, plans.counts,
                aside=plans.aside, turn=turn, memory=plans.exchange_memory(self._limit, rows_of_ticks),
            )  # fmt: skip
            part.plan_all(self._kinds(stages))
            parts[stages] = part
        every = {(key, i): one for i, part in enumerate(parts.values()) for (key, _), one in part.planned.items()}
        return PlannedPhase(parts, replace(next(iter(parts.values())), planned=every))

    def _layout(self, documents: Documents, round_: int, backward: bool, stages: Sequence[int]) -> Layout:
        """Which segments meet in a tick."""
        find = self.rounds.backward if backward else self.rounds.forward

        def of(place: Place) -> LocalSegments:
            micro_batch = find(round_, place.stage) if place.stage in stages else None
            return LocalSegments.none(0) if micro_batch is None else documents[place.replica][micro_batch]

        return assemble([of(place) for place in self.places])

    def _plan_tick(self, backward: bool, tick: Tick, key: PlanKey) -> Plan:
        plans, links = self.plans, self._links
        cost = plans.cost if links is None else plans.cost.with_links(*links)
        return make_plan(PlanInput(
            tick, key.shape, tick_cost(cost.cost_for(key.shape), backward), key.window, plans.config.tolerance,
            plans.config.granularity, hosts=plans.crew.hosts, waves=plans.given_waves(),
        ))  # fmt: skip

    def _remember(self, fingerprint: int, what: str) -> None:
        self._fingerprint = (self._fingerprint * 1000003 + fingerprint) & ((1 << 62) - 1)
