"""Ping-pong in decoder layers of transformers: a layer's forward runs as two nano-batches where its micro-batch is cut.

The layer keeps its code and its parameters; it gets a subclass of its own class whose forward cuts the arguments, runs
both parts in turn and joins what they return. See pingpong.py for the order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from deepspeed_cad.integrations.mixed_in import inside_wrappers, mix_in

from deepspeed_cad.attention.microbatch import MaskDescriptor
from deepspeed_cad.attention.pingpong import run_alternating

try:
    from torch._C._dynamo.eval_frame import set_eval_frame
except ImportError:  # a torch without it: compiled layers run uncompiled where they are cut
    set_eval_frame = None  # type: ignore[assignment]


class _Alternating:
    """Mixed into a decoder layer's class: its forward runs as two nano-batches where the micro-batch is cut."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        whole = super().forward  # type: ignore[misc]
        found = [x for x in (*args, *kwargs.values()) if isinstance(x, MaskDescriptor)]
        if not found or not found[0].is_cut:
            return whole(*args, **kwargs)
        return _run_cut(whole, found[0], args, kwargs)


keep_hook = set_eval_frame is None
"""Without `set_eval_frame` nothing inside can be compiled."""


@functools.partial(torch.compiler.disable, recursive=keep_hook)
def _run_cut(whole: Callable[..., Any], mask: MaskDescriptor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    hidden = args[0] if args else kwargs["hidden_states"]
    cut = mask.row_cut(hidden.shape[0], hidden.shape[1])

    def split(value: Any) -> tuple[Any, Any]:
        return value.cut() if isinstance(value, MaskDescriptor) else cut.split(value)

    # Where the layer is compiled, Dynamo looks at both runs of it and not at what alternates them.
    with DynamoOff() as dynamo:
        first_args, second_args = ([split(value)[part] for value in args] for part in (0, 1))
        pairs = {name: split(value) for name, value in kwargs.items()}
        first_kwargs, second_kwargs = ({name: pair[part] for name, pair in pairs.items()} for part in (0, 1))
        return cut.join(
            *run_alternating(
                lambda: dynamo.run(whole, first_args, first_kwargs),
                lambda: dynamo.run(whole, second_args, second_kwargs),
            )
        )


class DynamoOff:
    """Keeps torch.compile's frame hook off inside, except in `run`. It is off whenever nano-batches hand over."""

    def __enter__(self) -> DynamoOff:
        self._hook = None if set_eval_frame is None else set_eval_frame(None)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._hook is not None:
            set_eval_frame(self._hook)

    def run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call with the hook as it was outside."""
        if self._hook is None:
            return function(*args, **kwargs)
        set_eval_frame(self._hook)
        try:
            return function(*args, **kwargs)
        finally:
            set_eval_frame(None)


def alternate(layer: torch.nn.Module) -> None:
    """Give a decoder layer a subclass of its own class that can run as two nano-batches."""
    mix_in(inside_wrappers(layer), _Alternating)
