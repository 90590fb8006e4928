"""Torch's state of a thread while two parts alternate on it: each has its own, and what was around both stays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from deepspeed_cad.attention.pingpong import hand_over, run_alternating
from deepspeed_cad.attention.thread_state import RandomStream, ThreadState

CPU = torch.device("cpu")


def _run(first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
    states = ThreadState(CPU, RandomStream(CPU)), ThreadState(CPU, RandomStream(CPU, 5))
    return run_alternating(first, second, states)


def _square(x: torch.Tensor) -> torch.Tensor:
    """Saves one tensor for backward."""
    return x.exp()


def test_tensors_are_saved_by_the_hooks_of_their_part() -> None:
    packed: list[str] = []

    def hooks(name: str) -> saved_tensors_hooks:
        return saved_tensors_hooks(lambda x: packed.append(name) or x, lambda x: x)

    x = torch.ones(2, requires_grad=True)

    def part(name: str) -> None:
        _square(x)
        with hooks(f"{name} outer"), hooks(f"{name} inner"):
            hand_over()
            _square(x)
            hand_over()
        with hooks(f"{name} last"):
            hand_over()
            _square(x)
        _square(x)

    with hooks("around"):
        _run(lambda: part("a"), lambda: part("b"))
        _square(x)
    assert packed == [
        "around", "around", "a inner", "b inner", "a last", "around", "b last", "around", "around"
    ]  # fmt: skip
    assert _top_saved_tensors_default_hooks(True) is None


class _Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(function, "__name__", ""))
        return function(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(function.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("mode", "name"), [(_Functions, "{}"), (_Operations, "{}.default")])
def test_modes_see_what_their_part_does(mode: type, name: str) -> None:
    x, around, own = torch.ones(2), mode(), mode()

    def first() -> None:
        with own:
            hand_over()
            torch.sin(x)

    def second() -> None:
        torch.cos(x)
        hand_over()
        torch.tan(x)

    with around:
        _run(first, second)
    inner, outer = [[one for one in seen if one[:3] in ("sin", "cos", "tan")] for seen in (own.seen, around.seen)]
    assert inner == [name.format("sin")]
    assert sorted(outer) == sorted(name.format(one) for one in ("cos", "sin", "tan"))


@pytest.mark.parametrize(
    ("enter", "ask"),
    [
        (torch.no_grad, torch.is_grad_enabled),
        (lambda: torch.autocast("cpu", torch.bfloat16), lambda: torch.is_autocast_enabled("cpu")),
        (
            lambda: torch.autocast("cpu", torch.float16),
            lambda: torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
        ),
        (lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False), torch.is_autocast_cache_enabled),
    ],
)
def test_settings_belong_to_a_part(enter: Callable[[], Any], ask: Callable[[], Any]) -> None:
    def part(inside: bool) -> list[Any]:
        with enter() if inside else contextlib.nullcontext():
            found = [ask()]
            hand_over()
            found.append(ask())
        return [*found, ask()]

    before = ask()
    with enter():
        other = ask()
    assert other != before
    assert _run(lambda: part(True), lambda: part(False)) == ([other, other, before], [before] * 3)
    assert ask() == before


def test_each_part_draws_its_own_numbers() -> None:
    def draw(times: int) -> list[float]:
        found = []
        for _ in range(times):
            found.append(float(torch.rand(())))
            hand_over()
        return found

    torch.manual_seed(1)
    expected = [float(torch.rand(())) for _ in range(3)]
    torch.manual_seed(1)
    first, second = _run(lambda: draw(3), lambda: draw(5))
    assert first == expected
    torch.manual_seed(5)
    assert second == [float(torch.rand(())) for _ in range(5)]


def test_an_error_of_one_part_ends_the_other_with_its_own_state() -> None:
    ended: list[Any] = []
    hooks = saved_tensors_hooks(lambda x: x, lambda x: x)

    def first() -> None:
        with torch.no_grad(), hooks:
            try:
                hand_over()
            finally:
                top = _top_saved_tensors_default_hooks(True)
                ended.append((torch.is_grad_enabled(), top is not None and top[0] is hooks.pack_hook))

    def second() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        _run(first, second)
    assert ended == [(False, True)]
    assert torch.is_grad_enabled() and _top_saved_tensors_default_hooks(True) is None


@pytest.mark.parametrize("early_stop", [True, False])
def test_checkpointed_regions_that_overlap(early_stop: bool) -> None:
    """Both parts are inside a region at the same time, with dropout on both sides of where they hand over."""
    weight = torch.nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
    forward = [True]

    def layer(x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.dropout(torch.tanh(x @ weight), 0.5)
        if forward[0]:
            hand_over()
        return torch.nn.functional.dropout(torch.sigmoid(x @ weight), 0.5)

    def gradients(checkpointed: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        weight.grad = None
        forward[0] = True
        inputs = [torch.arange(4.0 * n, dtype=torch.float64).view(n, 4).requires_grad_() for n in (2, 3)]

        def part(x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                given: dict[str, Any] = {"use_reentrant": False, "early_stop": early_stop}
                x = checkpoint(layer, x, **given) if checkpointed else layer(x)
            return x

        outputs = _run(lambda: part(inputs[0]), lambda: part(inputs[1]))
        forward[0] = False
        torch.cat(outputs).square().sum().backward()
        return [weight.grad, *(x.grad for x in inputs)]  # type: ignore[list-item]

    for found, expected in zip(gradients(True), gradients(False)):
        assert torch.equal(found, expected)
