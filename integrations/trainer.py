"""The Hugging Face Trainer: its micro-batches are announced a step ahead, and its log shows CAD's statistics.

In: the class `transformers.Trainer`, wrapped once per process at class level, so that TRL's and other trainers that
derive from it are served too. A trainer whose model is not bound, and evaluation, go straight through.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from functools import wraps
from types import ModuleType
from typing import Any

from deepspeed_cad.integrations.transformers import Binding, find_binding

from deepspeed_cad.lookahead import announce

logger = logging.getLogger("deepspeed_cad")

_MARK = "__deepspeed_cad__"
_AHEAD = "_deepspeed_cad_ahead"
"""Attribute of a trainer: the `_AheadIterator` of the epoch that it trains."""


def install_trainer_hooks(module: ModuleType) -> None:
    """Wrap the Trainer of the module `transformers.trainer`. Idempotent; called when a model is bound."""
    _wrap(module.Trainer, "get_batch_samples", _wrap_get_batch_samples)
    _wrap(module.Trainer, "log", _wrap_log)


def _wrap(owner: type, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = owner.__dict__.get(name)
    if original is None:
        logger.warning(
            "%s.%s has no %r: CAD plans each micro-batch when its forward starts, and its statistics are in "
            "deepspeed_cad.current_session().statistics only",
            owner.__module__, owner.__name__, name,
        )  # fmt: skip
    elif not hasattr(original, _MARK):
        wrapped = wraps(original)(wrap(original))
        setattr(wrapped, _MARK, True)
        setattr(owner, name, wrapped)


class _AheadIterator:
    """The batches of an epoch; one that was read ahead is given out next."""

    def __init__(self, source: Iterator[Any]) -> None:
        self.source = source
        self._buffer: deque[tuple[Any, bool]] = deque()
        self.announced = 0
        """Batches at the front of those just given out that were announced when they were read ahead."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._buffer:
            self.announced += 1
            return self._buffer.popleft()[0]
        return next(self.source)

    def read_ahead(self) -> tuple[bool, Any]:
        """Read one batch that is given out later: whether there is one, and the batch."""
        try:
            batch = next(self.source)
        except StopIteration:
            return False, None
        self._buffer.append((batch, True))
        return True, batch


def _wrap_get_batch_samples(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_batch_samples(self: Any, epoch_iterator: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        binding = _binding_of(self)
        if binding is None:
            return original(self, epoch_iterator, *args, **kwargs)
        ahead = self.__dict__.get(_AHEAD)
        new = ahead is None or ahead.source is not epoch_iterator
        if new:
            _refuse_trainer(self)
        if not binding.session.config.look_ahead:
            return original(self, epoch_iterator, *args, **kwargs)
        if new:
            ahead = self.__dict__[_AHEAD] = _AheadIterator(epoch_iterator)
            binding.feed.forget()
        ahead.announced = 0
        samples, count = original(self, ahead, *args, **kwargs)
        for batch in samples[ahead.announced :]:
            announce(binding.feed, batch)
        if not samples:
            self.__dict__.pop(_AHEAD)
        elif _may_read_ahead(self):
            found, batch = ahead.read_ahead()
            if found:
                announce(binding.feed, batch)
        return samples, count

    return get_batch_samples


def _refuse_trainer(trainer: Any) -> None:
    """Raise CADUnsupportedError for parallelism or loading that CAD does not combine with."""
    from deepspeed_cad.integrations.accelerate import refuse_accelerator, refuse_loader

    refuse_accelerator(trainer.accelerator)
    refuse_loader(trainer.callback_handler.train_dataloader)


def _may_read_ahead(trainer: Any) -> bool:
    """Whether another step follows, and the loader's state that checkpoints hold does not count what it gave out."""
    config = getattr(trainer.accelerator, "dataloader_config", None)
    if getattr(config, "use_stateful_dataloader", False):
        return False
    last = trainer.state.max_steps
    return bool(trainer.state.global_step + 1 < last)


def _wrap_log(original: Callable[..., Any]) -> Callable[..., Any]:
    def log(self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        # Only what the Trainer logs while it trains: evaluation and the final summary have other keys.
        if "loss" in logs:
            binding = _binding_of(self)
            if binding is not None and binding.session.config.monitor:
                logs.update(binding.session.take_statistics("trainer").as_events())
        return original(self, logs, *args, **kwargs)

    return log


def _binding_of(trainer: Any) -> Binding | None:
    model = getattr(trainer, "model", None)
    return None if model is None else find_binding(model)
