"""What a command line or the environment asks for, without what it starts."""

import os
import sys
from contextlib import nullcontext
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

import _deepspeed_cad_autoload as hook
from deepspeed_cad import run
from deepspeed_cad.cli import accelerate_cad
from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADConfigError
from deepspeed_cad.launch import armed
from deepspeed_cad.request import VARIABLE, Request, read_environment, settle_request


@pytest.fixture(autouse=True)
def nothing_around(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment is put back afterwards."""
    monkeypatch.setenv(VARIABLE, "")


def test_a_request_survives_the_environment(monkeypatch) -> None:
    assert read_environment() is None
    given = Request(CADConfig(tolerance=0.2, kernel="auto"), "--cad")
    given.publish()
    assert read_environment() == given and " " not in os.environ[VARIABLE]
    monkeypatch.setenv(VARIABLE, '{"tolerance": 0.2}')  # as a user may write it
    assert read_environment() == Request(CADConfig(tolerance=0.2), "DEEPSPEED_CAD_CONFIG")


@pytest.mark.parametrize(
    ("text", "said"), [("0.2", "expected an object"), ("yes", "is not JSON"), ('{"cad": {"x": 1}}', "unknown key")]
)
def test_a_bad_request(monkeypatch, text: str, said: str) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(CADConfigError, match=said):
        read_environment()


@pytest.mark.parametrize("flags, tolerance, asked_by", [
    ((None, None), 0.2, "outside"), (('{"tolerance": 0.2}', None), 0.2, "--cad"), (("{}", None), None, ""),
])  # fmt: skip
def test_a_request_inside_another_agrees_with_it(monkeypatch, flags, tolerance, asked_by) -> None:
    monkeypatch.setenv(VARIABLE, '{"cad": {"tolerance": 0.2}, "asked_by": "outside"}')
    if tolerance is None:
        with pytest.raises(CADConfigError, match="--cad and outside disagree in tolerance: 0.05 and 0.2"):
            run.read_request(*flags)
    else:
        assert run.read_request(*flags) == Request(CADConfig(tolerance=tolerance), asked_by)


def test_a_call_of_a_script_agrees_with_its_launcher(monkeypatch) -> None:
    assert settle_request(None, "a call") == CADConfig()
    monkeypatch.setenv(VARIABLE, '{"cad": {"tolerance": 0.2}, "asked_by": "outside"}')
    assert settle_request(None, "a call") == settle_request({"tolerance": 0.2}, "a call") == CADConfig(tolerance=0.2)
    with pytest.raises(CADConfigError, match="outside and a call disagree in tolerance: 0.2 and 0.05"):
        settle_request(CADConfig(), "a call")


@pytest.mark.parametrize("late", [["--cad", "{}"], ["--lr", "1", "--cad={}"], ["--cad_config", "cad.json"]])
def test_a_flag_behind_the_script_is_refused(late: list[str], tmp_path, capsys) -> None:
    run.refuse_late_flags(["--cad", "computer aided design"], "before it")  # which a script may have
    (tmp_path / "train.py").write_text("raise AssertionError('the script ran')")
    assert run.main([str(tmp_path / "train.py"), *late]) == 2
    assert f"{late[-1].split('=')[0] if '=' in late[-1] else late[-2]} stands behind" in capsys.readouterr().err
    for words in (["launch", "train.py", *late], ["launch", "--num_processes", "2", *late, "train.py"]):
        assert accelerate_cad.main(words) == 2 and "must come first" in capsys.readouterr().err


@pytest.mark.parametrize("main, words, said", [
    (run.main, ["--cad", "{tolerance: 1}", "train.py"], "is not JSON"),
    (run.main, ["-m", "--cad_config", "none.json", "train"], "cannot be read"),
    (run.main, ["train.py"], "is not there"),
    (accelerate_cad.main, ["launch", "--cad", '{"bogus": 1}', "train.py"], 'unknown key "bogus"'),
    (accelerate_cad.main, ["launch", "--cad", '{"servers": {"joined": 1}}', "--no_python", "x"], "keep from"),
    (accelerate_cad.main, ["train"], "usage: accelerate-cad launch"),
])  # fmt: skip
def test_a_bad_command_line(started, tmp_path, monkeypatch, capsys, main: Any, words: list[str], said: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2 and not started
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.fixture
def started(monkeypatch) -> list[list[str]]:
    """What accelerate-cad would have become."""
    words: list[list[str]] = []
    monkeypatch.setitem(sys.modules, "_deepspeed_cad_autoload", hook)
    monkeypatch.setattr(os, "execv", lambda program, all_words: words.append(all_words))
    return words


@pytest.mark.parametrize("ours, block, asked_by", [
    (["--cad", '{"tolerance": 0.1}'], {"tolerance": 0.1}, "--cad"),
    (["--cad_config=block.json"], {"overlap": "none"}, "--cad_config block.json"),
    (["--cad", '{"enabled": false, "servers": {"joined": 1}}'], {"enabled": False, "servers": {"joined": 1}}, "--cad"),
    ([], {}, "accelerate-cad launch"),
])  # fmt: skip
def test_what_accelerate_cad_gives_to_accelerate(started, tmp_path, monkeypatch, ours, block, asked_by) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "block.json").write_text('{"overlap": "none"}')
    theirs = ["--num_processes", "2", "train.py", "--cad", "{}" if ours else "x"]  # what stands first is meant
    assert accelerate_cad.main(["launch", *ours, *theirs]) == 0
    assert started == [[sys.executable, "-m", "accelerate.commands.launch", *theirs]]
    assert read_environment() == Request(CADConfig.from_dict(block), asked_by)


def test_our_launcher_comes_first_where_ranks_are_reserved() -> None:
    for module, ours in ([], ["-m", "deepspeed_cad.run"]), (["--module"], ["deepspeed_cad.run", "-m"]):
        launch, script = ["--num_processes", "2", *module], ["train.py", "--lr", "1"]
        assert accelerate_cad.insert_run([*launch, *script]) == [*launch, *ours, *script]
        script = ["train.py", "--", "--lr"]
        assert accelerate_cad.insert_run([*launch, *script]) == [*launch, *ours, *script]


def test_accelerate_cad_needs_the_hook(started, monkeypatch, capsys) -> None:
    monkeypatch.delitem(sys.modules, "_deepspeed_cad_autoload")
    assert accelerate_cad.main(["launch", "train.py"]) == 2 and not started
    assert "the installed hook is not active" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--help", "launch"], ["launch", "--help"], ["launch", "--cad", "{}", "-h"]])
def test_help_of_accelerate_cad_says_what_its_flags_mean(started, capsys, words: list[str]) -> None:
    try:
        assert accelerate_cad.main(words) == 0
    except SystemExit as end:
        assert end.code == 0
    shown = capsys.readouterr().out
    assert 'the "cad" block, such as' in shown and "a JSON file with the block in it" in shown and not started


@pytest.mark.parametrize("block, error", [
    ({}, ""), ({"cad": {"tolerance": 0.2}}, ""), ({"cad": None}, '"cad" is null; expected an object'),
    ({"cad": {}}, '--cad and the "cad" block of the DeepSpeed JSON disagree in tolerance: 0.2 and 0.05'),
])  # fmt: skip
def test_a_request_is_the_block_of_every_json(block: dict[str, Any], error: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(armed, "atexit", mock.Mock())
    monkeypatch.setattr(os, "_exit", os._exit)  # is put back
    given = mock.Mock(initialize=lambda original, block, *call: (block["tolerance"], *call))
    monkeypatch.setitem(sys.modules, "deepspeed_cad.integrations.deepspeed.initialize", given)
    deepspeed: Any = ModuleType("deepspeed")
    deepspeed.initialize = lambda args=None, model=None, config=None: "without"
    armed.Armed(Request(CADConfig(tolerance=0.2), "--cad")).after_import(deepspeed)
    with pytest.raises(ValueError, match=error) if error else nullcontext():
        assert deepspeed.initialize(7, config=block) == (0.2, (7,), {"config": block})
