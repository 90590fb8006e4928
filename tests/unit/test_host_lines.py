"""What the wrappers around Trainer do by themselves: what is logged, and which loss is refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import training
from deepspeed_cad.integrations import structure
from deepspeed_cad.integrations.positions import no_rows, plain_mask
from deepspeed_cad.integrations.trainer import unknown_loss, wrong_loss
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
    (OwnLoss, {}, 5, "OwnLoss computes a loss of its own"),
])  # fmt: skip
def test_why_a_loss_keeps_documents_where_they_are(kind: type, changes: dict[str, Any], count: Any, words: str) -> None:
    made = trainer_with(kind, **changes)
    reasons = wrong_loss(made, count), unknown_loss(made)
    assert words in reasons[kind is OwnLoss] and not reasons[kind is not OwnLoss]


def test_the_trainers_own_loss_is_known() -> None:
    made = trainer_with(Trainer)
    assert wrong_loss(made, 5) == unknown_loss(made) == ""
    made.model.loss_function = print
    assert "loss_function is the script's own" in unknown_loss(made)
    made.compute_loss_func = print
    assert "compute_loss_func" in unknown_loss(made)
    assert "neftune" in unknown_loss(trainer_with(Trainer, neftune_noise_alpha=5))


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
