"""The wires between a model of transformers and the core: hooks, mask function, attention function, refusals."""

import copy
import pickle
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from weakref import WeakSet

import pytest
import torch
import training
from deepspeed_cad.integrations import forward_only, functions, trainer
from deepspeed_cad.integrations import transformers as room
from deepspeed_cad.integrations.models import find_model
from deepspeed_cad.integrations.positions import one_row
from deepspeed_cad.integrations.prepared import PreparedIterator
from deepspeed_cad.integrations.structure import find_decoder

import deepspeed_cad
from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADError, CADUnsupportedError
from deepspeed_cad.session import find_binding


def bound(block: dict[str, Any] | None = None, model: Any = None, **changes: Any) -> tuple[Any, room.Binding]:
    """A model with CAD, in training mode, and its binding."""
    model = training.tiny_llama(**changes) if model is None else model
    deepspeed_cad.apply(model, block or {})
    return model.train(), find_binding(model)


def batch(lengths: list[int] | None = None) -> dict[str, torch.Tensor]:
    packed = training.pack(training.documents(lengths or [9, 30, 4], seed=1))
    return {name: packed[name] for name in ("input_ids", "position_ids")}


@pytest.mark.parametrize("check", ["sampled", "off"])
def test_a_wrong_mask_stops_training(monkeypatch: pytest.MonkeyPatch, check: str) -> None:
    """The whole way: a model whose mask shows later tokens, from its second forward on."""
    model, _ = bound({"check": check})
    mask, seen = functions.check_mask, []

    def bidirectional(local: Any, window: Any, given: Any, forwards: int) -> None:
        seen.append((local.tokens, window, forwards))
        wrong = {"mask_function": lambda b, h, q, k: q >= 0} if forwards else {}
        mask(local, window, {**given, **wrong}, forwards)

    monkeypatch.setattr(functions, "check_mask", bidirectional)
    model(**batch())
    off = check == "off"
    with nullcontext() if off else pytest.raises(CADUnsupportedError, match="the model's own mask shows"):
        model(**batch())
    assert seen == ([] if off else [(43, None, 0), (43, None, 1)])


def test_a_reference_that_cannot_be_read_attends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    other, given = training.tiny_llama().eval(), {**batch(), "use_cache": False}
    with torch.no_grad():
        expected = other(**given).logits
        model, binding = bound()
        monkeypatch.setattr(room, "read_documents", Mock(side_effect=CADError("a mask")))
        assert torch.equal(other(**given).logits, expected) and other.model in binding.session.references
        with pytest.raises(CADError, match="a mask"):
            model.eval()(**given)


@pytest.mark.parametrize("value, together", [("auto", True), ("local", False), ("balanced", True)])
def test_local_is_local(value: str, together: bool) -> None:
    one: Any = SimpleNamespace(session=SimpleNamespace(group_ranks=2, config=CADConfig(forward_only=value)))
    with forward_only.within(forward_only.in_step):
        assert forward_only.are_shared(one, {}) == together
    ids = torch.zeros(1, 4)
    forward_only.given_out({"input_ids": ids}, [one])  # evenly, on all ranks
    assert forward_only.are_shared(one, {"input_ids": ids}) == together
    forward_only.given_out(None, ())
    assert forward_only.are_shared(one, {"input_ids": ids}) == (value == "balanced")
    assert list(PreparedIterator(None, iter([{"input_ids": ids}]))) and forward_only._even_batch.get()[0]() is ids


def test_a_trainer_refuses_a_loader_before_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    one, seen = SimpleNamespace(accelerator=1, callback_handler=SimpleNamespace(train_dataloader=2)), list[Any]()
    monkeypatch.setattr(trainer, "_binding_of", lambda _: bound({"look_ahead": 0})[1])
    for name in ("refuse_accelerator", "refuse_loader"):
        monkeypatch.setattr(trainer, name, seen.append)
    assert trainer._get_batch_samples(lambda *_: seen.append("read"), one, iter([])) is None and seen == [1, 2, "read"]
    session = SimpleNamespace(ranks=2, group_ranks=2, config=CADConfig(look_ahead=0))
    monkeypatch.setattr(trainer, "_binding_of", lambda _: SimpleNamespace(session=session))
    one.model, one.accelerator = 3, SimpleNamespace(distributed_type=SimpleNamespace(name="FSDP"))
    stops = pytest.raises(CADUnsupportedError, match="did not wrap the model in DDP")
    for wrapped, name, ends in ((3, "FSDP", nullcontext()), (4, "MULTI_GPU", nullcontext()), (3, "MULTI_GPU", stops)):
        one.model_wrapped, one.accelerator.distributed_type.name = wrapped, name
        with ends:
            trainer._get_batch_samples(lambda *_: None, one, iter([]))


