"""The build backend: setuptools, and a C++ compiler from PyPI where the machine has none. It is not installed.

In: csrc/*.cpp and the compiler that is found. Out: the library, compiled without torch, nvcc or Python headers, for
setup.py, which pip runs by the hooks below. Where there is no compiler, they ask pip for `ziglang`, which holds one.
Without build isolation nothing is downloaded, and the error says what to install.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403, the other hooks

ROOT = Path(__file__).resolve().parent
ZIGLANG = "ziglang>=0.14"
COMPILE = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", f"-I{ROOT / 'csrc'}")
SYSTEM = ("-ldl", "-lpthread")
INSIDE = ("-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL", "-Wl,--gc-sections")
"""The C++ runtime goes into the library where it can, so that a wheel built here runs on older distributions. What of
it is not used is left out: it would ask for a newer glibc."""


class Compiler(NamedTuple):
    """How to call a compiler."""

    command: tuple[str, ...]
    links: tuple[tuple[str, ...], ...]
    """Options for linking; each is tried if those before it failed."""


def find_compiler() -> Compiler | None:
    """$CXX if it is set, else the first of g++, c++ and clang++ on the PATH, else the package ziglang; None: none."""
    named = shlex.split(os.environ.get("CXX", ""))
    for command in [named] if named else [["g++"], ["c++"], ["clang++"]]:
        if shutil.which(command[0]):
            return Compiler(tuple(command), ((*INSIDE, *SYSTEM), SYSTEM))
    if named or find_spec("ziglang") is None:
        return None
    # A target by name: for all processors of this kind, and for every glibc since 2014. Its runtime is always inside.
    target = f"{platform.machine()}-linux-gnu.2.17"
    return Compiler((sys.executable, "-m", "ziglang", "c++", "-target", target), (("-s", *SYSTEM),))


def compile_native(target: Path) -> str:
    """Compile csrc/*.cpp into `target`, unless it is newer; returns "" when it is there, else the reason why not."""
    sources = sorted((ROOT / "csrc").glob("*.cpp"))
    read = (*sources, *(ROOT / "csrc").glob("*.h"), Path(__file__))
    if target.exists() and target.stat().st_mtime > max(file.stat().st_mtime for file in read):
        return ""
    target.unlink(missing_ok=True)
    compiler = find_compiler()
    if compiler is None:
        named = os.environ.get("CXX")
        what = f"CXX is {named}, which was not found" if named else "no C++ compiler was found"
        return f"{what}: install g++, or name another one by CXX, or: {sys.executable} -m pip install ziglang"
    target.parent.mkdir(parents=True, exist_ok=True)
    building = target.with_name(f"{target.name}.{os.getpid()}.o")  # renamed when whole: no process loads half a file
    reason = ""
    for link in compiler.links:
        line = [*compiler.command, *COMPILE, "-o", str(building), *map(str, sources), *link]
        try:
            done = subprocess.run(line, capture_output=True, text=True)
        except OSError as error:
            return f"{compiler.command[0]} could not be started: {error}"
        if done.returncode == 0:
            building.replace(target)
            return ""
        reason = f"{shlex.join(compiler.command)} failed:\n{done.stderr.strip()[-4000:]}"
    building.unlink(missing_ok=True)
    return reason


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """A PEP 517 hook: what setuptools needs, and a compiler where the machine has none."""
    return [*build_meta.get_requires_for_build_wheel(config_settings), *compiler_from_pypi()]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    """The same for an editable install."""
    return [*build_meta.get_requires_for_build_editable(config_settings), *compiler_from_pypi()]


def compiler_from_pypi() -> list[str]:
    """The requirement for pip where a compiler is needed; whoever names one by $CXX wants that one, or an error."""
    return [] if find_compiler() or os.environ.get("CXX") else [ZIGLANG]
