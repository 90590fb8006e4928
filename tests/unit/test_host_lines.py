"""What the wrappers around Trainer do by themselves: what is logged, and which loss is refused."""

from functools import partial, update_wrapper, wraps
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import training
from deepspeed_cad.integrations import structure
from deepspeed_cad.integrations.positions import no_rows, plain_mask
from deepspeed_cad.integrations.trainer import OF_A_STEP, unknown_loss, wrong_loss
from deepspeed_cad.integrations.verify import loss_of
from transformers import Trainer


class OwnLoss(Trainer):
    def compute_loss(self, *given: Any, **more: Any) -> Any:
        return None


def trainer_with(kind: type, **changes: Any) -> Any:
    made = object.__new__(kind)
    made.model = training.tiny_llama()
    made.args = SimpleNamespace(**{"average_tokens_across_devices": True, "label_smoothing_factor": 0.0} | changes)
    return made


@pytest.mark.parametrize("kind, changes, count, words", [
    (Trainer, {"average_tokens_across_devices": False}, 5, "average_tokens_across_devices is off"),
    (Trainer, {}, None, "does not count the targets"),
    (Trainer, {"label_smoothing_factor": 0.1}, 5, "label_smoothing_factor is set"),
    (OwnLoss, {}, 5, "OwnLoss.compute_loss is not transformers' own"),
])  # fmt: skip
def test_why_a_loss_keeps_documents_where_they_are(kind: type, changes: dict[str, Any], count: Any, words: str) -> None:
    made = trainer_with(kind, **changes)
    reasons = wrong_loss(made, count), unknown_loss(made)
    assert words in reasons[kind is OwnLoss] and not reasons[kind is not OwnLoss]


def _hook(*given: Any) -> None:
    """Of a script."""


@pytest.mark.parametrize("change, whose", [
    (lambda made: None, ""), (lambda made: setattr(made, "model", torch.nn.Sequential(made.model)), ""),
    (lambda made: setattr(made.model, "loss_function", print), "print is not transformers' own"),
    (lambda made: setattr(made, "compute_loss_func", print), "print is not"),
    (lambda made: setattr(made.model, "forward", print), "print is not"),
    (lambda made: setattr(made.args, "neftune_noise_alpha", 5), "neftune"),
    (lambda made: setattr(made.model, "lm_head", type("Own", (torch.nn.Linear,), {"forward": _hook})(4, 4)), "_hook"),
    (lambda made: made.model.base_model.embed_tokens.register_forward_hook(_hook), "_hook"),
    *((lambda made, way=way: attrgetter(way)(made.model)(_hook), "_hook") for way in (
        "base_model.layers.0.register_forward_pre_hook", "base_model.layers.0.register_full_backward_pre_hook",
        "base_model.layers.0.register_full_backward_hook", "lm_head.weight.register_hook",
        "lm_head.weight.register_post_accumulate_grad_hook",
    )),
])  # fmt: skip
def test_what_a_script_puts_into_a_trainer_may_look_at_other_tokens(change: Any, whose: str) -> None:
    """Hooks of a weight may change its gradient before all ranks add theirs."""
    made = trainer_with(Trainer)
    change(made)
    assert whose in unknown_loss(made) if whose else unknown_loss(made) == wrong_loss(made, 5) == ""
    made.aux_loss_enabled = True
    assert "router" in wrong_loss(made, 5)


@pytest.mark.parametrize("name", [one for one in OF_A_STEP if one != "compute_loss_func"])
def test_a_loss_is_known_by_the_methods_that_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whatever class, replaced on it or on the trainer or model, and all that wrap each other."""
    named, on_it, on_model = (trainer_with(kind) for kind in (type("SFTTrainer", (OwnLoss,), {}), Trainer, Trainer))
    assert "OwnLoss" in unknown_loss(named)
    setattr(on_it, name, torch.enable_grad()(getattr(on_it, name)))
    assert unknown_loss(on_it) == ""
    setattr(on_it, name, torch.enable_grad()(wraps(getattr(on_it, name))(lambda *_: None)))
    assert f"Trainer.{name} is not" in unknown_loss(on_it), "functools.wraps gives it that name"
    setattr(on_it, name, partial(lambda *_: None))
    assert "lambda" in unknown_loss(on_it)
    setattr(on_it, name, update_wrapper(partial(torch.clone), lambda *_: None))
    assert "lambda" in unknown_loss(on_it)
    setattr(on_it, name, print)
    assert "print is not transformers' own" in unknown_loss(on_it)
    on_model.model.forward = lambda *given: None
    assert "lambda" in unknown_loss(on_model)
    monkeypatch.setattr(Trainer, name, lambda *given: None)
    assert "lambda" in unknown_loss(trainer_with(Trainer))


@pytest.mark.parametrize(("backends", "device"), [("cpu:gloo,cuda:nccl", "cuda:3"), ("cpu:gloo", "cpu")])
def test_where_a_model_that_is_still_on_the_cpu_trains(monkeypatch, backends: str, device: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: backends)
    assert structure.training_device(torch.nn.Linear(2, 2)) == torch.device(device)


def test_rows_and_masks_of_padding() -> None:
    """The row is taken out wherever it is; a mask that numbers documents becomes one of 0 and 1."""
    padded, other = torch.zeros(1, 1, 4), torch.zeros(1, 3)
    found = no_rows({"logits": padded, "hidden": (padded, other), "loss": None, "count": 5})
    assert found["logits"].shape == (1, 0, 4) and found["hidden"][0].shape == (1, 0, 4)
    assert found["hidden"][1] is other and found["loss"] is None and found["count"] == 5
    assert plain_mask({"attention_mask": torch.tensor([[0, 1, 1, 2]])})["attention_mask"].tolist() == [[0, 1, 1, 1]]


@pytest.mark.parametrize("output, loss", [
    ({"loss": torch.tensor(2.0)}, 2.0), ((torch.tensor(2.0), torch.zeros(1, 3)), 2.0),
    ({"loss": torch.tensor([2.0, 3.0])}, None), ({"loss": 2.0}, None), ((torch.zeros(1, 3),), None),
    ({"logits": torch.zeros(1, 3)}, None), (torch.tensor(2.0), None),
])  # fmt: skip
def test_the_loss_in_what_a_model_gave(output: Any, loss: float | None) -> None:
    assert loss_of(output) == loss
