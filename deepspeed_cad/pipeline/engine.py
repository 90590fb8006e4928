"""Hooks on DeepSpeed's PipelineEngine: its schedule, its instructions and its reading of data become CAD's.

In: an engine that DeepSpeed made. Out: a `PipelineBinding` on it. Everything is set on the one engine; DeepSpeed's
classes stay as they are.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.schedule import ForwardPass, InferenceSchedule

from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADError
from deepspeed_cad.exchange.failure.roll_call import together
from deepspeed_cad.integrations.deepspeed.block import find_config
from deepspeed_cad.integrations.deepspeed.monitor import write_statistics
from deepspeed_cad.integrations.pipeline import install_attention
from deepspeed_cad.integrations.recurrent import find_recurrent
from deepspeed_cad.pipeline.refusals import refuse_block, refuse_deepspeed, refuse_module, refuse_partitioned
from deepspeed_cad.pipeline.schedule import BackwardTicks, ForwardTicks, LockstepSchedule
from deepspeed_cad.pipeline.step import PipelineBinding
from deepspeed_cad.session import open_session
from deepspeed_cad.shares import Replica

logger = logging.getLogger("deepspeed_cad")


def initialize_pipeline(
    original: Callable[..., Any], config: CADConfig, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """Run `deepspeed.initialize` for a PipelineModule and turn CAD on for its engine.

    Raises CADConfigError and CADUnsupportedError for what CAD does not combine with, before DeepSpeed starts.
    """
    given = inspect.signature(original).bind_partial(*args, **kwargs).arguments
    refuse_block(config)
    refuse_deepspeed(find_config(original, args, kwargs))
    refuse_module(given["model"])
    with together():
        engine, optimizer, loader, scheduler = original(*args, **kwargs)
    binding = bind_pipeline(engine, config)
    logger.info("CAD is on for a pipeline: %s", binding.session.describe())
    return engine, optimizer, loader, scheduler


def bind_pipeline(engine: PipelineEngine, config: CADConfig) -> PipelineBinding:
    refuse_partitioned(engine)
    replica = find_replica(engine.module.topology(), engine.global_rank)
    session = open_session(config, torch.device(engine.device), replica)
    binding = PipelineBinding(engine, session)
    binding.check_modules(install_attention(engine.module, binding), len(find_recurrent(engine.module)))
    session.bindings[engine.module] = binding
    engine._train_schedule = lambda: LockstepSchedule(binding.rounds, engine.stage_id)
    engine._INSTRUCTION_MAP = {
        **engine._INSTRUCTION_MAP,
        ForwardTicks: _make_ticks(binding, PipelineEngine._exec_forward_pass, backward=False),
        BackwardTicks: _make_ticks(binding, PipelineEngine._exec_backward_pass, backward=True),
        ForwardPass: _make_alone(binding),
    }
    engine._next_batch = binding.next_batch
    # Micro-batches differ in length; shapes travel ahead of activations.
    engine.dynamic_shape = engine.module.dynamic_shape = True
    engine.train_batch = _make_train_batch(binding, engine.train_batch)
    engine.eval_batch = _make_eval_batch(binding, engine.eval_batch)
    return binding


def find_replica(topology: Any, rank: int) -> Replica | None:
    """The ranks that divide the heads of this one's stage and micro-batches; None: it has all of them."""
    if "model" not in topology.get_axis_names() or topology.get_dim("model") == 1:
        return None
    place = topology.get_coord(rank)
    return Replica(tuple(topology.filter_match(pipe=place.pipe, data=place.data)))


def _make_ticks(binding: PipelineBinding, run: Callable[..., None], backward: bool) -> Callable[..., None]:
    def ticks(engine: PipelineEngine, buffer_id: int, round_: int, micro_batch: int | None) -> None:
        binding.run_ticks(round_, micro_batch, backward, lambda: run(engine, buffer_id))

    return ticks


def _make_alone(binding: PipelineBinding) -> Callable[..., None]:
    def forward(engine: PipelineEngine, buffer_id: int) -> None:
        binding.run_alone(lambda: PipelineEngine._exec_forward_pass(engine, buffer_id))

    return forward


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
        try:
            binding.begin_step(look)
        except StopIteration:
            raise
        except BaseException as error:
            binding.stop(error)
            raise
        try:
            loss = original()
            binding.end_step()
        except BaseException as error:
            binding.stop(error)
            raise
        write_statistics(engine, binding.session)
        return loss

    return train_batch


def _make_eval_batch(binding: PipelineBinding, original: Callable[..., Any]) -> Callable[..., Any]:
    engine = binding.engine

    @wraps(original)
    def eval_batch(data_iter: Any, *args: Any, num_micro_batches: int | None = None, **kwargs: Any) -> Any:
        before = engine.data_iterator
        engine.set_dataiterator(data_iter)
        try:
            binding.begin_evaluation(num_micro_batches or engine.micro_batches)
        except (StopIteration, CADError):
            # Every rank has it, or was told.
            raise
        except BaseException as error:
            binding.stop(error)
            raise
        finally:
            engine.set_dataiterator(before)
        try:
            return original(data_iter, *args, num_micro_batches=num_micro_batches, **kwargs)
        except BaseException as error:
            binding.stop(error)
            raise

    return eval_batch
