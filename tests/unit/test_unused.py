"""Keys that do nothing where they are set: one line each, and none where they act or were not set."""

from __future__ import annotations

import pytest
import torch

from deepspeed_cad.config import CADConfig
from deepspeed_cad.report.session_lines import unused_keys
from deepspeed_cad.session import Session

SERVERS = {"servers": {"reserved": 1}}


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({}, ""),
        (SERVERS, ""),
        ({"keep": "host"}, ""),
        ({**SERVERS, "trainers_serve": False}, ""),
        ({"servers": {"joined": 1}, "on_server_failure": "continue"}, ""),
        ({"trainers_serve": False}, '"trainers_serve" is false and does nothing: no rank is reserved'),
        ({**SERVERS, "keep": "host"}, '"keep" is "host" and does nothing on reserved servers: trainers park'),
        ({**SERVERS, "on_server_failure": "continue"}, '"on_server_failure" is "continue" and servers are part'),
    ],
)
def test_what_does_nothing_is_said(block: dict, text: str) -> None:
    assert [line[: len(text)] for line in unused_keys(CADConfig.from_dict(block))] == [text] * bool(text)


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
