"""The Hugging Face Trainer: its steps are arranged and announced ahead, and its log shows CAD's statistics.

Its class is wrapped once per process, so that trainers that derive from it are served too. Inside a step all ranks run
the same forwards, and in an evaluation in which they have as many batches: those without backward are balanced.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import ModuleType
from typing import TYPE_CHECKING, Any

from deepspeed_cad.integrations.forward_only import in_step, within, wrap_once
from deepspeed_cad.integrations.models import find_model
from deepspeed_cad.integrations.prepared import PreparedIterator, refuse_accelerator, refuse_loader

from deepspeed_cad.ahead.feed import Feed
from deepspeed_cad.ahead.loader import Source
from deepspeed_cad.ahead.step import Due, StepAhead, settle, settle_together
from deepspeed_cad.errors import CADUnsupportedError
from deepspeed_cad.session import find_binding

if TYPE_CHECKING:
    from deepspeed_cad.integrations.transformers import Binding

NOT_WRAPPED = (
    "the Trainer did not wrap the model in DDP, so gradients of ranks are not added up. That happens after "
    "evaluate() before train(): evaluate when training has ended, or set eval_on_start=True"
)
_AHEAD = "_deepspeed_cad_ahead"
"""Attribute of a trainer: the `_AheadIterator` of the epoch that it trains."""


def install_trainer_hooks(module: ModuleType) -> None:
    """Wrap the Trainer of the module `transformers.trainer`. Idempotent; called when a model is bound."""
    wrap_once(module.Trainer, "get_batch_samples", _get_batch_samples)
    wrap_once(module.Trainer, "training_step", _training_step)
    wrap_once(module.Trainer, "evaluation_loop", _evaluation_loop)
    wrap_once(module.Trainer, "log", _log)


class _AheadIterator(Iterator[Any]):
    """The batches of an epoch; a step that was read ahead is given out next."""

    def __init__(self, source: Iterator[Any], feed: Feed, accumulation: int) -> None:
        self.source = source
        # A prepared loader of Accelerate announces what it gives; here that is done by the step.
        loader, batches = (source.loader, source.plain) if isinstance(source, PreparedIterator) else (source, source)
        self._batches = Source(loader, batches)
        self.steps = StepAhead(feed, accumulation)
        self._buffer: deque[Any] = deque()
        self._due: Due | None = None
        self._count = 0
        self.began: tuple[bool, bool] | None = None
        """See `settle_together`."""

    def __next__(self) -> Any:
        self._buffer.extend([] if self._buffer else self._take(1))
        if not self._buffer:
            self._batches.finish()
            raise StopIteration
        batch = self._buffer.popleft()
        self._batches.given_out(last=not self._buffer)
        return batch

    def _take(self, count: int) -> list[Any]:
        known, taken = self._batches.error, self._batches.take(count)
        if self._batches.error is not known:
            self._batches.tell_of_error(self.steps.feed)
        return taken

    def read_ahead(self, count: int) -> None:
        """Read the next step, up to `count` batches, and begin to arrange it. An error of the loader is raised when its
        batch is due."""
        self._buffer.extend(self._take(count))
        # What is read ahead is not trained yet: metrics leave out what the last batch has twice.
        self._batches.given_out(last=not self._buffer)
        if self._batches.error is not None:
            return
        self._due, self._count = self.steps.submit([*self._buffer], len(self._buffer) < count), len(self._buffer)

    def arrange(self, samples: list[Any]) -> list[Any]:
        """The batches of a step as they are trained. Raises CADUnsupportedError if a part of a step was asked for."""
        due, self._due = self._due, None
        if due is None:
            due = self.steps.submit(samples)
            assert due is not None
        elif self._count != len(samples):
            raise CADUnsupportedError(
                f"the Trainer took {len(samples)} micro-batches for a step where it took {self._count} for the "
                'one before, and more were there; set "look_ahead": 0'
            )
        return due()


def _get_batch_samples(
    original: Callable[..., Any], self: Any, epoch_iterator: Iterator[Any], *args: Any, **kwargs: Any
) -> Any:
    if (binding := _binding_of(self)) is None:
        return original(self, epoch_iterator, *args, **kwargs)
    ahead = self.__dict__.get(_AHEAD)
    new = ahead is None or ahead.source is not epoch_iterator
    if new:
        refuse_accelerator(self.accelerator)
        refuse_loader(self.callback_handler.train_dataloader)
        if binding.session.ranks == binding.session.group_ranks > 1 and self.model_wrapped is self.model:
            if self.accelerator.distributed_type.name.startswith("MULTI_"):
                raise CADUnsupportedError(NOT_WRAPPED)
    if not binding.session.config.look_ahead:
        return original(self, epoch_iterator, *args, **kwargs)
    if new:
        ahead = self.__dict__[_AHEAD] = _AheadIterator(
            epoch_iterator, binding.feed, self.args.gradient_accumulation_steps
        )
        binding.feed.begin_epoch()
    samples, count = original(self, ahead, *args, **kwargs)
    if not samples:
        return samples, count
    # Each time: a callback may have changed the model, which counts from the next step on.
    settle(binding.feed, self.model, unknown := unknown_loss(self), wrong_loss(self, count))
    # A loss of its own may look at the micro-batches of other ranks, as KTO's does.
    binding.feed.orders &= not unknown
    ahead.began = settle_together(binding.feed, ahead.began)
    # Targets are counted before documents change ranks; their number over all ranks stays the same.
    samples = ahead.arrange(samples)
    if _may_read_ahead(self):
        ahead.read_ahead(len(samples))
    return samples, count


def _training_step(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    with nullcontext() if _binding_of(self) is None else within(in_step):
        return original(self, *args, **kwargs)


def _evaluation_loop(original: Callable[..., Any], self: Any, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
    from transformers.trainer_utils import has_length  # brings much, and the Trainer has it

    binding = _binding_of(self)
    count = len(dataloader) if has_length(dataloader) else None
    # All ranks are here: the Trainer gathers their losses.
    together = binding is not None and binding.session.group_ranks > 1 and binding.feed.same_length(count)
    with within(in_step) if together else nullcontext():
        return original(self, dataloader, *args, **kwargs)


def wrong_loss(trainer: Any, count: Any) -> str:
    """Why a Trainer's loss is not divided by the targets of all ranks; empty where it may be. `count`: the targets of a
    step, as the Trainer counted them."""
    if not getattr(trainer.args, "average_tokens_across_devices", False):
        return "average_tokens_across_devices is off, so each rank divides by its own tokens"
    if count is None:
        return (
            "the Trainer does not count the targets of a step (num_items_in_batch): the model takes no loss arguments, "
            "or batches have no labels"
        )
    if getattr(trainer, "aux_loss_enabled", False):  # TRL's, whatever the model's config says
        return "router_aux_loss_coef is set, and the router's auxiliary loss depends on which documents meet"
    if getattr(trainer.args, "label_smoothing_factor", 0):
        return "label_smoothing_factor is set: not every version of transformers divides that loss by all targets"
    return ""


OF_A_STEP = (
    "compute_loss", "compute_loss_func", "training_step", "get_batch_samples", "_get_num_items_in_batch",
    "_prepare_inputs",
)  # fmt: skip
"""What of a Trainer decides by what a loss is divided, and over what it is taken."""
KNOWN = re.compile(
    r"(transformers|liger_kernel|torch|peft|accelerate|deepspeed|deepspeed_cad|fla|mamba_ssm|flash_attn)\."
    r"|bitsandbytes\.(?!.*8bit)"
)
"""Who divides losses by what the Trainer says, the targets of all ranks, or leaves them as they are, and gives a token
what it would beside other documents. Numbers of 8 bits have a scale that all tokens of a micro-batch share."""


def unknown_loss(trainer: Any) -> str:
    """Why nobody knows that a Trainer gives the same where documents change ranks; empty where it is known."""
    decide = [(name, getattr(trainer, name)) for name in OF_A_STEP if getattr(trainer, name, None) is not None]
    decide.append(("loss_function", find_model(trainer.model).loss_function))
    hooks: list[Any] = []
    forwards: dict[int, Any] = {}
    for module in trainer.model.modules():
        # Not of the class: a method may be replaced, on it or on the object.
        forward = module.forward
        forwards[id(getattr(forward, "__func__", forward))] = forward
        hooks += [module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks]
        for one in (one for one in module._parameters.values() if one is not None):
            hooks += [one._backward_hooks or {}, getattr(one, "_post_accumulate_grad_hooks", None) or {}]
    decide += [("forward", forward) for forward in forwards.values()]
    decide += [("a hook", hook) for of in hooks for hook in of.values()]
    for name, given in decide:
        if whose := _find_stranger(name, given):
            return f"{whose} is not transformers' own: losses may be others where documents change ranks"
    if getattr(trainer.args, "neftune_noise_alpha", None):
        return "neftune_noise_alpha puts noise on tokens"
    return ""


def _find_stranger(name: str, run: Any) -> str:
    """The first function behind `run`, of all that wrap each other, that nobody knows; empty where all are known."""
    while run is not None:
        of_partial = getattr(run, "func", run)
        # functools.wraps copies names, but not where a function was written.
        where = getattr(getattr(of_partial, "__func__", of_partial), "__globals__", {}).get("__name__")
        place = str(where or getattr(of_partial, "__module__", ""))
        owner = str(getattr(of_partial, "__qualname__", ""))
        of_trl = place.startswith("trl.") and (owner.startswith("SFTTrainer.") or name in ("forward", "a hook"))
        if not of_trl and not KNOWN.match(f"{place}.{owner}"):
            return owner or name
        run = getattr(run, "__wrapped__", None) or getattr(of_partial, "__wrapped__", None)
    return ""


def _may_read_ahead(trainer: Any) -> bool:
    """Whether another step follows, and the loader's state that checkpoints hold does not count what it gave out."""
    if getattr(getattr(trainer.accelerator, "dataloader_config", None), "use_stateful_dataloader", False):
        return False
    return bool(trainer.state.global_step + 1 < trainer.state.max_steps)


def _log(original: Callable[..., Any], self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
    # Evaluation has other keys.
    if "train_runtime" in logs:  # the end of training: the loader's workers end with who holds it
        self.__dict__.pop(_AHEAD, None)
    binding = _binding_of(self) if "loss" in logs else None
    if binding is not None:
        logs.update(binding.session.take_statistics("trainer").as_events())
    return original(self, logs, *args, **kwargs)


def _binding_of(trainer: Any) -> Binding | None:
    model = getattr(trainer, "model", None)
    return None if model is None else find_binding(model)
