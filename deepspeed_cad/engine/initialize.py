"""What happens inside `deepspeed.initialize` when its JSON has a "cad" block.

In: the original function, the block, and the call's arguments. Out: DeepSpeed's own tuple, with CAD on the model.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch

from deepspeed_cad.ahead.loader import LookAheadLoader
from deepspeed_cad.config import CADConfig
from deepspeed_cad.engine.block import find_config
from deepspeed_cad.engine.monitor import report_statistics
from deepspeed_cad.errors import CADUnsupportedError
from deepspeed_cad.exchange.failure.roll_call import together
from deepspeed_cad.version import refuse_old_packages

logger = logging.getLogger("deepspeed_cad")


def initialize(
    original: Callable[..., Any], cad_block: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """Run `deepspeed.initialize` and turn CAD on for its model.

    Raises CADConfigError for a bad block and CADUnsupportedError for a model or engine feature that CAD cannot
    reproduce exactly, before DeepSpeed starts where that is possible.
    """
    config = CADConfig.from_dict(cad_block)
    if not config.enabled:
        return tuple(original(*args, **kwargs))
    refuse_old_packages()
    from deepspeed_cad.integrations.models import refuse_model
    from deepspeed_cad.integrations.recurrent import keep_whole
    from deepspeed_cad.integrations.structure import find_model
    from deepspeed_cad.integrations.transformers import bind

    given = inspect.signature(original).bind_partial(*args, **kwargs).arguments
    model = given.get("model")
    if is_pipeline(model):
        from deepspeed_cad.pipeline.engine import initialize_pipeline

        return initialize_pipeline(original, config, args, kwargs)
    _refuse_call(given)
    trains = given.get("optimizer") is not None or "optimizer" in find_config(original, args, kwargs)
    if trains and isinstance(model, torch.nn.Module):
        refuse_model(find_model(model))
        keep_whole(model)
    with together():
        engine, optimizer, loader, scheduler = original(*args, **kwargs)
    _refuse_engine(engine)
    if not trains:
        _bind_when_trained(engine, config)
        return engine, optimizer, loader, scheduler
    binding = bind(engine.module, config)
    # Where documents are exchanged, the script must wrap the loader itself and state how its loss is normalised.
    if config.look_ahead and config.documents != "exchange" and engine.training_dataloader is not None:
        engine.training_dataloader = loader = LookAheadLoader(
            engine.training_dataloader, binding.feed, engine.gradient_accumulation_steps(), lambda: engine.micro_steps
        )
    report_statistics(engine, binding.session)
    logger.info("CAD is on: %s", binding.session.describe())
    return engine, optimizer, loader, scheduler


def _bind_when_trained(engine: Any, config: CADConfig) -> None:
    """For an engine without an optimizer, such as the reference model that TRL gives the JSON of the policy: it keeps
    its attention, unless it runs a training forward all the same."""
    from deepspeed_cad.integrations.transformers import bind

    def before_forward(module: torch.nn.Module, args: Any) -> None:
        if module.training and torch.is_grad_enabled():
            handle.remove()
            binding = bind(module, config)
            logger.info("CAD is on for an engine without an optimizer: %s", binding.session.describe())

    handle = engine.module.register_forward_pre_hook(before_forward)


def is_pipeline(model: Any) -> bool:
    """Whether a model is cut into stages by DeepSpeed."""
    return any(cls.__name__ == "PipelineModule" for cls in type(model).__mro__)


def _refuse_call(given: dict[str, Any]) -> None:
    """Parallelism that CAD does not combine with yet."""
    if given.get("mpu") is not None:
        raise CADUnsupportedError(
            "an mpu was passed to deepspeed.initialize: tensor or pipeline parallelism, or Ulysses sequence "
            "parallelism (sp_size in a ParallelismConfig, UlyssesSPAttentionHF). CAD spreads attention over all "
            'data-parallel ranks by itself. Train without it, or take the "cad" block out'
        )


def _refuse_engine(engine: Any) -> None:
    if getattr(engine, "sequence_parallel_size", 1) > 1:
        raise CADUnsupportedError(
            "Ulysses sequence parallelism is on beside CAD; CAD lets documents span ranks by itself "
            '(deepspeed_cad.shard_stream). Remove "sequence_parallel_size" or the "cad" block'
        )
    if engine.autotp_size() > 1:
        raise CADUnsupportedError('tensor parallelism ("autotp_size") is on beside CAD; that is not supported yet')