def test_a_model_that_bypasses_the_mask_function_is_refused() -> None:
    model, _ = bound()
    layer = model.model.layers[0].self_attn
    layer.register_forward_pre_hook(lambda _, args, given: (args, {**given, "attention_mask": None}), with_kwargs=True)
    with pytest.raises(CADUnsupportedError, match="LlamaAttention got no mask from the mask function"):
        model(**batch())


def test_output_attentions_and_caches_are_refused_or_off() -> None:
    model, _ = bound(attn_implementation="eager")
    with pytest.raises(CADUnsupportedError, match="output_attentions=True"):
        model(**batch(), output_attentions=True)
    assert model(**batch(), use_cache=True).past_key_values is None
    how = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    found = model.generate(torch.ones(1, 3, dtype=torch.long), output_attentions=True, **how)
    assert found.attentions[0][0].shape == (1, 8, 3, 3)


def test_positional_arguments_are_read() -> None:
    """Documents are found whichever way the decoder is called, and its arguments stay what they were."""
    model, binding = bound()
    given = batch()
    by_name, documents = model.model(**given).last_hidden_state, binding.last_read
    binding.last_read = None
    by_place = model.model(given["input_ids"], None, given["position_ids"]).last_hidden_state
    assert binding.last_read is not None and binding.last_read.same_as(documents)
    assert torch.equal(by_name, by_place) and len(documents.begin) == 3


def test_nothing_is_left_of_a_forward_that_raised() -> None:
    """Neither a running forward nor its arguments: another model of the process runs on its own."""
    model, binding = bound()
    model.model.layers[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("stop")))
    with pytest.raises(RuntimeError, match="stop"):
        model(**batch())
    assert functions.running.get() is None and binding.called_with == {}
    training.loss_sum(training.tiny_llama(), training.pack([torch.arange(5)])).backward()


