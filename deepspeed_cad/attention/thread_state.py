"""What torch keeps for a thread and a model may change: taken off one part of it, put back when that part goes on.

Two parts of a model that alternate on one thread (pingpong.py) may hand over inside a checkpointed layer. Such a layer
pushed hooks for the tensors that autograd saves, and perhaps modes or another grad mode; the other part must not see
them, or its tensors end up in the wrong layer. Greenlets switch Python's context variables; torch's own state is
switched here, private calls included. Tried on torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
from torch._C import (
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
)
from torch._C._autograd import (
    _pop_saved_tensors_default_hooks,
    _push_saved_tensors_default_hooks,
    _top_saved_tensors_default_hooks,
)
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode


class RandomStream:
    """Random numbers of one part, on the CPU and on its device.

    Checkpointing remembers the generators' state where a layer begins and draws the same numbers when the layer runs
    again, alone. So what the other part draws in between must not count.
    """

    def __init__(self, device: torch.device, seed: int | None = None) -> None:
        """`seed`: of a stream of its own; None: the stream that the generators are at now."""
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generators.append(torch.cuda.default_generators[index])
        if seed is None:
            self._states = [one.get_state() for one in self._generators]
        else:
            self._states = [torch.Generator(one.device).manual_seed(seed).get_state() for one in self._generators]

    def put_on(self) -> None:
        """Draw from this stream."""
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)

    def take_off(self) -> None:
        """Remember where it is."""
        self._states = [one.get_state() for one in self._generators]


class ThreadState:
    """The state of one part: what it pushed or set since it began, on top of what was there around both parts.

    A context for each stretch that the part runs.
    """

    def __init__(self, device: torch.device, random: RandomStream) -> None:
        """A part that has not begun: it starts with what is set around it."""
        self.random = random
        self._devices = tuple(dict.fromkeys(("cpu", device.type)))
        self._own: tuple[Any, ...] | None = None
        self._around: tuple[Any, ...] = ()
        self._hooks: list[tuple[Any, Any]] = []
        self._function_modes: list[Any] = []
        self._dispatch_modes: list[Any] = []
        self._base: tuple[Any, int, int] = (None, 0, 0)

    def __enter__(self) -> None:
        """Before the part goes on."""
        self._around = self._settings()
        self._base = (_top_saved_tensors_default_hooks(True), _len_torch_function_stack(), _len_torch_dispatch_stack())
        for pack, unpack in self._hooks:
            _push_saved_tensors_default_hooks(pack, unpack)
        for mode in self._function_modes:
            _push_on_torch_function_stack(mode)
        for mode in self._dispatch_modes:
            _push_mode(mode)
        if self._own is not None:
            self._set(self._own)
        self.random.put_on()

    def __exit__(self, *error: Any) -> None:
        """After the part handed over or ended."""
        self.random.take_off()
        self._own = self._settings()
        top, function_modes, dispatch_modes = self._base
        self._dispatch_modes = [_pop_mode() for _ in range(_len_torch_dispatch_stack() - dispatch_modes)][::-1]
        self._function_modes = [
            _pop_torch_function_stack() for _ in range(_len_torch_function_stack() - function_modes)
        ][::-1]
        self._hooks = []
        while (now := _top_saved_tensors_default_hooks(True)) is not None and not _same(now, top):
            self._hooks.insert(0, now)
            _pop_saved_tensors_default_hooks()
        self._set(self._around)

    def _settings(self) -> tuple[Any, ...]:
        autocast = [(name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in self._devices]
        return torch.is_grad_enabled(), autocast, torch.is_autocast_cache_enabled()

    def _set(self, settings: tuple[Any, ...]) -> None:
        grad, autocast, cache = settings
        torch._C._set_grad_enabled(grad)
        for name, enabled, dtype in autocast:
            torch.set_autocast_enabled(name, enabled)
            torch.set_autocast_dtype(name, dtype)
        torch.set_autocast_cache_enabled(cache)


def hooks_save_tensors() -> bool:
    """Whether somebody takes what autograd saves now: activation checkpointing, or offloading to the host."""
    return _top_saved_tensors_default_hooks(True) is not None


def in_backward() -> bool:
    """Whether this thread runs a backward: layers that attend then are run again, by activation checkpointing."""
    return torch._C._current_graph_task_id() != -1


def unseen_by_checkpointing(step: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A step of attention of which selective checkpointing sees no operation.

    It takes what it kept again by how often an operation ran before, and attention runs in the forward only.
    """

    @wraps(step)
    def run(*args: Any) -> torch.Tensor:
        modes = _get_current_dispatch_mode_stack()
        hides = any(isinstance(mode, _CachingTorchDispatchMode | _CachedTorchDispatchMode) for mode in modes)
        with _disable_current_modes() if hides else nullcontext():
            return step(*args)

    return run


def _same(one: tuple[Any, Any], other: tuple[Any, Any] | None) -> bool:
    """Whether both are the same pair of hooks: there is no way to ask how many are there."""
    return other is not None and one[0] is other[0] and one[1] is other[1]
