"""CAD on DeepSpeed's PipelineEngine: lockstep rounds in which attention of all stages and replicas is one pool.

`train_batch` runs CAD's schedule, `eval_batch` DeepSpeed's own with attention of each rank alone. What runs on this
rank at a moment is one instruction of one micro-batch, kept in `PipelineBinding.running`; the layers' attention finds
it there, also where autograd runs a checkpointed layer again on a thread of its own.
"""

import itertools
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from deepspeed_cad.ahead.gather import Subject, What
from deepspeed_cad.ahead.loader import counts_what_is_read
from deepspeed_cad.attention.layer import LayerInput, LayerKind, kernel_need
from deepspeed_cad.attention.microbatch import MaskDescriptor
from deepspeed_cad.attention.setup import CallSetup, Modes
from deepspeed_cad.errors import CADError, CADUnsupportedError
from deepspeed_cad.integrations.mask_check import ForwardCheck, is_due
from deepspeed_cad.layout import LocalSegments
from deepspeed_cad.pipeline.data import Loaded, Reader
from deepspeed_cad.pipeline.phase import Phase, ProgramTick, StageMicroBatch, merge_stages
from deepspeed_cad.pipeline.plans import (
    Documents,
    Place,
    PlannedPhase,
    StepPlans,
    gather_documents,
    gather_layers,
    key_of,
)
from deepspeed_cad.pipeline.rounds import Rounds
from deepspeed_cad.session import Session

logger = logging.getLogger("deepspeed_cad")


@dataclass(eq=False)
class Alone:
    """A forward whose attention this rank runs by itself: evaluation, and the first look at the layers."""

    descriptor: Callable[[int | None], MaskDescriptor]
    """By window."""
    seen: list[LayerKind]

    def attend(self, layer: LayerInput) -> torch.Tensor:
        self.seen.append(layer.kind(layer.rows()))
        return self.descriptor(layer.rule.window).attend(layer)