@pytest.mark.parametrize("make", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_keeps_the_hooks_and_not_cad(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    model, binding = bound()
    twin = make(model)
    functions._warn_of_copy.cache_clear()
    twin.eval()(**batch())
    assert not caplog.records
    twin.train()(**batch())
    assert "it is a copy of the one" in caplog.text
    assert binding.forwards == 0 and find_binding(twin) is None and binding.session.statistics.micro_batches == 0


def test_an_empty_batch_runs_one_row_that_nobody_sees() -> None:
    """Ids or embeddings; the embeddings stay in the graph."""
    model, _ = bound()
    none = torch.zeros(1, 0, dtype=torch.long)
    assert model(input_ids=none, position_ids=none).logits.shape == (1, 0, 64)
    assert one_row({"input_ids": none, "position_ids": none.expand(3, 1, 0)})["position_ids"].shape == (3, 1, 1)
    embeds = torch.zeros(1, 0, 64, dtype=torch.float64, requires_grad=True)
    out = model(inputs_embeds=embeds, position_ids=none)
    assert out.logits.shape == (1, 0, 64)
    out.logits.sum().backward()
    assert embeds.grad is not None


def test_binding_twice_is_binding_once() -> None:
    model, binding = bound()
    hooks = len(find_decoder(model)._forward_pre_hooks)
    deepspeed_cad.apply(model, {})
    assert find_binding(model) is binding and len(find_decoder(model)._forward_pre_hooks) == hooks
    assert find_binding(torch.nn.Sequential(model)) is binding
    assert find_model(torch.nn.Sequential(model)) is model


def test_of_models_side_by_side_the_first_that_cad_can_have_is_meant(caplog: pytest.LogCaptureFixture) -> None:
    refused, models = training.tiny_llama(attention_dropout=0.5), [training.tiny_llama() for _ in range(2)]
    assert find_model(torch.nn.Sequential(refused, *models)) is models[0]
    assert find_model(torch.nn.Sequential(refused, torch.nn.Linear(1, 1))) is refused
    for none, said in (torch.nn.Linear(1, 1), "Linear contains no transformers model"), (refused, "attention_dropout"):
        with pytest.raises(CADUnsupportedError, match=said):
            deepspeed_cad.apply(none, {})
    assert deepspeed_cad.current_session() is None and refused.config._attn_implementation != "cad"
    frozen = training.tiny_llama().requires_grad_(False)
    deepspeed_cad.apply(torch.nn.Sequential(refused, *models, frozen), {})
    assert caplog.text.count("beside it keeps its attention") == 1


def test_attention_that_is_switched_is_its_own_and_ends_training() -> None:
    model, given = training.sdpa_llama(torch.float64).eval(), batch()
    with torch.no_grad():
        expected = model(**given).logits
        bound(model=model)[0].set_attn_implementation("sdpa")
        assert torch.equal(model.eval()(**given).logits, expected)
    with pytest.raises(CADUnsupportedError, match=r"no layer of LlamaModel asked CAD for .*set_attn_implementation"):
        model.train()(**batch())
    model.set_attn_implementation("cad")
    model(**batch())


def test_continuous_batching_begins_with_a_models_own_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Manager:
        def switch_to_cb_friendly_attn(self, model: Any) -> None:
            seen.append(model.config._attn_implementation)

    room.install_batching_hooks(SimpleNamespace(ContinuousBatchingManager=Manager))
    (model, binding), plain, manager = bound(), training.tiny_llama(), Manager()
    manager.switch_to_cb_friendly_attn(plain)
    assert not hasattr(manager, "_original_attn_impl")
    manager.switch_to_cb_friendly_attn(model)
    assert seen == [plain.config._attn_implementation, binding.original] and manager._original_attn_impl == "cad"
    room.install_batching_hooks(SimpleNamespace(ContinuousBatchingManager=int))  # an older one has none


@pytest.mark.parametrize("managed, gas, asked, size, counted", [
    (True, 2, None, 2, True), (True, 2, 2, 2, True), (True, 1, 3, 3, False), (False, 2, None, 1, False),
    (False, 2, 2, 2, False),
])  # fmt: skip
def test_what_counts_micro_batches_of_an_engine(
    managed: bool, gas: int, asked: int | None, size: int, counted: bool
) -> None:
    """Where a script ends steps by itself, `micro_steps` counts these."""
    engine = torch.nn.Sequential(bound()[0])
    engine.micro_steps, engine.global_steps = 7, 3  # type: ignore[assignment]
    engine.gradient_accumulation_steps = lambda: gas  # type: ignore[assignment]
    engine.managed_gradient_accumulation = lambda: managed  # type: ignore[assignment]
    loader = deepspeed_cad.current_session().look_ahead([], engine, accumulation=asked)
    assert loader._says() == size and (loader._trained and loader._trained()) == ((7, 3) if counted else None)


def test_a_module_that_cannot_be_switched_is_refused() -> None:
    """A part with a config of its own, whose attention keeps its name."""
    model = training.tiny_llama()
    model.model.layers[1].self_attn.config = copy.deepcopy(model.config)
    model.model.layers[1].self_attn.config._attn_implementation = "eager"
    with pytest.raises(CADUnsupportedError, match='LlamaAttention keeps its attention "eager"'):
        deepspeed_cad.apply(model, {})


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


def test_a_reference_is_bound_once_and_where_its_class_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    trained, reference = (training.tiny_llama().model for _ in range(2))
    session = SimpleNamespace(decoders=WeakSet([trained]))
    monkeypatch.setattr(forward_only, "current_session", lambda: session)
    bind = Mock(side_effect=CADUnsupportedError("it keeps its attention"))
    for decoder in (reference, reference, trained, torch.nn.Linear(1, 1)):
        forward_only._look(decoder, bind)
    bind.assert_called_once_with(reference, session)
