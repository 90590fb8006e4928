"""What importing the package costs, offers and refuses; the oldest versions of other packages are one table."""

import re
import shutil
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import training
from scripts import ROOT

import deepspeed_cad
from deepspeed_cad import errors, native, session
from deepspeed_cad.cli.doctor import try_packages
from deepspeed_cad.config import CADConfig
from deepspeed_cad.cost import PAIRS
from deepspeed_cad.layout import Layout
from deepspeed_cad.planner import HeadShape, PlanInput, make_plan
from deepspeed_cad.server import process
from deepspeed_cad.server.launch import Split
from deepspeed_cad.version import OLDEST, is_too_old, refuse_old_packages

HEAVY = ("torch", "numpy", "transformers", "deepspeed", "accelerate", "greenlet")


@pytest.mark.parametrize("statement", [
    "import deepspeed_cad",
    "import deepspeed_cad; deepspeed_cad.CADConfig.from_dict({}); deepspeed_cad.CADError; dir(deepspeed_cad)",
    "import deepspeed_cad; deepspeed_cad.install()",
    "import deepspeed_cad.launch.deepspeed_hook, deepspeed_cad.cli",
    "from deepspeed_cad.cli import main\ntry:\n main(['doctor', '-h'])\nexcept SystemExit:\n pass",
])  # fmt: skip
def test_imports_nothing_heavy(statement: str) -> None:
    code = f"{statement}\nimport sys; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "[]"), done.stderr


@pytest.mark.parametrize("source, reason", [
    (None, "does not exist"), ("not a library", "cannot be loaded"),
    (f'extern "C" int cad_abi_version() {{ return {native.ABI_VERSION}; }}', ""),
    ('extern "C" int cad_abi_version() { return 999; }', "stale: its ABI version is 999"),
    ('extern "C" int another() { return 1; }', "so it is another one"),
], ids=["missing", "broken", "fits", "stale", "foreign"])  # fmt: skip
def test_a_library_that_cannot_be_used_is_refused_with_the_reason(tmp_path, source, reason) -> None:
    path, text = tmp_path / "_native.so", tmp_path / "library.cpp"
    for file in () if source is None else (path, text):
        file.write_text(source)
    if "extern" in (source or ""):
        if shutil.which("g++") is None:
            pytest.skip("no g++")
        subprocess.run(["g++", "-shared", "-fPIC", "-o", path, text], check=True)
    library, why = native._load_once(path)
    assert (library is not None) == (reason == "") and reason in why and ("install" in why) == bool(reason)


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_load_once", lambda: (None, "the library was not built"))


def test_without_the_library_a_session_refuses_before_ranks_meet(no_library, monkeypatch) -> None:
    monkeypatch.setattr(session, "open_groups", lambda *_: pytest.fail("ranks met"))
    with pytest.raises(errors.CADError, match="^the library was not built$"):
        session.open_session(CADConfig(), torch.device("cpu"))
    assert session.current_session() is None


def test_without_the_library_a_server_tells_all_ranks(no_library, monkeypatch) -> None:
    """Through the meeting, so that trainers end with the same words."""
    meeting = Mock(**{"refuse.side_effect": errors.CADConfigError})
    monkeypatch.setattr(process, "Rendezvous", lambda *given: meeting)
    server = process._Server(Split(2, 1, 2, "127.0.0.1:1"), CADConfig(servers={"reserved": 1}), torch.device("cpu"))
    with pytest.raises(errors.CADConfigError):
        server.open()
    assert re.match("server 2 on .*: the library was not built$", meeting.refuse.call_args.args[0])


def test_without_the_library_nothing_is_planned_and_the_doctor_says_why(no_library) -> None:
    problem = PlanInput(Layout.from_rank_lengths([[10], [20]]).tick(), HeadShape(1, 1, 8, 8, 2), PAIRS)
    with pytest.raises(errors.CADError, match="the library was not built"):
        make_plan(problem)
    found = try_packages()[-1]
    assert not found.ok and found.detail == "the library was not built" and "g++" in found.remedy


@pytest.mark.parametrize("version, old", [
    ("4.55.4", True), ("4.9", True), ("3.99.1", True), ("4.57.0", False), ("4.57.0.dev0", False), ("5.0.0rc1", False),
])  # fmt: skip
def test_versions_are_compared_by_number(version: str, old: bool, monkeypatch) -> None:
    monkeypatch.setitem(OLDEST, "transformers", "4.57")
    assert is_too_old("transformers", version) is old


@pytest.mark.parametrize("package", OLDEST)
def test_an_old_package_is_refused_by_name(package: str, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, package, SimpleNamespace(__version__="0.1.2"))
    words = rf"{package} 0\.1\.2 is installed.*needs {OLDEST[package]} or newer"
    with pytest.raises(errors.CADUnsupportedError, match=words):
        refuse_old_packages()


def test_an_old_transformers_is_refused_when_cad_is_turned_on(monkeypatch) -> None:
    monkeypatch.setattr("transformers.__version__", "4.55.4")
    with pytest.raises(errors.CADUnsupportedError, match="transformers 4.55.4 is installed"):
        deepspeed_cad.apply(training.tiny_llama())
    deepspeed_cad.apply(training.tiny_llama(), {"enabled": False})


def test_packaging_and_pages_say_the_same() -> None:
    declared = dict(re.findall(r'"(\w+)>=([\d.]+)"', (ROOT / "pyproject.toml").read_text()))
    assert {package: declared[package] for package in OLDEST} == OLDEST
    readme = (ROOT / "README.md").read_text().split("## Environment")[1].split("\n## ")[0]
    stated = {name.lower(): version for name, version in re.findall(r"(\w+) (\d+\.\d+)(?:\+| and newer)", readme)}
    assert {package: stated[package] for package in OLDEST} == OLDEST
    models = (ROOT / "docs" / "models.md").read_text()
    assert re.search(rf"`AttentionMaskInterface`; {re.escape(OLDEST['transformers'])} or\s+newer", models)
    tried = re.search(r"^TRANSFORMERS \?= ([\d.]+)\.\*", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert tried and tried[1] == OLDEST["transformers"]
