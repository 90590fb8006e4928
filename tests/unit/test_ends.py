"""How what runs beside training ends: the look-ahead thread, and the last words of a process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import training
from deepspeed_cad.integrations import structure
from deepspeed_cad.integrations import transformers as room
from deepspeed_cad.integrations.structure import default_attention, find_decoder
from deepspeed_cad.integrations.verify import loss_of
from transformers import LlamaConfig, PretrainedConfig

import deepspeed_cad
from deepspeed_cad.ahead.worker import Worker
from deepspeed_cad.session import close_session


def test_the_look_ahead_thread_ends_after_its_jobs() -> None:
    worker, done = Worker(), []
    worker.submit(lambda: done.append("a job"))
    worker.close()
    assert done == ["a job"] and not worker._thread.is_alive()


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
    try:
        deepspeed_cad.apply(model, {"overlap": overlap})
    finally:
        close_session()
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
