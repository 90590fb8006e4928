"""Modules that get a subclass of their own class: their code, parameters and names stay, and a mixin runs around them.

In: a module of a model, and a mixin with a forward of its own. Out: the same module.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch

_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def mix_in(module: torch.nn.Module, mixin: type) -> torch.nn.Module:
    """Give a module a subclass of its own class with the mixin before it; gives the module. Idempotent."""
    if not isinstance(module, mixin):
        module.__class__ = subclass_of(type(module), mixin)  # type: ignore[arg-type]
    return module


@functools.cache
def subclass_of(cls: type, mixin: type, **more: Any) -> type:
    """One class for all modules of a class: FSDP's wrapping policies look layers up by it, transformers by its name.

    `more`: what else is in its body.
    """
    body = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, **more}
    return types.new_class(cls.__name__, (mixin, cls), exec_body=lambda names: names.update(body))


def inside_wrappers(layer: torch.nn.Module) -> torch.nn.Module:
    """The layer inside of FSDP and checkpointing, which pass arguments on: what runs there is gathered once, and
    recomputed as a whole."""
    for name in _WRAPPERS:
        layer = getattr(layer, name, layer)
    return layer
