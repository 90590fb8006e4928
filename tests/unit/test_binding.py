"""The wires between a model of transformers and the core: hooks, mask function, attention function, refusals."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import training
from deepspeed_cad.integrations import functions
from deepspeed_cad.integrations import transformers as room
from deepspeed_cad.integrations.structure import find_decoder, find_model
from model_cases import tiny_model

import deepspeed_cad
from deepspeed_cad.attention.microbatch import MaskDescriptor
from deepspeed_cad.errors import CADError, CADUnsupportedError
from deepspeed_cad.session import find_binding


def bound(block: dict[str, Any] | None = None, model: Any = None, **changes: Any) -> tuple[Any, room.Binding]:
    """A model with CAD, in training mode, and its binding."""
    model = training.tiny_llama(**changes) if model is None else model
    deepspeed_cad.apply(model, block or {})
    binding = find_binding(model)
    assert binding is not None
    return model.train(), binding


def batch(lengths: list[int] | None = None) -> dict[str, torch.Tensor]:
    packed = training.pack(training.documents(lengths or [9, 30, 4], seed=1))
    return {name: packed[name] for name in ("input_ids", "position_ids")}


def checks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Arguments of every call of the mask check from now on: tokens, window, forwards."""
    seen: list[tuple[Any, ...]] = []
    check = functions.check_mask

    def note(local: Any, window: int | None, given: Any, forwards: int) -> None:
        seen.append((local.tokens, window, forwards, "mask_function" in given))
        check(local, window, given, forwards)

    monkeypatch.setattr(functions, "check_mask", note)
    return seen


# The sampled check


def test_the_mask_check_is_called_with_the_number_of_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = bound()
    seen = checks(monkeypatch)
    for _ in range(3):
        model(**batch())
    assert seen == [(43, None, forwards, True) for forwards in range(3)]


def test_a_wrong_mask_stops_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way: a model whose mask shows later tokens."""
    model, binding = bound()
    mask = functions.check_mask

    def bidirectional(local: Any, window: Any, given: Any, forwards: int) -> None:
        mask(local, window, {**given, "mask_function": lambda b, h, q, k: q >= 0}, forwards)

    monkeypatch.setattr(functions, "check_mask", bidirectional)
    with pytest.raises(CADUnsupportedError, match="the model's own mask shows"):
        model(**batch())
    assert binding.feed.gatherer is not None


# The mask function and the attention function


def test_layers_get_the_descriptor_of_their_window() -> None:
    model, _ = bound(model=tiny_model("gemma2", sliding_window=5))
    seen: list[Any] = []
    for layer in find_decoder(model).layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append((module.sliding_window, kwargs["attention_mask"])),
            with_kwargs=True,
        )
    model(**batch())
    assert all(isinstance(mask, MaskDescriptor) and mask.window == window for window, mask in seen)
    assert {window for window, _ in seen} == {None, 5}
    # One micro-batch, whatever the window.
    assert len({id(mask.micro_batch) for _, mask in seen}) == 1


def test_generation_runs_the_attention_that_the_model_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a cache nothing of CAD runs, and the tokens are those of a model without it."""
    plain = training.tiny_llama(torch.float32)
    model, binding = bound(model=training.tiny_llama(torch.float32))
    ids = torch.arange(7)[None]
    names: list[str] = []
    own = functions.local_attention
    monkeypatch.setattr(functions, "local_attention", lambda module, name: (names.append(name), own(module, name))[1])
    wanted = plain.eval().generate(ids, max_new_tokens=5, do_sample=False)
    assert torch.equal(model.eval().generate(ids, max_new_tokens=5, do_sample=False), wanted)
    assert set(names) == {binding.original} == {"sdpa"}
    assert binding.session.counts.forwards == 0 and binding.session.statistics.micro_batches == 0


def test_a_model_that_bypasses_the_mask_function_is_refused() -> None:
    model, _ = bound()
    layer = model.model.layers[0].self_attn
    layer.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "attention_mask": None}), with_kwargs=True
    )
    with pytest.raises(CADUnsupportedError, match="LlamaAttention got no mask from the mask function"):
        model(**batch())


