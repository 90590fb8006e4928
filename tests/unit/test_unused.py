"""Keys that do nothing where they are set: one line each, and none where they act or were not set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import training

import deepspeed_cad
from deepspeed_cad.config import CADConfig
from deepspeed_cad.profiles import Profile, choose_profile
from deepspeed_cad.profiles.choice import SHIPPED
from deepspeed_cad.session import Session, close_session
from deepspeed_cad.unused import unused_in_pipelines, unused_keys, unused_outside_pipelines

PAIRS = choose_profile("pairs", torch.device("cpu"))
SECONDS = Profile.load(SHIPPED / "h200_flash_attn_4.json")
SERVERS = {"servers": {"reserved": 1}}


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    close_session()


@pytest.mark.parametrize("cost", [PAIRS, SECONDS], ids=["pairs", "seconds"])
@pytest.mark.parametrize(
    "block",
    [
        {},
        SERVERS,
        {"straggler_relief": 0},
        {"waves": 1},
        {"keep": "host"},
        {**SERVERS, "keep": "device"},
        {**SERVERS, "waves": 1},
        {**SERVERS, "straggler_relief": 0, "trainers_serve": False},
    ],
)
def test_nothing_is_said_of_what_was_not_asked_for(block: dict, cost: Profile) -> None:
    config = CADConfig.from_dict(block)
    assert unused_keys(config, cost) == unused_in_pipelines(config, cost) == unused_outside_pipelines(config) == []


@pytest.mark.parametrize(
    ("block", "cost", "text"),
    [
        ({"trainers_serve": False}, SECONDS, '"trainers_serve" is false and does nothing: no rank is reserved'),
        ({**SERVERS, "straggler_relief": 0.1}, SECONDS, '"straggler_relief" is 0.1 and does nothing: beside reserved'),
        ({**SERVERS, "straggler_relief": 0.1}, PAIRS, '"straggler_relief" is 0.1 and does nothing: beside reserved'),
        ({**SERVERS, "keep": "host"}, PAIRS, '"keep" is "host" and does nothing on reserved servers: trainers park'),
        ({"straggler_relief": 0.1}, PAIRS, '"straggler_relief" is 0.1 and does nothing: lateness is measured in sec'),
    ],
)
def test_what_does_nothing_is_said(block: dict, cost: Profile, text: str) -> None:
    (said,) = unused_keys(CADConfig.from_dict(block), cost)
    assert said.startswith(text)


def test_in_a_pipeline_one_line_says_it() -> None:
    """Where costs are no seconds the session has said so."""
    config = CADConfig(straggler_relief=0.1)
    (said,) = unused_in_pipelines(config, SECONDS)
    assert '"straggler_relief" is 0.1 and does nothing in a pipeline' in said
    assert len(unused_keys(config, SECONDS) + unused_in_pipelines(config, SECONDS)) == 1
    assert len(unused_keys(config, PAIRS) + unused_in_pipelines(config, PAIRS)) == 1


@pytest.mark.parametrize(("key", "value"), [("waves", 4), ("memory", 2)])
@pytest.mark.parametrize("beside", [{}, SERVERS], ids=["in place", "beside servers"])
def test_waves_and_memory_act_everywhere(key: str, value: int, beside: dict) -> None:
    config = CADConfig.from_dict({key: value, **beside})
    assert unused_keys(config, SECONDS) == unused_in_pipelines(config, SECONDS) == []


def test_a_key_of_pipelines_is_said_once_of_other_models(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        deepspeed_cad.apply(training.tiny_llama(), {"pipeline_in_flight": 2})
    assert caplog.text.count('"pipeline_in_flight" is 2 and does nothing: the model is not a DeepSpeed') == 1


@pytest.mark.parametrize(("rank", "count"), [(0, 1), (1, 0)])
def test_rank_0_warns_once(rank: int, count: int, caplog: pytest.LogCaptureFixture) -> None:
    session = Session(CADConfig(trainers_serve=False), torch.device("cpu"))
    try:
        assert caplog.text.count("trainers_serve") == 1
        session.rank = rank
        session.warn(["another", "another"])
        assert caplog.text.count("another") == count
    finally:
        session.close()
