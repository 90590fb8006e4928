"""Methods of other packages' classes, replaced once per process by functions that run ours around them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

_MARK = "__deepspeed_cad__"


def wrap_once(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put `wrap(original)` in the place of a method; nothing where that was done. Raises AttributeError without one."""
    original = getattr(owner, name)
    if not hasattr(original, _MARK):
        wrapped = wraps(original)(wrap(original))
        setattr(wrapped, _MARK, True)
        setattr(owner, name, wrapped)
