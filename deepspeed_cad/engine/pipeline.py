"""CAD on DeepSpeed's PipelineEngine: lockstep rounds in which attention of all stages and replicas is one pool.

In: an engine whose stages attend through transformers' interface. Out: the same engine; `train_batch` runs CAD's
schedule (pipeline_schedule.py), `eval_batch` DeepSpeed's own with attention of each rank alone. What runs on this rank
at a moment is one instruction of one micro-batch, kept in `PipelineBinding.running`; the layers' attention finds it
there, also where autograd runs a checkpointed layer again on a thread of its own.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from deepspeed_cad.ahead.pipeline import Place, PlannedPhase, StepPlans
from deepspeed_cad.ahead.pipeline_gather import gather_documents, gather_layers
from deepspeed_cad.ahead.rounds import Rounds
from deepspeed_cad.attention.microbatch import MaskDescriptor
from deepspeed_cad.attention.phase import Phase, StageMicroBatch
from deepspeed_cad.attention.program import LayerKind, ProgramTick, kind_of, merge_stages
from deepspeed_cad.attention.setup import CallSetup, Modes
from deepspeed_cad.engine.pipeline_data import Loaded, pull
from deepspeed_cad.errors import CADError, CADPeerError
from deepspeed_cad.kernels.interface import KernelNeed, MaskRule
from deepspeed_cad.layout import LocalSegments
from deepspeed_cad.session import Session

logger = logging.getLogger("deepspeed_cad")


@dataclass(eq=False)
class Alone:
    """A forward whose attention this rank runs by itself: evaluation, and the first look at the layers."""

    descriptor: Callable[[int | None], MaskDescriptor]
    """By window."""
    seen: list[LayerKind]

    def attend(
        self,
        module: torch.nn.Module,
        q_BHSD: torch.Tensor,
        k_BKSD: torch.Tensor,
        v_BKSV: torch.Tensor,
        rule: MaskRule,
        sinks: torch.Tensor | None,
        label: str,
    ) -> torch.Tensor:
        """As StageMicroBatch.attend."""
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHSD, k_BKSD, v_BKSV))
        self.seen.append(kind_of(q, k, v, rule))
        return self.descriptor(rule.window).attend(module, q_BHSD, k_BKSD, v_BKSV, rule, sinks, label)


class PipelineBinding:
    """CAD on one engine."""

    def __init__(self, engine: Any, session: Session) -> None:
        self.engine, self.session = engine, session
        self.feed = session.open_feed(f"pipeline of {engine.num_stages} stages")
        topology = engine.module.topology()
        coordinates = [topology.get_coord(rank) for rank in range(session.ranks)]
        self.places = [Place(one.pipe, one.data) for one in coordinates]
        self.place = self.places[session.rank]
        self.running: StageMicroBatch | Alone | None = None
        self.program: tuple[ProgramTick, ...] | None = None
        """None until the layers have been seen."""
        self._own: list[int] = []
        """Ticks of the program that run a layer of this rank's stage."""
        self._loaded: deque[Loaded] = deque()
        self._in_flight: dict[int, StageMicroBatch] = {}
        self._plans: StepPlans | None = None
        self._seen: list[LayerKind] = []
        """Layers of the last such forward."""
        self._alone: deque[LocalSegments] = deque()
        """Documents of the forwards to come in which this rank attends alone."""
        self._steps = 0

    # Steps

    @property
    def rounds(self) -> Rounds:
        """Of a training step."""
        return Rounds(self.engine.num_stages, self.engine.micro_batches)

    def begin_step(self, look: Callable[[], None]) -> None:
        """Before a step: learn what all replicas train, and begin to plan. Raises StopIteration where data ended.

        `look` runs the first micro-batch through all stages, without gradients; called before the first step.
        """
        documents = self._read_ahead(self.engine.micro_batches, self.engine.module.loss_fn is not None)
        if self.program is None:
            self.program = self._look_at_layers(documents, look)
        self._plans = StepPlans(
            self.session.plans, self.places, self.program, documents, self.rounds, self._steps
        )  # fmt: skip

    def end_step(self) -> None:
        """After a step. Raises CADPeerError where ranks made different plans."""
        plans, self._plans = self._plans, None
        if plans is not None:
            plans.finish()
        self.session.say_first()

    def begin_evaluation(self, count: int) -> None:
        """Before an evaluation: every stage learns the documents that it will attend alone."""
        documents = self._read_ahead(count, has_loss=False)
        self._alone = deque(documents[self.place.replica])

    def stop(self, error: BaseException) -> None:
        """A step ended with an exception: this rank's part of its exchanges is missing, so tell those that wait."""
        self.running, self._plans = None, None
        self._in_flight.clear()
        self._alone.clear()
        if not isinstance(error, CADError):
            error = CADPeerError(
                f"rank {self.session.rank}: a step of the pipeline ended with the exception {type(error).__name__}: "
                f"{error}. Its attention is shared with the other ranks, so training cannot go on after it was caught: "
                "mend its cause and start again from a checkpoint"
            )
        self.feed.abandon(error)

    # What the engine's instructions call

    def next_batch(self) -> Any:
        """The next micro-batch of the step that was read ahead."""
        return self._loaded.popleft().pair

    def run_ticks(self, round_: int, micro_batch: int | None, backward: bool, work: Callable[[], None]) -> None:
        """A phase of a round: `work` where this stage has a micro-batch in it, serving where it has none."""
        if self._plans is None or self.program is None:
            raise CADError("a step of the pipeline runs that train_batch did not begin")
        planned = self._plans.take(round_, backward)
        for part in planned.parts.values():
            self.session.count(part)
        own = [] if micro_batch is None else self._own
        phase = Phase(self.program, own, partial(self._setup, self.program, planned), backward)
        if micro_batch is not None:
            if not backward:
                self._in_flight[micro_batch] = StageMicroBatch()
            running = self.running = self._in_flight[micro_batch]
            running.forward, running.backward = (None, phase) if backward else (phase, None)
            work()
            running.forward = running.backward = self.running = None
            if backward:
                del self._in_flight[micro_batch]
        phase.finish()

    def run_alone(self, work: Callable[[], None]) -> None:
        """The forward of the next micro-batch of an evaluation."""
        part = self.session.plans.open_local(self._alone.popleft())
        alone = self.running = Alone(lambda window: self.session.descriptor(part, window, False), [])
        work()
        self.running, self._seen = None, alone.seen

    # What the layers call

    def attend(
        self,
        module: torch.nn.Module,
        q_BHSD: torch.Tensor,
        k_BKSD: torch.Tensor,
        v_BKSV: torch.Tensor,
        rule: MaskRule,
        sinks: torch.Tensor | None,
        label: str,
    ) -> torch.Tensor:
        """O [B, S, H, V] of one layer; arguments as those of MaskDescriptor.attend."""
        if self.running is None:
            raise CADError(f"{label} ran outside of train_batch and eval_batch, where its documents are not known")
        return self.running.attend(module, q_BHSD, k_BKSD, v_BKSV, rule, sinks, label)

    # Inside

    def _setup(self, program: tuple[ProgramTick, ...], planned: PlannedPhase, tick: int, label: str) -> CallSetup:
        session = self.session
        shape, rule, dtype = program[tick].kind
        need = KernelNeed(
            session.device, dtype, shape.head_dim, shape.value_dim, shape.heads_per_group, rule.window is not None,
            rule.softcap is not None, torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        modes = Modes(local_first=session.config.overlap != "none")
        return planned.setup(tick, program[tick], session.kernel(need), modes, label)

    def _read_ahead(self, count: int, has_loss: bool) -> list[list[LocalSegments]]:
        """Pull micro-batches where this stage loads any, and learn those of all replicas."""
        if self.session.plans.abandoned is not None:
            raise CADPeerError(str(self.session.plans.abandoned))
        loaded: list[Loaded] | None = []
        if self.place.stage in (0, self.engine.num_stages - 1):
            try:
                loaded = pull(self.engine.data_iterator, count, has_loss)
            except CADError as error:
                self.feed.fail(error)
        self._steps += 1
        worker, step = self.session.worker, self._steps
        mine = None if loaded is None else [one.documents for one in loaded]
        worker.trains_here()
        documents = worker.run(lambda: gather_documents(self.session.gatherer, self.places, mine, step, count))
        if documents is None:
            raise StopIteration("a loader of the pipeline ended within this step")
        self._loaded = deque(loaded or [])
        return documents

    def _look_at_layers(
        self, documents: list[list[LocalSegments]], look: Callable[[], None]
    ) -> tuple[ProgramTick, ...]:
        loaded = list(self._loaded)
        self._alone, self._seen = deque([documents[self.place.replica][0]]), []
        look()
        self._loaded = deque(loaded)
        seen, gatherer = self._seen, self.session.gatherer
        layers = self.session.worker.run(lambda: gather_layers(gatherer, self.places, seen, 1))
        program = merge_stages(layers)
        self._own = [number for number, tick in enumerate(program) if self.place.stage in tick.stages]
        counts = [len(one) for one in layers]
        logger.info("a pipeline whose stages have %s attention layers: %d ticks a round", counts, len(program))
        return program
