"""What was asked for must happen: stops a run whose optimizer step finds CAD not active, and says why.

In: a request for CAD (a launcher, a plugin). Out: nothing, one error, or one warning where CAD is active and of no use.
A request for a whole process also ends as a problem that the process must not leave with exit code 0: see
`deepspeed_cad.launch.armed`.
"""

import logging
import os
import sys
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from deepspeed_cad.integrations.forward_only import generating, install_generation_hooks, install_worker_hooks
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from _deepspeed_cad_waiter import when_imported
from deepspeed_cad.api import apply
from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADError
from deepspeed_cad.request import agree
from deepspeed_cad.session import Session, current_session, processes

logger = logging.getLogger("deepspeed_cad")

_ENOUGH = 16
"""Micro-batches after which a run that never packs is told so."""


class ActivationCheck:
    """Watches optimizer steps until it is settled whether CAD is active and has something to balance."""

    def __init__(self, asked_by: str) -> None:
        self.asked_by = asked_by
        self.kept = ""
        """Why a model that ran has no CAD."""
        self.was_active = False
        """A micro-batch was trained with CAD before some optimizer step."""
        self._handle = register_optimizer_step_pre_hook(self._before_step)

    def close(self) -> None:
        self._handle.remove()

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Looks; where forward and backward run in a closure (Lightning, LBFGS), behind that. Gives torch the arguments
        of the step, if these change."""
        closure = args[1] if args[1:] else kwargs.get("closure")
        if not callable(closure):
            return self._look(optimizer)

        def run() -> Any:
            loss = closure()
            self._look(optimizer)
            return loss

        return ((args[0], run, *args[2:]), kwargs) if args[1:] else (args, {**kwargs, "closure": run})

    def _look(self, optimizer: Any) -> None:
        if (session := current_session()) is None or not session.statistics.micro_batches:
            if self.was_active:  # a session that has ended since
                self.close()
            elif _trains(optimizer):
                self._refuse(
                    f"CAD was asked for ({self.asked_by}) but is not active at the first optimizer step: "
                    f"{self.kept or _why(session)}. Training stops here, because it would go on without CAD"
                )
            return
        self.was_active = True
        if session.group_ranks == 1:
            if session.ranks == 1:  # else the line that says how heads are divided says it
                logger.warning("deepspeed_cad: CAD is on, but there is one process only: there is nothing to balance")
            self.close()
        elif session.statistics.micro_batches >= _ENOUGH:
            _warn_unpacked(session)
            self.close()

    def _refuse(self, reason: str) -> None:
        self.close()  # the next Accelerator of this process may do without CAD
        raise CADError(reason)


class ProcessCheck(ActivationCheck):
    """The check for a whole process that was asked to train with CAD, and CAD for the models that it trains.

    Every step without CAD is refused, also where the script catches the first error; `problem` is what a process that
    trained without CAD must end with. For loops of plain torch, where nothing announces which models are trained, CAD
    is turned on at the first training forward of each model of transformers, however late, and with `"forward_only":
    "balanced"` at its first forward, unless that is part of `generate`. Where CAD is on without this, nothing is
    turned on."""

    def __init__(self, asked_by: str, config: CADConfig) -> None:
        super().__init__(asked_by)
        self.config = config
        self._refused = ""
        self._forwards_without = 0
        self._opened: Session | None = None
        """The session that began with a model for which CAD was turned on here."""
        self._known: WeakSet[torch.nn.Module] = WeakSet()
        """Models of which it is settled whether they have CAD, and models of transformers inside them."""
        self._forward_handle = register_module_forward_pre_hook(self._before_forward)
        when_imported("transformers.generation.utils", install_generation_hooks)
        when_imported("openrlhf.trainer.ray.launcher", install_worker_hooks)
        # A process that is forked from this one trains, or not, for itself.
        os.register_at_fork(after_in_child=lambda: self.__dict__.update(_refused="", _forwards_without=0, kept=""))

    def problem(self) -> str:
        """Why this process must not end with exit code 0; empty where it trained with CAD, or not at all."""
        if self._refused:
            return self._refused
        session = current_session()
        if self.was_active or not self._forwards_without or (session is not None and session.statistics.micro_batches):
            return ""
        return (
            f"CAD was asked for ({self.asked_by}), and this process ran {self._forwards_without} training forwards of "
            f"a transformers model without it: {self.kept or _why(session)}"
        )

    def _refuse(self, reason: str) -> None:
        self._refused = reason
        raise CADError(reason)

    def _before_forward(self, module: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        host = sys.modules.get("transformers.modeling_utils")  # a process without it trains no model of transformers
        model = module._modules.get("_orig_mod", module)  # torch.compile
        if host is None or not isinstance(model, host.PreTrainedModel):
            return
        if (session := current_session()) is not None and session is not self._opened:
            self._forward_handle.remove()
            return
        if model in self._known:
            return
        trained = model.training and torch.is_grad_enabled()
        if not trained and (self.config.forward_only != "balanced" or generating.get()):
            return
        if processes() > 1 and not dist.is_initialized():
            self._forwards_without += trained
            return
        parts = [one for one in model.modules() if isinstance(one, host.PreTrainedModel)]
        known = any(one in self._known for one in parts)
        self._known.update(parts)
        from deepspeed_cad.integrations.models import why_kept

        if not known and (why := why_kept(model)):
            # A vision tower, perhaps: another model may be the one that is meant.
            self._forwards_without, self.kept = self._forwards_without + trained, self.kept or why
        elif not known:
            apply(model, self.config)
            self._opened = current_session()


def _trains(optimizer: Any) -> bool:
    """Whether a step is one of training: torch.distributed.checkpoint and DeepSpeed make an optimizer's state by a step
    in which all gradients are 0. One without any may have them elsewhere."""
    gradients = [one.grad for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
    return not gradients or any(bool(getattr(one, "_local_tensor", one).any()) for one in gradients)


def _why(session: Session | None) -> str:
    if session is not None:
        return (
            "it is on for a model that no micro-batch was trained with so far. Another model is trained, or the model "
            "is in eval mode while it trains"
        )
    if not dist.is_initialized() and max(processes(), torch.cuda.device_count()) > 1:
        return "torch.distributed is not initialised: the script must do it, under accelerate, torchrun or deepspeed"
    return (
        "no transformers model with causal attention was passed to Accelerator.prepare or deepspeed.initialize, or ran "
        "a training forward. Call deepspeed_cad.apply(model) in the script, or take CAD out"
    )


def _warn_unpacked(session: Session) -> None:
    statistics = session.statistics
    # Documents that are dealt out leave little to balance: that is what CAD gains.
    if session.rank == 0 and statistics.imbalance_before < 1.02 and not any(feed.deals for feed in session.feeds):
        logger.warning(
            "deepspeed_cad: CAD is on and has nothing to balance: in %d micro-batches the slowest rank had %.3f times "
            "the mean attention. Rows are not packed (give position_ids that start again at each document; "
            "packing=True in TRL), or all documents are equally long: CAD gains nothing here",
            statistics.micro_batches, statistics.imbalance_before,
        )  # fmt: skip


def give_deepspeed(json: dict[str, Any], config: CADConfig, asked_by: str) -> None:
    """Put the "cad" block into DeepSpeed's JSON, from which `deepspeed.initialize` turns CAD on. Raises CADConfigError
    where it has another one."""
    if "cad" in json:
        agree(config, asked_by, CADConfig.from_dict(json["cad"]), 'the "cad" block of the DeepSpeed JSON')
    # Without defaults: Accelerate and the HF Trainer reject an "auto" that they do not know.
    default = CADConfig().to_dict()
    json["cad"] = {key: value for key, value in config.to_dict().items() if value != default[key]}
