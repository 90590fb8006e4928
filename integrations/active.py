"""What was asked for must happen: stops a run whose first optimizer step finds CAD not active, and says why.

In: a request for CAD (a launcher, a plugin). Out: nothing, one error, or one warning where CAD is active and of no use.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADConfigError, CADError
from deepspeed_cad.session import Session, apply, current_session

logger = logging.getLogger("deepspeed_cad")

_ENOUGH = 16
"""Micro-batches after which a run that never packs is told so."""


class ActivationCheck:
    """Watches optimizer steps until it is settled whether CAD is active and has something to balance."""

    def __init__(self, asked_by: str) -> None:
        self.asked_by = asked_by
        self._active = False
        self._handle = register_optimizer_step_pre_hook(self._before_step)

    def close(self) -> None:
        """Stop watching."""
        self._handle.remove()

    @property
    def was_active(self) -> bool:
        """Whether a micro-batch was trained with CAD before some optimizer step."""
        return self._active

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        session = current_session()
        if session is None or not session.statistics.micro_batches:
            self.close()
            if self._active:  # a session that has ended since
                return
            raise CADError(
                f"CAD was asked for ({self.asked_by}) but is not active at the first optimizer step: {_why(session)}. "
                "Training stops here, because it would go on without CAD"
            )
        self._active = True
        if session.ranks == 1:
            logger.warning("deepspeed_cad: CAD is on, but there is one process only: there is nothing to balance")
            self.close()
        elif session.statistics.micro_batches >= _ENOUGH:
            _warn_unpacked(session)
            self.close()


def _why(session: Session | None) -> str:
    if session is not None:
        return (
            "it is on for a model that no micro-batch was trained with so far. Another model is trained, or the model "
            "is in eval mode while it trains"
        )
    if not dist.is_initialized() and torch.cuda.device_count() > 1:
        return "torch.distributed is not initialised; start the script with accelerate launch, torchrun or deepspeed"
    return (
        "no transformers model with causal attention was passed to Accelerator.prepare or deepspeed.initialize, or ran "
        "a training forward. Call deepspeed_cad.apply(model) in the script, or take CAD out"
    )


def _warn_unpacked(session: Session) -> None:
    statistics = session.statistics
    if session.rank == 0 and statistics.imbalance_before < 1.02:
        logger.warning(
            "deepspeed_cad: CAD is on and has nothing to balance: in %d micro-batches the slowest rank had %.3f times "
            "the mean attention. Rows are not packed (give position_ids that start again at each document; "
            "packing=True in TRL), or all documents are equally long: CAD gains nothing here",
            statistics.micro_batches, statistics.imbalance_before,
        )  # fmt: skip


def agree(first: CADConfig, first_source: str, second: CADConfig, second_source: str) -> None:
    """Raise CADConfigError, naming the keys, where two sources ask for different things."""
    ours, theirs = first.to_dict(), second.to_dict()
    different = [f"{key}: {ours[key]!r} and {theirs[key]!r}" for key in ours if ours[key] != theirs[key]]
    if different:
        raise CADConfigError(
            f"CAD is configured twice, differently: {first_source} and {second_source} disagree in "
            f"{'; '.join(different)}. Configure it in one place"
        )


def short_block(config: CADConfig) -> dict[str, Any]:
    """The "cad" block without defaults: Accelerate and the HF Trainer reject an "auto" that they do not know."""
    default = CADConfig().to_dict()
    return {key: value for key, value in config.to_dict().items() if value != default[key]}


def bind_at_first_forward(config: CADConfig) -> None:
    """Turn CAD on for the first model of transformers that runs a training forward, unless one is bound before.

    For loops of plain torch, where nothing announces which model is trained; DDP and FSDP may have wrapped it.
    """
    from transformers import PreTrainedModel

    def before_forward(module: torch.nn.Module, args: Any) -> None:
        if current_session() is not None:
            handle.remove()
            return
        model = getattr(module, "_orig_mod", module)
        waits_for_group = not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1
        if isinstance(model, PreTrainedModel) and model.training and torch.is_grad_enabled() and not waits_for_group:
            handle.remove()
            apply(model, config)

    handle = register_module_forward_pre_hook(before_forward)
