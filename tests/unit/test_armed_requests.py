"""A request survives the environment, and agrees with another one around it."""

from __future__ import annotations

import os

import pytest

from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADConfigError
from deepspeed_cad.request import VARIABLE, Request, read_environment


@pytest.mark.parametrize("block", [{}, {"tolerance": 0.2, "kernel": "auto"}])
def test_a_request_survives_the_environment(monkeypatch, block: dict) -> None:
    monkeypatch.setenv(VARIABLE, "")
    assert read_environment() is None
    given = Request(CADConfig.from_dict(block), "--cad")
    given.publish()
    assert read_environment() == given
    assert " " not in os.environ[VARIABLE]


def test_a_user_may_write_the_block_alone(monkeypatch) -> None:
    monkeypatch.setenv(VARIABLE, '{"tolerance": 0.2}')
    assert read_environment() == Request(CADConfig(tolerance=0.2), "DEEPSPEED_CAD_CONFIG")


@pytest.mark.parametrize(
    ("text", "said"), [("0.2", "expected an object"), ("yes", "is not JSON"), ('{"cad": {"x": 1}}', "unknown key")]
)
def test_a_bad_request(monkeypatch, text: str, said: str) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(CADConfigError, match=said):
        read_environment()


@pytest.mark.parametrize(
    ("flags", "tolerance", "asked_by"),
    [((None, None), 0.2, "outside"), (('{"tolerance": 0.2}', None), 0.2, "--cad"), (("{}", None), None, "")],
)
def test_a_request_inside_another_agrees_with_it(monkeypatch, flags, tolerance, asked_by) -> None:
    from deepspeed_cad.run import read_request

    monkeypatch.setenv(VARIABLE, '{"cad": {"tolerance": 0.2}, "asked_by": "outside"}')
    if tolerance is None:
        with pytest.raises(CADConfigError, match="--cad and outside disagree in tolerance: 0.05 and 0.2"):
            read_request(*flags)
    else:
        assert read_request(*flags) == Request(CADConfig(tolerance=tolerance), asked_by)
