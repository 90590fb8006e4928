"""Models that are only looked at, such as the reference of a preference loss: they get CAD's attention by themselves.

Log-probabilities of two models can only be compared to the last bit if the same kernel computed them. So a model for
which CAD is not on, with a decoder of the same class as one for which it is, gets a binding at its first forward
without gradients. It keeps its own attention where it is trained, and where it generates.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from deepspeed_cad.errors import CADUnsupportedError
from deepspeed_cad.session import Session, current_session

logger = logging.getLogger("deepspeed_cad")

_MARK = "__deepspeed_cad__"


def watch_for_references(decoder: torch.nn.Module, bind: Callable[[torch.nn.Module, Session], None]) -> None:
    """From now on call `bind` for each other decoder of this class, before its first forward without gradients.

    A session says which decoders it knows. Idempotent.
    """
    cls: Any = _class_of(decoder)
    original = cls.__call__
    if hasattr(original, _MARK):
        return

    @wraps(original)
    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and not torch.is_grad_enabled():
            _look(self, bind)
        return original(self, *args, **kwargs)

    setattr(call, _MARK, True)
    cls.__call__ = call


def _class_of(decoder: torch.nn.Module) -> type:
    """Its class of transformers: FSDP2 puts one of its own in front."""
    return next(one for one in type(decoder).__mro__ if "forward" in vars(one))


def _look(decoder: torch.nn.Module, bind: Callable[[torch.nn.Module, Session], None]) -> None:
    session = current_session()
    # The class is watched for good; a later session of this process may train others, or stages of a pipeline.
    if session is None or decoder in session.decoders:
        return
    if not any(isinstance(one, _class_of(decoder)) for one in session.decoders):
        return
    session.decoders.add(decoder)
    try:
        bind(decoder, session)
    except CADUnsupportedError as error:
        logger.info("a %s that is not trained keeps its attention: %s", type(decoder).__name__, error)
