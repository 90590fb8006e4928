"""Forwards without backward: which of them all ranks run together, and which this rank runs alone.

All ranks run them together with `"forward_only": "balanced"`, and by themselves where all ranks are known to run as
many: inside a step or an evaluation of the Hugging Face Trainer, and for batches of a prepared loader of Accelerate
that gives every rank as many. Generation is never shared: answers differ in length, or only one rank generates.

A rank that ran out of batches attends for the others with a model that it calls by itself, so it is also known here
through which wrapper FSDP1 gathers parameters of a model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from types import ModuleType
from typing import Any

import torch

from deepspeed_cad.session import Session

_MARK = "__deepspeed_cad__"

_in_step: ContextVar[bool] = ContextVar("deepspeed_cad_in_step", default=False)
"""All ranks run the same forwards now."""
_generates: ContextVar[bool] = ContextVar("deepspeed_cad_generates", default=False)
_roots: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""Outermost wrappers of FSDP1 that ran."""
_even_batch: ContextVar[weakref.ref[torch.Tensor] | None] = ContextVar("deepspeed_cad_even_batch", default=None)
"""Token ids that every rank's loader gave out last, if it is known to give every rank as many batches."""


def are_shared(session: Session, given: Mapping[str, Any]) -> bool:
    """Whether a forward without backward that is given this, and no cache, is run by all ranks together."""
    if session.group_ranks == 1 or _generates.get():
        return False
    even, ids = _even_batch.get(), given.get("input_ids")
    of_even_loader = even is not None and ids is not None and even() is ids
    return session.config.forward_only == "balanced" or _in_step.get() or of_even_loader


def generates() -> bool:
    """Whether `generate` of a model runs."""
    return _generates.get()


@contextmanager
def in_step() -> Iterator[None]:
    """All ranks run the same forwards in here."""
    token = _in_step.set(True)
    try:
        yield
    finally:
        _in_step.reset(token)


def given_out(batch: Any) -> None:
    """A loader that gives every rank as many batches gave out this one, or something that has no token ids."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    _even_batch.set(weakref.ref(ids) if isinstance(ids, torch.Tensor) else None)


def install_generation_hooks(module: ModuleType) -> None:
    """Wrap `generate` of the module `transformers.generation.utils`. Idempotent."""
    original: Callable[..., Any] = module.GenerationMixin.generate
    if hasattr(original, _MARK):
        return

    @wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        token = _generates.set(True)
        try:
            return original(self, *args, **kwargs)
        finally:
            _generates.reset(token)

    setattr(generate, _MARK, True)
    module.GenerationMixin.generate = generate


def root_of(model: torch.nn.Module) -> torch.nn.Module:
    """What has to be called to run a model: the outermost wrapper of FSDP1, or the model itself."""
    return next((root for root in _roots if any(part is model for part in root.modules())), model)


def install_root_hooks(module: ModuleType) -> None:
    """Wrap FSDP1 of the module `torch.distributed.fsdp.fully_sharded_data_parallel`. Idempotent."""
    original: Callable[..., Any] = module.FullyShardedDataParallel.forward
    if hasattr(original, _MARK):
        return

    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        if self._is_root:
            _roots.add(self)
        return output

    setattr(forward, _MARK, True)
    module.FullyShardedDataParallel.forward = forward
