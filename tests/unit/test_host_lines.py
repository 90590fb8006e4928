"""What the wrappers around Trainer and callbacks do by themselves: what is logged, and which loss is refused."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import training  # installs what the integrations need
from deepspeed_cad.integrations import callback, structure, trainer
from deepspeed_cad.integrations import transformers as room
from deepspeed_cad.integrations.callback import CADCallback, Savings, estimate_savings
from deepspeed_cad.integrations.positions import no_rows
from deepspeed_cad.integrations.structure import default_attention, find_decoder
from deepspeed_cad.integrations.trainer import unknown_loss, wrong_loss
from deepspeed_cad.integrations.verify import loss_of
from transformers import LlamaConfig, PretrainedConfig, Trainer

import deepspeed_cad
from deepspeed_cad.config import CADConfig
from deepspeed_cad.report.statistics import Statistics

FIGURES = Statistics(micro_batches=4, planning_s=0.012, waited_s=1.5, bytes_sent=3 << 20, slowest_before=6.0,
                     slowest=4.5, mean=4.0)  # fmt: skip


class Session:
    """What a binding's session says."""

    def __init__(self) -> None:
        self.config = CADConfig()
        self.statistics, self.cost = FIGURES, SimpleNamespace(unit="seconds")

    def take_statistics(self, reader: str) -> Statistics:
        return FIGURES


def binding_of(session: Session) -> Any:
    decoder = SimpleNamespace(layers=torch.nn.ModuleList(torch.nn.Identity() for _ in range(6)))
    return SimpleNamespace(session=session, feed=SimpleNamespace(keys=["full", "windowed"]), decoder=lambda: decoder)


@pytest.mark.parametrize(
    ("logs", "statistics", "savings"),
    [({"loss": 2.0}, True, False), ({"eval_loss": 2.0}, False, False), ({"train_runtime": 9.0}, False, True)],
)
def test_what_the_trainer_logs(monkeypatch, logs: dict, statistics: bool, savings: bool) -> None:
    seen: list[dict[str, float]] = []
    monkeypatch.setattr(trainer, "find_binding", lambda model: binding_of(Session()))
    log = trainer._wrap_log(lambda self, logs: seen.append(dict(logs)))
    log(SimpleNamespace(model=object(), callback_handler=SimpleNamespace(callbacks=[CADCallback()])), dict(logs))
    assert seen[0].items() >= logs.items()
    assert ("cad/sent_MiB" in seen[0]) is statistics and ("cad/saved_s" in seen[0]) is savings


def test_a_trainer_without_cad_logs_its_own(monkeypatch) -> None:
    monkeypatch.setattr(trainer, "find_binding", lambda model: None)
    log = trainer._wrap_log(lambda self, logs: logs)
    assert log(SimpleNamespace(model=object()), {"loss": 1.0}) == {"loss": 1.0}
    assert log(SimpleNamespace(), {"train_runtime": 1.0}) == {"train_runtime": 1.0}


def test_the_callback_says_what_a_step_was(monkeypatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(callback, "find_binding", lambda model: binding_of(Session()))
    state = SimpleNamespace(global_step=7, is_world_process_zero=True)
    with caplog.at_level(logging.INFO, "deepspeed_cad"):
        CADCallback().on_log(None, state, None, {"loss": 1.0}, object())
        CADCallback().on_log(None, state, None, {"eval_loss": 1.0}, object())
        CADCallback().on_log(None, state, None, {"loss": 1.0}, None)
    assert [one.getMessage() for one in caplog.records] == [
        "step 7: attention of the slowest rank over the mean 1.125, without CAD 1.500; 3.0 MiB sent, 3.0 ms to plan a "
        "micro-batch, 1.500 s waited for exchanges"
    ]


def test_savings_are_those_of_all_layers() -> None:
    """Six layers of two kinds: three of each, and the sums count one of each kind."""
    assert estimate_savings(binding_of(Session())) == Savings(3 * 1.5, 3 * 2.0, 3 * 0.5)


class OwnLoss(Trainer):
    """A trainer with a loss of its own."""

    def compute_loss(self, *given: Any, **more: Any) -> Any:
        return None


def trainer_with(kind: type, **changes: Any) -> Any:
    made = object.__new__(kind)
    made.args = SimpleNamespace(**{"average_tokens_across_devices": True, "label_smoothing_factor": 0.0} | changes)
    return made


@pytest.mark.parametrize(
    ("kind", "changes", "count", "words"),
    [
        (Trainer, {"average_tokens_across_devices": False}, 5, "average_tokens_across_devices is off"),
        (Trainer, {}, None, "does not count the targets"),
        (Trainer, {"label_smoothing_factor": 0.1}, 5, "label_smoothing_factor is set"),
        (OwnLoss, {}, 5, "OwnLoss computes a loss of its own"),
    ],
)
def test_why_a_loss_keeps_documents_where_they_are(kind: type, changes: dict[str, Any], count: Any, words: str) -> None:
    made = trainer_with(kind, **changes)
    reasons = wrong_loss(made, count), unknown_loss(made)
    assert words in reasons[kind is OwnLoss] and not reasons[kind is not OwnLoss]


def test_the_trainers_own_loss_is_known() -> None:
    made = trainer_with(Trainer)
    assert wrong_loss(made, 5) == unknown_loss(made) == ""
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


def test_the_row_of_padding_is_taken_out_wherever_it_is() -> None:
    padded, other = torch.zeros(1, 1, 4), torch.zeros(1, 3)
    found = no_rows({"logits": padded, "hidden": (padded, other), "loss": None, "count": 5})
    assert found["logits"].shape == (1, 0, 4) and found["hidden"][0].shape == (1, 0, 4)
    assert found["hidden"][1] is other and found["loss"] is None and found["count"] == 5


class WithoutSdpa:
    """A model that has only attention of its own."""

    _supports_sdpa = False


@pytest.mark.parametrize(
    ("config", "name"), [(LlamaConfig(), "sdpa"), (PretrainedConfig(), "sdpa"), (SimpleNamespace(), "eager")]
)
def test_the_attention_that_transformers_would_choose(monkeypatch, config: Any, name: str) -> None:
    known = {LlamaConfig: structure.MODEL_FOR_CAUSAL_LM_MAPPING[LlamaConfig], SimpleNamespace: WithoutSdpa}
    monkeypatch.setattr(structure, "MODEL_FOR_CAUSAL_LM_MAPPING", known)
    assert default_attention(config) == name


@pytest.mark.parametrize(("overlap", "alternate"), [("pingpong", True), ("local_first", False)])
def test_every_layer_alternates_where_it_is_asked_for(monkeypatch, overlap: str, alternate: bool) -> None:
    layers: list[torch.nn.Module] = []
    monkeypatch.setattr(room, "alternate", layers.append)
    model = training.tiny_llama()
    deepspeed_cad.apply(model, {"overlap": overlap})
    assert layers == (list(find_decoder(model).layers) if alternate else [])


@pytest.mark.parametrize(
    ("output", "loss"),
    [
        ({"loss": torch.tensor(2.0)}, 2.0),
        ((torch.tensor(2.0), torch.zeros(1, 3)), 2.0),
        ({"loss": torch.tensor([2.0, 3.0])}, None),
        ({"loss": 2.0}, None),
        ((torch.zeros(1, 3),), None),
        ({"logits": torch.zeros(1, 3)}, None),
        (torch.tensor(2.0), None),
    ],
)
def test_the_loss_in_what_a_model_gave(output: Any, loss: float | None) -> None:
    assert loss_of(output) == loss
