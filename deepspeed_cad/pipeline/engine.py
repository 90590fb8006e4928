"""Hooks on DeepSpeed's PipelineEngine: its schedule, its instructions and its reading of data become CAD's.

In: an engine that DeepSpeed made. Out: a `PipelineBinding` on it, or one error at start that says what to change.
Everything is set on the one engine; DeepSpeed's classes stay as they are.
"""

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.schedule import (
    ForwardPass,
    InferenceSchedule,
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    PipeSchedule,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
)

from deepspeed_cad.ahead.step import find_random
from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADConfigError, CADError, CADUnsupportedError
from deepspeed_cad.exchange.failure.roll_call import together
from deepspeed_cad.integrations.deepspeed.block import find_config, write_statistics
from deepspeed_cad.integrations.pipeline import install_attention
from deepspeed_cad.integrations.recurrent import find_recurrent
from deepspeed_cad.pipeline.rounds import Rounds
from deepspeed_cad.pipeline.step import PipelineBinding
from deepspeed_cad.session import open_session
from deepspeed_cad.shares import Replica

logger = logging.getLogger("deepspeed_cad")


def initialize_pipeline(
    original: Callable[..., Any], config: CADConfig, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """Run `deepspeed.initialize` for a PipelineModule and turn CAD on for its engine.

    Raises CADConfigError and CADUnsupportedError for what CAD does not combine with, before DeepSpeed starts."""
    given = inspect.signature(original).bind_partial(*args, **kwargs).arguments
    _refuse_old(PipelineEngine)
    _refuse_block(config)
    _refuse_module(given["model"], find_config(original, args, kwargs))
    with together():
        engine, optimizer, loader, scheduler = original(*args, **kwargs)
    binding = _bind(engine, config)
    logger.info("CAD is on for a pipeline: %s", binding.session.describe())
    return engine, optimizer, loader, scheduler


def _bind(engine: PipelineEngine, config: CADConfig) -> PipelineBinding:
    for key in ("pipe_partitioned", "grad_partitioned"):
        # DeepSpeed makes parts of activations for the shape of the first micro-batch; here they differ in length.
        if getattr(engine, f"is_{key}", False):
            raise CADUnsupportedError(
                f'"pipeline": "{key}" is on, by default beside a "model" axis, and takes micro-batches of one '
                'length only. Add "pipeline": {"pipe_partitioned": false, "grad_partitioned": false} to the JSON'
            )
    topology, replica = engine.module.topology(), None
    if "model" in topology.get_axis_names() and topology.get_dim("model") > 1:
        # The ranks that divide the heads of this one's stage and micro-batches.
        place = topology.get_coord(engine.global_rank)
        replica = Replica(tuple(topology.filter_match(pipe=place.pipe, data=place.data)))
    session = open_session(config, torch.device(engine.device), replica)
    binding = PipelineBinding(engine, session)
    attention, recurrent = install_attention(engine.module, binding), len(find_recurrent(engine.module))
    binding.check_modules(attention, recurrent, bool(find_random(engine.module)))
    session.bindings[engine.module] = binding

    run_forward, run_backward = PipelineEngine._exec_forward_pass, PipelineEngine._exec_backward_pass

    def ticks(run: Callable[..., None], backward: bool) -> Callable[..., None]:
        return lambda engine, buffer_id, round_, micro_batch: binding.run_ticks(
            round_, micro_batch, backward, lambda: run(engine, buffer_id)
        )

    def alone(engine: PipelineEngine, buffer_id: int) -> None:
        binding.run_alone(lambda: run_forward(engine, buffer_id))

    hooks = {ForwardTicks: ticks(run_forward, False), BackwardTicks: ticks(run_backward, True), ForwardPass: alone}
    engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, **hooks}
    engine._train_schedule = lambda: LockstepSchedule(binding.rounds, engine.stage_id)
    engine._next_batch = binding.next_batch
    # Micro-batches differ in length; shapes travel ahead of activations.
    engine.dynamic_shape = engine.module.dynamic_shape = True
    engine.train_batch = _make_train_batch(binding, engine.train_batch)
    engine.eval_batch = _make_eval_batch(binding, engine.eval_batch)
    return binding


# The schedule


class ForwardTicks(PipeInstruction):
    """The forward ticks of a round: `round_`, `micro_batch` (None: serve only) and `buffer_id`."""


class BackwardTicks(PipeInstruction):
    """The backward ticks of a round, likewise."""


class LockstepSchedule(PipeSchedule):
    """DeepSpeed's instructions for lockstep rounds, in place of its 1F1B schedule.

    Forward and backward become instructions of CAD's own that every stage runs in every round which has such a tick,
    with a micro-batch or without. At the end of a round, activations go one stage on and gradients one stage back.
    Sends block until they are received, so of two neighbours the even one sends first. Activations come first, because
    DeepSpeed receives both into one buffer and copies only activations out of it."""

    def __init__(self, rounds: Rounds, stage_id: int) -> None:
        super().__init__(rounds.micro_batches, rounds.stages, stage_id)
        self.rounds = rounds

    def num_pipe_buffers(self) -> int:
        return self.rounds.buffers(self.stage_id)

    def steps(self) -> Iterator[list[PipeInstruction]]:
        rounds, stage = self.rounds, self.stage_id
        first, last = stage == 0, stage == rounds.stages - 1
        for r in range(rounds.count):
            now: list[PipeInstruction] = []
            forward, backward = rounds.forward(r, stage), rounds.backward(r, stage)
            if forward is not None and (first or last):
                now.append(LoadMicroBatch(self._buffer(forward)))
            if rounds.has_forward(r):
                now.append(ForwardTicks(buffer_id=self._buffer(forward), round_=r, micro_batch=forward))
            if rounds.has_backward(r):
                now.append(BackwardTicks(buffer_id=self._buffer(backward), round_=r, micro_batch=backward))
            going, back = self._move(SendActivation, not last, forward), self._move(SendGrad, not first, backward)
            arriving = self._move(RecvActivation, not first, rounds.forward(r + 1, stage))
            returning = self._move(RecvGrad, not last, rounds.backward(r + 1, stage))
            now += [*going, *arriving, *back, *returning] if stage % 2 == 0 else [*arriving, *going, *returning, *back]
            if r == rounds.count - 1:
                now += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            yield now

    def _move(self, kind: type[PipeInstruction], there: bool, micro_batch: int | None) -> list[PipeInstruction]:
        """To or from a neighbour, if it is there and there is anything to move."""
        return [kind(self._buffer(micro_batch))] if there and micro_batch is not None else []

    def _buffer(self, micro_batch: int | None) -> int:
        return 0 if micro_batch is None else micro_batch % self.num_pipe_buffers()


