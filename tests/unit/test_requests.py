"""What a command line asks for, and how a process that was asked for CAD ends."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest

from deepspeed_cad import run
from deepspeed_cad.cli import accelerate_cad
from deepspeed_cad.config import CADConfig
from deepspeed_cad.engine.initialize import initialize
from deepspeed_cad.errors import CADConfigError
from deepspeed_cad.launch import armed
from deepspeed_cad.launch.armed import Armed
from deepspeed_cad.request import VARIABLE, Request


@pytest.fixture(autouse=True)
def nothing_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")


def test_a_file(tmp_path) -> None:
    path = tmp_path / "cad.json"
    path.write_text('{"tolerance": 0.25}')
    assert run.read_request(None, str(path)) == Request(CADConfig(tolerance=0.25), f"--cad_config {path}")


@pytest.mark.parametrize(
    ("surrounding", "expected"), [("", CADConfig()), ('{"tolerance": 0.25}', CADConfig(tolerance=0.25))]
)
def test_no_flag(monkeypatch: pytest.MonkeyPatch, surrounding: str, expected: CADConfig) -> None:
    monkeypatch.setenv(VARIABLE, surrounding)
    assert run.read_request(None, None).config == expected


def test_a_flag_and_the_environment_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, '{"tolerance": 0.5}')
    with pytest.raises(CADConfigError, match="--cad and DEEPSPEED_CAD_CONFIG disagree in tolerance: 0.25 and 0.5"):
        run.read_request('{"tolerance": 0.25}', None)


@pytest.mark.parametrize("is_module", [True, False])
def test_the_script_is_main_and_sees_its_own_words(monkeypatch, tmp_path, is_module: bool) -> None:
    """As a module, `sys.argv[0]` is its file while it runs, as under `python -m`."""
    path = tmp_path / "a_script_that_says.py"
    path.write_text(
        "import json, sys, pathlib\n"
        "pathlib.Path('said.json').write_text(json.dumps([__name__, *sys.argv, __name__ in sys.modules and\n"
        "    getattr(sys.modules[__name__], '__file__', '')]))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run.sys, "argv", ["run", "other", "words"])
    monkeypatch.setattr(run.sys, "path", ["", *run.sys.path])
    monkeypatch.setattr(run, "arm", lambda: None)
    name = path.stem if is_module else str(path)
    assert run.run_script(name, ["--steps", "3"], is_module, Request(CADConfig(enabled=False), "a test")) == 0
    said = json.loads((tmp_path / "said.json").read_text())
    assert said == ["__main__", str(path), "--steps", "3", str(path)]


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        (["--cad", "{}", "train.py", "--cad", "x"], 2),
        (["--cad={}", "--num_processes", "2", "train.py"], 1),
        (["--cad_config", "a.json", "--cad-config=b.json", "train.py"], 3),
        (["--num_processes", "2", "train.py"], 0),
        (["--cad", "{}"], 2),
    ],
)
def test_flags_of_ours_come_first(words: list[str], ours: int) -> None:
    assert accelerate_cad._split(words) == (words[:ours], words[ours:])


@pytest.mark.parametrize(("words", "code"), [(["--help"], 0), (["-h"], 0), (["train"], 2), ([], 2)])
def test_usage(words: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert accelerate_cad.main(words) == code
    said = capsys.readouterr()
    assert "usage: accelerate-cad launch" in (said.err if code else said.out)


def test_accelerate_takes_the_place_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, words: became.append(words[1:]))
    monkeypatch.setitem(accelerate_cad.sys.modules, "_deepspeed_cad_autoload", SimpleNamespace())
    assert accelerate_cad.main(["launch", "--cad", '{"tolerance": 0.25}', "--num_processes", "2", "train.py"]) == 0
    assert became == [["-m", "accelerate.commands.launch", "--num_processes", "2", "train.py"]]
    assert json.loads(os.environ[VARIABLE])["cad"]["tolerance"] == 0.25


def test_a_mistake_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert accelerate_cad.main(["launch", "--cad", "x", "train.py"]) == 2
    assert capsys.readouterr().err.startswith("accelerate-cad launch: --cad 'x' is not JSON")


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


def test_deepspeed_alone_where_cad_is_off() -> None:
    given = initialize(lambda *args, **kwargs: [args, kwargs, None, None], {"enabled": False}, (1,), {"model": 2})
    assert given == ((1,), {"model": 2}, None, None)


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