# The hooks


def test_output_attentions_and_caches_are_refused_or_off() -> None:
    model, _ = bound()
    with pytest.raises(CADUnsupportedError, match="output_attentions=True"):
        model(**batch(), output_attentions=True)
    assert model(**batch(), use_cache=True).past_key_values is None


def test_positional_arguments_are_read() -> None:
    """Documents are found whichever way the decoder is called, and its arguments stay what they were."""
    model, binding = bound()
    given = batch()
    by_name = model.model(**given).last_hidden_state
    documents = binding.last_read
    binding.last_read = None
    by_place = model.model(given["input_ids"], None, given["position_ids"]).last_hidden_state
    assert binding.last_read is not None and binding.last_read.same_as(documents)
    assert torch.equal(by_name, by_place) and len(documents.begin) == 3


def test_a_forward_without_gradients_is_none_of_the_announced() -> None:
    model, binding = bound()
    with torch.no_grad():
        model(**batch())
    assert binding.forwards == binding.session.statistics.micro_batches == 0
    model(**batch())
    assert binding.forwards == 1


def test_nothing_is_left_of_a_forward_that_raised() -> None:
    """Neither a running forward nor its arguments: another model of the process runs on its own."""
    model, binding = bound()
    model.model.layers[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("stop")))
    with pytest.raises(RuntimeError, match="stop"):
        model(**batch())
    assert functions.running.get() is None and binding.called_with == {}
    other = training.tiny_llama()
    training.loss_sum(other, training.pack([torch.arange(5)])).backward()


def test_a_copy_keeps_the_hooks_and_not_cad() -> None:
    model, binding = bound()
    twin = copy.deepcopy(model)
    twin(**batch())
    assert binding.forwards == 0 and find_binding(twin) is None
    assert binding.session.statistics.micro_batches == 0


def test_an_empty_batch_runs_one_row_that_nobody_sees() -> None:
    """Ids or embeddings; the embeddings stay in the graph."""
    model, _ = bound()
    none = torch.zeros(1, 0, dtype=torch.long)
    assert model(input_ids=none, position_ids=none).logits.shape == (1, 0, 64)
    embeds = torch.zeros(1, 0, 64, dtype=torch.float64, requires_grad=True)
    out = model(inputs_embeds=embeds, position_ids=none)
    assert out.logits.shape == (1, 0, 64)
    out.logits.sum().backward()
    assert embeds.grad is not None


# Binding


def test_binding_twice_is_binding_once() -> None:
    model, binding = bound()
    hooks = len(find_decoder(model)._forward_pre_hooks)
    deepspeed_cad.apply(model, {})
    assert find_binding(model) is binding and len(find_decoder(model)._forward_pre_hooks) == hooks
    assert find_binding(torch.nn.Sequential(model)) is binding
    assert find_model(torch.nn.Sequential(model)) is model


def test_a_module_that_cannot_be_switched_is_refused() -> None:
    """A part with a config of its own, whose attention keeps its name."""
    model = training.tiny_llama()
    model.model.layers[1].self_attn.config = copy.deepcopy(model.config)
    model.model.layers[1].self_attn.config._attn_implementation = "eager"
    with pytest.raises(CADUnsupportedError, match='LlamaAttention keeps its attention "eager"'):
        deepspeed_cad.apply(model, {})


def test_binding_refuses_before_anything_is_opened() -> None:
    model = training.tiny_llama(attention_dropout=0.5)
    with pytest.raises(CADUnsupportedError, match="attention_dropout"):
        deepspeed_cad.apply(model, {})
    assert deepspeed_cad.current_session() is None and model.config._attn_implementation != "cad"


def test_a_closed_session_stops_its_model_and_leaves_room_for_another() -> None:
    model, _ = bound()
    model(**batch())
    session = deepspeed_cad.current_session()
    session.close()
    assert deepspeed_cad.current_session() is None
    with pytest.raises(CADError, match="was closed"):
        model(**batch())
    other, _ = bound()
    assert deepspeed_cad.current_session() is not session
    other(**batch()).logits.sum().backward()
