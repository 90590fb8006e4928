"""What a command line or the environment asks for, and how a process that was asked for CAD ends."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from deepspeed_cad import run
from deepspeed_cad.cli import accelerate_cad
from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADConfigError
from deepspeed_cad.launch import armed
from deepspeed_cad.launch.armed import Armed
from deepspeed_cad.request import VARIABLE, Request, read_environment


@pytest.fixture(autouse=True)
def nothing_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")


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
    monkeypatch.setenv(VARIABLE, '{"cad": {"tolerance": 0.2}, "asked_by": "outside"}')
    if tolerance is None:
        with pytest.raises(CADConfigError, match="--cad and outside disagree in tolerance: 0.05 and 0.2"):
            run.read_request(*flags)
    else:
        assert run.read_request(*flags) == Request(CADConfig(tolerance=tolerance), asked_by)


@pytest.mark.parametrize(("words", "code"), [(["--help"], 0), (["-h"], 0), (["train"], 2), ([], 2)])
def test_usage(words: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert accelerate_cad.main(words) == code
    said = capsys.readouterr()
    assert "usage: accelerate-cad launch" in (said.err if code else said.out)


@pytest.mark.parametrize(
    ("check", "settled", "code"),
    [
        (None, False, 0),
        (SimpleNamespace(problem=lambda: "no step"), False, armed.EXIT_CODE),
        (SimpleNamespace(problem=lambda: "no step"), True, 0),
        (SimpleNamespace(problem=lambda: ""), False, 0),
    ],
    ids=["nothing imported", "a problem", "told before", "none"],
)
def test_how_a_process_that_was_asked_ends(check, settled: bool, code: int, capsys) -> None:
    armed = Armed.__new__(Armed)
    armed.check, armed._settled = check, settled
    assert armed.settle() == code
    assert ("no step" in capsys.readouterr().err) == bool(code)
    assert armed.settle() == 0, "once is enough"


@pytest.mark.parametrize("late", [["--cad", "{}"], ["--lr", "1", "--cad={}"], ["--cad_config", "cad.json"]])
def test_a_flag_behind_the_script_is_refused(late: list[str], tmp_path, capsys) -> None:
    (tmp_path / "train.py").write_text("raise AssertionError('the script ran')")
    assert run.main([str(tmp_path / "train.py"), *late]) == 2
    assert f"{late[-1].split('=')[0] if '=' in late[-1] else late[-2]} stands behind" in capsys.readouterr().err
    for words in (["launch", "train.py", *late], ["launch", "--num_processes", "2", *late, "train.py"]):
        assert accelerate_cad.main(words) == 2
        assert "must come first" in capsys.readouterr().err


def test_a_script_may_have_a_flag_of_that_name() -> None:
    run.refuse_late_flags(["--cad", "computer aided design"], "before it")
