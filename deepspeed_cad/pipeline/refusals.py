"""What of a pipeline CAD does not combine with: one error at start that says what to change.

In: the "cad" block, the DeepSpeed config, the PipelineModule. Out: nothing, or the error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADConfigError, CADUnsupportedError


def refuse_block(config: CADConfig) -> None:
    """Raise CADConfigError for keys that mean nothing in a pipeline."""
    for key, wrong, why in (
        ("recompute_attention", True, "attention of a stage meets the others only in the ticks of its own forward"),
        ("overlap", "interleave", "the tasks of other stages hide exchanges instead"),
        ("documents", "deal", "the loss of a pipeline is the mean over micro-batches, so they stay as they are"),
    ):
        if getattr(config, key) == wrong:
            raise CADConfigError(f'"cad": "{key}" is {wrong!r}, which a pipeline cannot have: {why}. Leave it out')
    if config.servers != "all":
        raise CADConfigError(
            f'"cad": "servers" is {config.servers!r}, which is not built for pipelines: idle stages serve. Leave it out'
        )
    if config.verify:
        raise CADConfigError(
            f'"cad": "verify" is {config.verify}, but a stage of a pipeline cannot run without the others; set it to '
            "0. eval_batch attends on each rank alone: its loss of a batch is the one to compare with"
        )


def refuse_deepspeed(config: Mapping[str, Any]) -> None:
    """Raise CADUnsupportedError for ZeRO stages that DeepSpeed itself does not combine with pipelines."""
    stage = (config.get("zero_optimization") or {}).get("stage", 0)
    if isinstance(stage, int) and stage > 1:
        raise CADUnsupportedError(
            f'"zero_optimization": stage {stage} with a PipelineModule: DeepSpeed reduces gradients of ZeRO-2 and '
            "-3 in every backward, which pipelines do not allow. Set the stage to 0 or 1"
        )


def refuse_module(module: Any) -> None:
    """Raise CADUnsupportedError for pipelines of another kind, and for stages without a layer."""
    names = [cls.__name__ for cls in type(module).__mro__]
    if "DualPipeVModule" in names:
        raise CADUnsupportedError(
            f"{names[0]} interleaves two stages on every rank; CAD's rounds need one stage per rank. Use PipelineModule"
        )
    topology = module.topology()
    known = ("pipe", "data", "model")
    more = [axis for axis in topology.get_axis_names() if axis not in known and topology.get_dim(axis) > 1]
    if more:
        raise CADUnsupportedError(
            f'the topology of the pipeline has the axis "{more[0]}" of {topology.get_dim(more[0])} ranks; CAD combines '
            "pipe, data, model only. Take the other out: attention is spread over all ranks anyway"
        )
    parts = list(module.parts)
    empty = [stage for stage, (begin, end) in enumerate(zip(parts, parts[1:])) if begin == end]
    if empty:
        raise CADUnsupportedError(
            f"stage {empty[0]} of {len(parts) - 1} holds no layer: a pipeline of {parts[-1]} layers needs fewer "
            "stages, or another partition_method"
        )


def refuse_partitioned(engine: Any) -> None:
    """Raise CADUnsupportedError where ranks of a model axis send parts of activations: DeepSpeed makes these for the
    shape of the first micro-batch, and with CAD micro-batches differ in length."""
    for key in ("pipe_partitioned", "grad_partitioned"):
        if getattr(engine, f"is_{key}", False):
            raise CADUnsupportedError(
                f'"pipeline": "{key}" is on, by default beside a "model" axis, and takes micro-batches of one '
                'length only. Add "pipeline": {"pipe_partitioned": false, "grad_partitioned": false} to the JSON'
            )
