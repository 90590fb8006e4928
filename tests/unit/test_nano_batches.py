"""Two parts that alternate on one thread, each with its own state of torch; a decoder's arguments cut for them, and its
outputs joined."""

import contextlib
import contextvars
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import training
from deepspeed_cad.integrations import interleaved
from deepspeed_cad.integrations.functions import Scope, running
from deepspeed_cad.integrations.interleaved import CannotJoin, RowCut
from model_cases import tiny_model
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutputWithPast

from deepspeed_cad.attention.nano_batches import RandomStream, ThreadState, hand_over, run_alternating

CPU = torch.device("cpu")


def _run(first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
    states = ThreadState(CPU, RandomStream(CPU)), ThreadState(CPU, RandomStream(CPU, 5))
    return run_alternating(first, second, states)


@pytest.mark.parametrize("enter, ask", [
    (torch.no_grad, torch.is_grad_enabled),
    (lambda: torch.autocast("cpu", torch.bfloat16), lambda: torch.is_autocast_enabled("cpu")),
    (
        lambda: torch.autocast("cpu", torch.float16),
        lambda: torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
    ),
    (lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False), torch.is_autocast_cache_enabled),
])  # fmt: skip
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


def test_each_part_has_the_variables_of_the_caller_and_its_own_changes() -> None:
    variable = contextvars.ContextVar("variable", default="nothing")
    variable.set("outer")

    def part(own: str) -> tuple[str, str]:
        found = variable.get()
        variable.set(own)
        hand_over()
        return found, variable.get()

    assert _run(lambda: part("a"), lambda: part("b")) == (("outer", "a"), ("outer", "b")) and variable.get() == "outer"


def test_hooks_around_both_parts_stay_where_they_are() -> None:
    around, own = (saved_tensors_hooks(lambda x: x, lambda x: x) for _ in range(2))

    def part() -> list[Any]:
        with own:
            hand_over()
        return [_top_saved_tensors_default_hooks(True)[0]]

    with around:
        assert _run(part, part) == ([around.pack_hook], [around.pack_hook])
        assert _top_saved_tensors_default_hooks(True)[0] is around.pack_hook
    assert _top_saved_tensors_default_hooks(True) is None


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

    with pytest.raises(ValueError, match="broken"):
        _run(first, Mock(side_effect=ValueError("broken")))
    assert ended == [(False, True)]
    assert torch.is_grad_enabled() and _top_saved_tensors_default_hooks(True) is None


@pytest.mark.parametrize("early_stop", [True, False])
def test_checkpointed_regions_that_overlap(early_stop: bool) -> None:
    """Both parts are inside a region at the same time, with dropout on both sides of where they hand over."""
    weight, forward = torch.nn.Parameter(torch.randn(4, 4, dtype=torch.float64)), [True]

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


CUTS = [RowCut(1, 10, 3), RowCut(1, 10, 0), RowCut(1, 10, 10), RowCut(4, 10, 30), RowCut(4, 10, 0), RowCut(2, 2, 2)]


@pytest.mark.parametrize("cut", CUTS)
def test_what_was_cut_is_joined_again(cut: RowCut) -> None:
    hidden, logits = torch.rand(cut.batch, cut.width, 6, requires_grad=True), torch.rand(cut.batch * cut.width, 5)
    first, second = cut.split(hidden)
    at, rows = max(cut.at, 1 if cut.batch == 1 else cut.width), logits.split([cut.at, len(logits) - cut.at])
    stand_in = logits[:at] if cut.at == 0 else logits[: 1 if cut.batch == 1 else cut.width]
    routed = [part if len(part) else stand_in[: 1 if cut.batch == 1 else cut.width] for part in rows]

    def output(x: torch.Tensor, router: torch.Tensor) -> BaseModelOutputWithPast:
        found = BaseModelOutputWithPast(last_hidden_state=x, past_key_values=None, hidden_states=(x, x * 2))
        found["router_logits"] = (router,)
        return found

    joined = cut.join(output(first, routed[0]), output(second, routed[1]))
    assert type(joined) is BaseModelOutputWithPast
    assert torch.equal(joined.last_hidden_state, hidden) and torch.equal(joined.hidden_states[1], hidden * 2)
    assert torch.equal(joined.router_logits[0], logits)
    (gradient,) = torch.autograd.grad(joined.last_hidden_state.sum(), hidden)
    assert torch.equal(gradient, torch.ones_like(hidden))
    one, *rest, of_token = cut.join(*((x, None, True, int("1000"), x[..., 0]) for x in (first, second)))
    assert torch.equal(one, hidden) and torch.equal(of_token, hidden[..., 0]) and rest == [None, True, 1000]