# Steps


@contextmanager
def _stopping(binding: PipelineBinding, *known: type[BaseException]) -> Iterator[None]:
    """An exception of this rank ends the step on all of them, unless it is of a kind that every rank has."""
    try:
        yield
    except known:
        raise
    except BaseException as error:
        binding.stop(error)
        raise


def _make_train_batch(binding: PipelineBinding, original: Callable[..., Any]) -> Callable[..., Any]:
    engine = binding.engine

    def look() -> None:
        """As DeepSpeed evaluates, with one micro-batch."""
        training = engine.module.training
        engine.module.eval()
        engine._compute_loss = True
        engine.total_loss = None
        with torch.no_grad():
            engine._exec_schedule(InferenceSchedule(1, engine.num_stages, engine.stage_id))
        engine.module.train(training)

    @wraps(original)
    def train_batch(data_iter: Any = None) -> Any:
        if data_iter is not None:
            engine.set_dataiterator(data_iter)
        with _stopping(binding, StopIteration):
            binding.begin_step(look)
        with _stopping(binding):
            loss = original()
            binding.end_step()
        write_statistics(engine, binding.session)
        return loss

    return train_batch


def _make_eval_batch(binding: PipelineBinding, original: Callable[..., Any]) -> Callable[..., Any]:
    engine = binding.engine

    @wraps(original)
    def eval_batch(data_iter: Any, *args: Any, **kwargs: Any) -> Any:
        given, before = inspect.signature(original).bind(data_iter, *args, **kwargs).arguments, engine.data_iterator
        engine.set_dataiterator(data_iter)
        try:
            # Every rank has an error of CAD, or was told.
            with _stopping(binding, StopIteration, CADError):
                binding.begin_evaluation(given.get("num_micro_batches") or engine.micro_batches)
        finally:
            engine.set_dataiterator(before)
        with _stopping(binding):
            return original(data_iter, *args, **kwargs)

    return eval_batch


# What CAD does not combine with


def _refuse_old(engine: type) -> None:
    if not hasattr(engine, "_train_schedule"):
        raise CADUnsupportedError(
            f"DeepSpeed {deepspeed.__version__} gives no way to change in which order a pipeline works, and CAD must: "
            'pip install --upgrade "deepspeed>=0.19.8", or train this pipeline without CAD'
        )


def _refuse_block(config: CADConfig) -> None:
    for key, wrong, why in (
        ("recompute_attention", config.recompute_attention, "other stages would have to attend again, too"),
        ("overlap", config.overlap == "interleave", "the tasks of other stages hide exchanges instead"),
        ("documents", config.documents == "deal", "its loss is the mean over micro-batches, so they stay as they are"),
        ("speeds", config.speeds == "measure", "it is for reserved servers, and stages learn no speeds"),
        ("servers", config.servers != "all", "idle stages serve instead"),
        ("verify", config.verify > 0, "a stage runs with the others only. Compare the loss that eval_batch gives"),
    ):
        if wrong:
            found = getattr(config, key)
            raise CADConfigError(f'"cad": "{key}" is {found!r}, which a pipeline cannot have: {why}. Leave it out')


def _refuse_module(module: Any, config: Mapping[str, Any]) -> None:
    """ZeRO stages that DeepSpeed itself refuses, pipelines of another kind, and stages without a layer."""
    zero = (config.get("zero_optimization") or {}).get("stage")
    if isinstance(zero, int) and zero > 1:
        raise CADUnsupportedError(
            f'"zero_optimization": stage {zero} with a PipelineModule: DeepSpeed reduces gradients of ZeRO-2 and '
            "-3 in every backward, which pipelines do not allow. Set the stage to 0 or 1"
        )
    names = [cls.__name__ for cls in type(module).__mro__]
    if "DualPipeVModule" in names:
        raise CADUnsupportedError(
            f"{names[0]} interleaves two stages on every rank; CAD's rounds need one stage per rank. Use PipelineModule"
        )
    topology = module.topology()
    for axis in topology.get_axis_names():
        if axis not in ("pipe", "data", "model") and topology.get_dim(axis) > 1:
            raise CADUnsupportedError(
                f'the topology of the pipeline has the axis "{axis}" of {topology.get_dim(axis)} ranks; CAD combines '
                "pipe, data, model only. Take the other out: attention is spread over all ranks anyway"
            )
    parts = list(module.parts)
    for stage, (begin, end) in enumerate(zip(parts, parts[1:])):
        if begin == end:
            raise CADUnsupportedError(
                f"stage {stage} of {len(parts) - 1} holds no layer: a pipeline of {parts[-1]} layers needs fewer "
                "stages, or another partition_method"
            )
