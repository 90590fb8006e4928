"""Two nano-batches of one micro-batch alternate over a model: greenlets run its unmodified code on two parts.

Each layer is called once for each nano-batch, which hands over once, right after its dispatch. `linear A(l)` is what
lies between two attentions: post A of layer l, pre A of layer l + 1. While one nano-batch is there, servers attend the
other one, and neither has to wait where both take as long:

    … collect A │ linear A(l) │ dispatch A │ collect B │ linear B(l) │ dispatch B │ collect A │ linear A(l+1) │ …
    servers:      B of layer l               A of layer l+1            B of layer l+1

Autograd runs its nodes in the reverse order of their creation, so the backward mirrors this without further help.

Greenlets stay on one thread, and a nano-batch may hand over inside a checkpointed layer. Such a layer pushed hooks for
the tensors that autograd saves, and perhaps dispatch modes or another grad mode; the other nano-batch must not see
them, or its tensors end up in the wrong layer. Greenlets switch Python's context variables; torch's own state is
switched here, private calls included. Tried on torch 2.13.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor
from torch._C import _autograd, _len_torch_dispatch_stack
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack, _pop_mode, _push_mode
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from deepspeed_cad.errors import CADError


def hand_over() -> None:
    """Let the other nano-batch run until it hands over in turn."""
    parent = getcurrent().parent
    if parent is None:
        raise CADError("a nano-batch handed over outside of run_alternating")
    parent.switch()


def run_alternating(
    first: Callable[[], Any], second: Callable[[], Any], states: tuple[ThreadState, ThreadState]
) -> tuple[Any, Any]:
    """Run two functions on this thread, switching whenever one calls `hand_over`; the first goes first.

    Each has a state of torch of its own. An error in either ends both and is raised."""
    results: list[Any] = [None, None]

    def body(index: int, function: Callable[[], Any]) -> None:
        results[index] = function()

    pair = [greenlet(body), greenlet(body)]
    for one in pair:
        one.gr_context = contextvars.copy_context()
    arguments: list[tuple[Any, ...]] = [(0, first), (1, second)]
    try:
        while not all(one.dead for one in pair):
            for index, one in enumerate(pair):
                if not one.dead:
                    with states[index]:
                        one.switch(*arguments[index])
                    arguments[index] = ()
    finally:
        for index, one in enumerate(pair):
            if one and not one.dead:
                # What it entered it leaves now, with what it pushed in place.
                with states[index]:
                    one.throw(GreenletExit)
    return results[0], results[1]


class RandomStream:
    """Random numbers of one nano-batch, on the CPU and on its device.

    Checkpointing remembers the generators' state where a layer begins and draws the same numbers when the layer runs
    again, alone. So what the other one draws in between must not count."""

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
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)

    def take_off(self) -> None:
        self._states = [one.get_state() for one in self._generators]


class ThreadState:
    """The state of one nano-batch: what it pushed or set since it began, on top of what was there around both.

    A context for each stretch that it runs."""

    def __init__(self, device: torch.device, random: RandomStream) -> None:
        """A nano-batch that has not begun: it starts with what is set around it."""
        self.random = random
        self._devices = tuple(dict.fromkeys(("cpu", device.type)))
        self._own: tuple[Any, ...] | None = None
        self._around: tuple[Any, ...] = ()
        self._hooks: list[tuple[Any, Any]] = []
        self._modes: list[Any] = []
        self._base: tuple[Any, int] = (None, 0)

    def __enter__(self) -> None:
        self._around = self._settings()
        self._base = _autograd._top_saved_tensors_default_hooks(True), _len_torch_dispatch_stack()
        for pack, unpack in self._hooks:
            _autograd._push_saved_tensors_default_hooks(pack, unpack)
        for mode in self._modes:
            _push_mode(mode)
        if self._own is not None:
            self._set(self._own)
        self.random.put_on()

    def __exit__(self, *error: Any) -> None:
        self.random.take_off()
        self._own = self._settings()
        top, below = self._base
        self._modes = [_pop_mode() for _ in range(_len_torch_dispatch_stack() - below)][::-1]
        self._hooks = []
        while (now := _autograd._top_saved_tensors_default_hooks(True)) is not None and not _same(now, top):
            self._hooks.insert(0, now)
            _autograd._pop_saved_tensors_default_hooks()
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
    return _autograd._top_saved_tensors_default_hooks(True) is not None


def in_backward() -> bool:
    """Whether this thread runs a backward: layers that attend then are run again, by activation checkpointing."""
    return torch._C._current_graph_task_id() != -1


def unseen_by_checkpointing(step: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A step of attention of which selective checkpointing sees no operation.

    It takes what it kept again by how often an operation ran before, and attention runs in the forward only."""

    @wraps(step)
    def run(*args: Any) -> Tensor:
        modes = _get_current_dispatch_mode_stack()
        hides = any(isinstance(mode, _CachingTorchDispatchMode | _CachedTorchDispatchMode) for mode in modes)
        with _disable_current_modes() if hides else nullcontext():
            return step(*args)

    return run


def _same(one: tuple[Any, Any], other: tuple[Any, Any] | None) -> bool:
    """Whether both are the same pair of hooks: there is no way to ask how many are there."""
    return other is not None and one[0] is other[0] and one[1] is other[1]