class PipelineBinding:
    def __init__(self, engine: Any, session: Session) -> None:
        self.engine, self.session = engine, session
        self.feed = session.open_feed(f"pipeline of {engine.num_stages} stages")
        topology = engine.module.topology()
        self.places = [Place(one.pipe, one.data) for one in map(topology.get_coord, session.shares.members)]
        self.place = self.places[session.shares.replica]
        self.running: StageMicroBatch | Alone | None = None
        self.program: tuple[ProgramTick, ...] = ()
        """Empty until the layers have been seen."""
        self._own: list[int] = []
        """Ticks of the program that run a layer of this rank's stage."""
        self._reader = Reader()
        self._loaded: deque[Loaded] = deque()
        """Micro-batches of the step that runs, in the order of training."""
        self._in_flight: dict[int, StageMicroBatch] = {}
        self._plans: StepPlans | None = None
        self._alone: deque[LocalSegments] = deque()
        """Documents of the forwards to come in which this rank attends alone."""
        self._seen: list[LayerKind] = []
        """Layers of the last such forward."""
        self._next: tuple[list[Loaded], StepPlans] | None = None
        """The step after the one that runs: what this rank loads of it, and its plans."""
        self._steps = itertools.count()
        self._check: ForwardCheck | None = None
        """Of the forward that runs, where it is checked."""
        self._forwards = itertools.count()
        """Training forwards of this stage."""

    def check_modules(self, attention: int, recurrent: int, random: bool) -> None:
        """Raise CADUnsupportedError on all ranks where no stage has an attention module that CAD can switch, or one has
        a layer that carries state. In: how many of each this stage has, and whether anything in it is `random`."""
        gatherer, run = self.session.gatherer, self.session.worker.run
        if not any(run(lambda: gatherer.numbers(attention, Subject(What.LAYERS)))):
            raise CADUnsupportedError(
                "no stage of the pipeline has an attention module of transformers, through which CAD takes over "
                "attention: build its layers of them (deepspeed_cad.to_pipeline does), or train without CAD"
            )
        if any(run(lambda: gatherer.numbers(recurrent, Subject(What.LAYERS)))):
            raise CADUnsupportedError(
                "the pipeline has layers that carry state from token to token (delta nets, Mamba, short convolutions). "
                "Stages are not told where documents begin, so state would leak from one document of a row to the "
                "next. Train this model without a pipeline: there CAD keeps documents apart"
            )
        self.feed.orders = not any(run(lambda: gatherer.numbers(random, Subject(What.LAYERS))))

    # Steps

    @property
    def rounds(self) -> Rounds:
        return Rounds(self.engine.num_stages, self.engine.micro_batches)

    def begin_step(self, look: Callable[[], None]) -> None:
        """Before a step: learn what all replicas train, and begin to plan. Raises StopIteration where data ended.

        `look` runs the first micro-batch through all stages, without gradients; called before the first step."""
        self.feed.refuse_abandoned()
        count, rounds = self.engine.micro_batches, self.rounds
        if not self.program:
            self._look_at_layers(look, count)
        mine = self._peek(count)
        ahead, self._next = self._next, None
        if ahead is None or not self._is_next(*ahead, mine, rounds):
            ahead = self._plan_step(mine, rounds)
        loaded, plans = ahead
        if not plans.known:
            raise StopIteration("a loader of the pipeline ended within this step")
        self._plans, order = plans, plans.order[self.place.replica]
        self._load([loaded[m] for m in order] if loaded else [], count)

    def end_step(self) -> None:
        plans, self._plans = self._plans, None
        if plans is not None:
            plans.finish()
        self.session.say_first()

    def begin_evaluation(self, count: int) -> None:
        """Before an evaluation: every stage learns the documents that it will attend alone."""
        self.feed.refuse_abandoned()
        mine = self._peek(count, has_loss=False)
        self._alone = deque(self._gather(mine, count, "this evaluation"))
        self._load(mine or [], count)

    def stop(self, error: BaseException) -> None:
        """A step ended with an exception: this rank's part of its exchanges is missing, so tell those that wait."""
        self.running, self._plans, self._next, self._check = None, None, None, None
        self._in_flight.clear()
        self._alone.clear()
        self.feed.raised("a step of the pipeline", error)

    # What the engine's instructions call

    def next_batch(self) -> Any:
        return self._loaded.popleft().pair

    def run_ticks(self, round_: int, micro_batch: int | None, backward: bool, work: Callable[[], None]) -> None:
        """A phase of a round: `work` where this stage has a micro-batch in it, serving where it has none."""
        if self._plans is None:
            raise CADError("a step of the pipeline runs that train_batch did not begin")
        planned = self._plans.take(round_, backward)
        self.session.count(planned.counted)
        if self.session.tracer is not None:
            runs = "serving" if micro_batch is None else f"micro-batch {micro_batch}"
            self.session.tracer.name_tick(f"round {round_}, {runs}", backward)
        own = [] if micro_batch is None else self._own
        phase = Phase(self.program, own, partial(self._setup, planned), backward)
        if micro_batch is not None:
            if not backward:
                self._in_flight[micro_batch] = StageMicroBatch()
            running = self.running = self._in_flight[micro_batch]
            running.phase = phase
            self._check = None if backward else self._open_check(planned, own)
            work()
            running.phase = self.running = self._check = None
            if backward:
                del self._in_flight[micro_batch]
        phase.finish()
        if round_ == 0 and not backward and self.session.config.look_ahead:
            # Once the GPU has work: reading data takes time.
            rounds, loaders = self._plans.rounds, (self.engine.data_iterator, self.engine.training_dataloader)
            stateful = any(map(counts_what_is_read, loaders))
            self._next = self._plan_step(None if stateful else self._peek(rounds.micro_batches, early=True), rounds)

    def run_alone(self, work: Callable[[], None]) -> None:
        """The forward of the next micro-batch of an evaluation."""
        part = self.session.plans.open_local(self._alone.popleft())
        alone = self.running = Alone(lambda window: self.session.descriptor(part, window), [])
        work()
        self.running, self._seen = None, alone.seen

    # What the layers call

    def see_mask(self, window: int | None, given: dict[str, Any]) -> None:
        """A layer made a mask of its own; raises CADUnsupportedError where the plan of its micro-batch is another."""
        if self._check is not None:
            self._check.see(window, given)

    def attend(self, layer: LayerInput) -> torch.Tensor:
        if self.running is None:
            raise CADError(
                f"{layer.label} ran outside of train_batch and eval_batch, where its documents are not known"
            )
        return self.running.attend(layer)

    # Inside

    def _open_check(self, planned: PlannedPhase, own: list[int]) -> ForwardCheck | None:
        """The check of the model's own masks in a forward that begins; None where none is wanted or due."""
        number = next(self._forwards)
        if self.session.config.check != "sampled" or not own or not is_due(number):
            return None
        return ForwardCheck(planned.parts[self.program[own[0]].stages].local(), number)

    def _setup(self, planned: PlannedPhase, tick: int, label: str) -> CallSetup:
        session, kind = self.session, self.program[tick].kind
        part = planned.parts[self.program[tick].stages]
        schedule = part.schedule(key_of(kind), 0)
        return CallSetup(
            schedule, session.kernel(kernel_need(kind, session.device)), part.transport, kind.rule,
            Modes(session.config.overlap != "none", parking=session.parking, results_travel=True), part.counts,
            label=label, aside=part.aside if schedule.beside else None, turn=part.turn, layer=tick,
        )  # fmt: skip

    @property
    def _loads(self) -> bool:
        return self.place.stage in (0, self.engine.num_stages - 1)

    def _peek(self, count: int, has_loss: bool = True, early: bool = False) -> list[Loaded] | None:
        """This rank's next micro-batches: none on a stage that loads nothing, None where the loader ended."""
        if not self._loads:
            return []
        has_loss = has_loss and self.engine.module.loss_fn is not None
        try:
            return self._reader.peek(self.engine.data_iterator, count, has_loss, self.engine.batch_fn, early)
        except CADError as error:
            self.feed.fail(error)

    def _load(self, loaded: list[Loaded], count: int) -> None:
        """Take micro-batches that were read ahead as those of the step that begins."""
        self._loaded = deque(loaded)
        if self._loads:
            self._reader.drop(self.engine.data_iterator, count)

    def _is_next(self, loaded: list[Loaded], plans: StepPlans, mine: list[Loaded] | None, rounds: Rounds) -> bool:
        """Whether the step that was planned ahead is the one that every rank trains now: a script may have given
        another loader, or evaluated on this one."""
        same = mine is not None and len(mine) == len(loaded) and all(a is b for a, b in zip(mine, loaded))
        subject, ready = Subject(What.LOADER, index=next(self._steps)), same and plans.rounds == rounds
        worker, gatherer = self.session.worker, self.session.gatherer
        worker.trains_here()
        said = worker.run(lambda: gatherer.gather(subject, value=int(ready)))
        return all(one.value for one in said) and plans.known

    def _gathering(self, mine: list[Loaded] | None, count: int, step: int) -> Callable[[], Documents | None]:
        """The job that learns the documents of a step of all replicas."""
        documents = None if mine is None else [one.documents for one in mine]
        return partial(gather_documents, self.session.gatherer, self.places, documents, step, count)

    def _gather(self, mine: list[Loaded] | None, count: int, what: str) -> list[LocalSegments]:
        """Documents of this rank's replica, now. Raises StopIteration where data ended."""
        self.session.worker.trains_here()
        if (documents := self.session.worker.run(self._gathering(mine, count, next(self._steps)))) is None:
            raise StopIteration(f"a loader of the pipeline ended within {what}")
        return documents[self.place.replica]

    def _plan_step(self, mine: list[Loaded] | None, rounds: Rounds) -> tuple[list[Loaded], StepPlans]:
        step = next(self._steps)
        gather, plans = self._gathering(mine, rounds.micro_batches, step), self.session.plans
        return mine or [], StepPlans(plans, self.places, self.program, gather, rounds, step, self.feed.orders)

    def _look_at_layers(self, look: Callable[[], None], count: int) -> None:
        mine = self._peek(count)
        first, *_ = self._gather(mine, count, "the first step")
        self._loaded, self._alone, self._seen = deque(mine or []), deque([first]), []
        look()
        seen, gatherer = self._seen, self.session.gatherer
        layers = self.session.worker.run(lambda: gather_layers(gatherer, self.places, seen))
        self.program = merge_stages(layers)
        self._own = [number for number, tick in enumerate(self.program) if self.place.stage in tick.stages]
        counts = [len(one) for one in layers]
        logger.info("a pipeline whose stages have %s attention layers: %d ticks a round", counts, len(self.program))
