"""What happens inside `deepspeed.initialize` when its JSON has a "cad" block.

In: the original function, the block, and the call's arguments. Out: DeepSpeed's own tuple, with CAD on the model.
"""

import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed_cad.integrations.deepspeed.block import find_config, report_statistics

from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADUnsupportedError
from deepspeed_cad.exchange.failure.roll_call import together
from deepspeed_cad.session import current_session
from deepspeed_cad.shares import TWICE, Replica
from deepspeed_cad.version import refuse_old_packages

logger = logging.getLogger("deepspeed_cad")


def initialize(
    original: Callable[..., Any], cad_block: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """Run `deepspeed.initialize` and turn CAD on for its model. Raises CADConfigError for a bad block and
    CADUnsupportedError for a model or engine feature that CAD cannot reproduce exactly, before DeepSpeed starts where
    that is possible."""
    config = CADConfig.from_dict(cad_block)
    refuse_old_packages()
    from deepspeed_cad.integrations.models import find_model, refuse_model
    from deepspeed_cad.integrations.recurrent import keep_whole
    from deepspeed_cad.integrations.transformers import bind

    given = inspect.signature(original).bind_partial(*args, **kwargs).arguments
    model = given.get("model")
    if any(cls.__name__ == "PipelineModule" for cls in type(model).__mro__):
        from deepspeed_cad.pipeline.engine import initialize_pipeline

        return initialize_pipeline(original, config, args, kwargs)
    trains = given.get("optimizer") is not None or "optimizer" in find_config(original, args, kwargs)
    if trains and isinstance(model, torch.nn.Module):
        refuse_model(find_model(model))
        keep_whole(model)
    with together():
        engine, optimizer, loader, scheduler = original(*args, **kwargs)
    replica = find_replica(engine)
    if not trains:
        _bind_when_run(engine, config, replica)
        return engine, optimizer, loader, scheduler
    binding = bind(engine.module, config, replica)
    if config.look_ahead and engine.training_dataloader is not None:
        engine.training_dataloader = loader = binding.session.look_ahead(engine.training_dataloader, engine)
    report_statistics(engine, binding.session)
    logger.info("CAD is on: %s", binding.session.describe())
    return engine, optimizer, loader, scheduler


def _bind_when_run(engine: Any, config: CADConfig, replica: Replica | None) -> None:
    """For an engine without an optimizer, such as the reference model that TRL gives the JSON of the policy: it keeps
    its attention, unless it runs a training forward all the same, or forwards without backward are balanced and its
    process trains nothing (a worker for references or rewards)."""
    from deepspeed_cad.integrations.models import find_model, why_kept
    from deepspeed_cad.integrations.transformers import bind

    def before_forward(module: torch.nn.Module, args: Any) -> None:
        trained = module.training and torch.is_grad_enabled()
        if trained or (config.forward_only == "balanced" and current_session() is None):
            handle.remove()
            if not trained and why_kept(find_model(module)):
                return
            binding = bind(module, config, replica)
            logger.info("CAD is on for an engine without an optimizer: %s", binding.session.describe())

    handle = engine.module.register_forward_pre_hook(before_forward)


def find_replica(engine: Any) -> Replica | None:
    """The ranks with which this one divides the heads of an engine's model; None: it has all of them. Raises
    CADUnsupportedError for an mpu with pipelines, and for tensor and sequence parallelism together."""
    from deepspeed.utils import groups

    mpu = None if engine.mpu is groups else engine.mpu
    if _size(mpu, "pipeline") > 1:
        raise CADUnsupportedError(
            "the mpu that deepspeed.initialize was given has pipeline stages: with CAD pipelines are PipelineModules"
        )
    pieces = int(getattr(engine, "sequence_parallel_size", 1))
    tensor = max(engine.autotp_size(), _size(mpu, "tensor_model"), _size(mpu, "model") if pieces == 1 else 1)
    if pieces > 1 and tensor > 1:
        raise CADUnsupportedError(TWICE)
    if pieces > 1:
        return Replica(tuple(dist.get_process_group_ranks(engine.seq_parallel_group)), pieces=True)
    if tensor > 1:
        # What Megatron calls a model-parallel group is the same where there are no stages.
        owner: Any = groups if mpu is None else mpu
        name = "tensor_model" if hasattr(owner, "get_tensor_model_parallel_group") else "model"
        return Replica(tuple(dist.get_process_group_ranks(getattr(owner, f"get_{name}_parallel_group")())))
    return None


def _size(mpu: Any, kind: str) -> int:
    """Ranks of a group of Megatron's model parallel unit; 1 where it has none of the kind."""
    # Megatron-LM and DeepSpeed have both names for stages.
    names = [f"get_{kind}_parallel_world_size", f"get_{kind}_model_parallel_world_size"]
    return max([int(getattr(mpu, name)()) for name in names if hasattr(mpu, name)], default=1)