@pytest.mark.parametrize("first, second, says", [
    (torch.tensor(1.0), torch.tensor(2.0), r"shapes \[\] and \[\]"),
    (torch.ones(3), torch.ones(3), r"shapes \[3\] and \[3\]"), (torch.ones(1, 3, 4), torch.ones(1, 7, 5), "shapes"),
    ((torch.ones(1, 3),), (None,), r"\[0\], a Tensor and a NoneType"),
    ({"a": object()}, {"a": object()}, '"a", a object'), ([1], [2], r"\[0\], a int"), ((1,), (1, 2), "a tuple"),
])  # fmt: skip
def test_what_has_no_rows(first: object, second: object, says: str) -> None:
    with pytest.raises(CannotJoin, match=says):
        RowCut(1, 10, 3).join(first, second)


ROW, SEVERAL = RowCut(1, 10, 3), RowCut(3, 10, 10)


@pytest.mark.parametrize("cut, shape, dim, at", [
    (ROW, (1, 10, 4), 1, 3), (ROW, (10,), 0, 3), (ROW, (1, 2, 10, 4), 2, 3), (ROW, (1, 2, 10), None, 0),
    (ROW, (2, 10), None, 0), (ROW, (), None, 0),
    # Positions of several axes; also where there are as many rows as axes.
    (ROW, (3, 1, 10), 2, 3), (SEVERAL, (3, 3, 10), 1, 1),
    (SEVERAL, (3, 3, 10, 4), 0, 1),  # and as many heads
])  # fmt: skip
def test_tokens_are_cut(cut: RowCut, shape: tuple[int, ...], dim: int | None, at: int) -> None:
    x = torch.arange(math.prod(shape), dtype=torch.float32 if len(shape) == 4 else torch.int64).view(shape)
    (one, [number]), (other, _) = cut.split((x, [3]))
    assert number == 3
    if dim is None:
        assert one is other is x
    else:
        assert one.shape[dim] == at and torch.equal(torch.cat([one, other], dim), x)


@pytest.mark.parametrize("rank, servers, said", [(1, [], ""), (0, [], '"local_first" for int: why'), (0, [2], "reser")])
def test_parts_that_do_not_alternate_are_said_once(monkeypatch: Any, rank: int, servers: list[int], said: str) -> None:
    session = SimpleNamespace(rank=rank, servers=SimpleNamespace(at_start=servers))
    binding, lines = Mock(session=session, decoder=lambda: 0), list[str]()
    monkeypatch.setattr(interleaved, "notice", lines.append)
    interleaved._refuse(binding, "why")
    assert binding.in_turn == "why" and binding.feed.stays_whole.called
    assert bool(lines) == bool(said) and said in "".join(lines)


@pytest.mark.parametrize("change, says", [
    (lambda decoder: None, ""), (lambda decoder: decoder.gradient_checkpointing_enable({"use_reentrant": False}), ""),
    (lambda decoder: decoder.gradient_checkpointing_enable({"use_reentrant": True}), "reentrant"),
    (lambda decoder: setattr(decoder.layers[1].mlp.up_proj.weight, "ds_id", 3), "ZeRO-3"),
    (lambda decoder: setattr(decoder.config, "layer_types", ["linear_attention"]), "linear_attention"),
    (lambda decoder: setattr(decoder.layers[0], "self_attn", torch.nn.Identity()), "layer 0 has no attention"),
    (lambda decoder: setattr(decoder.layers[1], "more", torch.nn.Conv1d(4, 4, 3)), "layer 1 has a convolution"),
    (lambda decoder: setattr(decoder.config, "rope_parameters", {"rope_type": "longrope"}), '"longrope"'),
    (lambda decoder: setattr(decoder.config, "model_type", "opt"), "OPT"),
    (lambda decoder: setattr(decoder.layers[0], "mlp", training.deepspeed_experts()), "mixture of experts"),
    (lambda decoder: setattr(decoder.layers[1], "more", torch.nn.Dropout(0.1)), "layers.1.more.p is 0.1"),
])  # fmt: skip
def test_why_a_decoder_cannot_run_twice(monkeypatch: Any, change: Callable[[Any], None], says: str) -> None:
    decoder = tiny_model("llama").model
    change(decoder)
    monkeypatch.setattr(interleaved, "_run_parts", lambda *_: "in parts")
    monkeypatch.setattr(type(decoder), "forward", lambda self, input_ids: "whole")
    interleaved.interleave(decoder)
    for overlap, expected in (("auto", says), ("interleave", "" if "more.p" in says else says)):
        session = SimpleNamespace(rank=1, config=SimpleNamespace(overlap=overlap))
        binding = Mock(session=session, decoder=lambda: decoder, in_turn=None)
        before = running.set(Scope(binding, Mock(ticks=[0, 1])))
        assert decoder(input_ids=torch.zeros(1, 4)) == ("whole" if expected else "in parts")
        running.reset(before)
        assert expected in binding.in_turn and bool(expected) == bool(binding.in_turn)
