"""What compiles the library: which compiler is taken, and what is said where there is none."""

import subprocess
import sys
from pathlib import Path

import pytest
from scripts import ROOT

sys.path.append(str(ROOT))

import _deepspeed_cad_build as build


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that alone is on the PATH; no package ziglang, and no $CXX."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build, "find_spec", lambda name: None)
    for hook in ("wheel", "editable"):
        monkeypatch.setattr(build.build_meta, f"get_requires_for_build_{hook}", lambda config_settings: ["wheel"])
    return tmp_path


def program(path: Path, text: str = "exit 0") -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("names", [["g++", "c++"], ["c++", "clang++"], ["clang++"]])
def test_the_first_on_the_path(machine: Path, names: list[str]) -> None:
    for name in names:
        program(machine / name)
    assert build.find_compiler().command == (names[0],)
    assert build.get_requires_for_build_wheel() == ["wheel"]


def test_the_one_that_is_named_and_no_other(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(machine / "g++")
    program(machine / "cache")
    monkeypatch.setenv("CXX", "cache g++ -m64")
    assert build.find_compiler().command == ("cache", "g++", "-m64")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.find_compiler() is None and build.get_requires_for_build_wheel() == ["wheel"]
    reason = build.compile_native(machine / "library.so")
    assert reason.startswith("CXX is no-such-compiler, which was not found: install g++")


def test_without_a_compiler_pip_is_asked_for_one(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build.get_requires_for_build_wheel() == build.get_requires_for_build_editable() == ["wheel", build.ZIGLANG]
    monkeypatch.setattr(build, "find_spec", lambda name: name == "ziglang")
    assert build.find_compiler().command[:4] == (sys.executable, "-m", "ziglang", "c++")
    assert build.get_requires_for_build_wheel() == ["wheel"]


def test_what_the_compiler_says_is_handed_on(machine: Path) -> None:
    program(machine / "g++", "echo line 7 is wrong >&2; exit 1")
    target = machine / "library.so"
    assert build.compile_native(target) == "g++ failed:\nline 7 is wrong" and not target.exists()


def test_a_build_that_fails_is_an_error(tmp_path: Path) -> None:
    """And not an install that lacks the library."""
    command = [sys.executable, str(ROOT / "setup.py"), "-q", "build_native", "--build-lib", str(tmp_path)]
    env = {"PATH": "", "CXX": "no-such-compiler"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 1
    assert "error: deepspeed_cad cannot be built, CXX is no-such-compiler" in done.stderr
