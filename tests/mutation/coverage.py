"""Copies of the checkout, tests that run on them, and which of the fast tests run which statement.

In an instrumented copy every statement marks itself in memory that the test's process, the pool's workers and every
process that a test starts share. Tests run in a process forked from one that has imported what they need; what belongs
to the package is imported after the fork, from the copy. The checkout itself is never changed.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import json
import mmap
import os
import shutil
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from mutation.mutants import FUNCTIONS, is_text

ROOT = Path(__file__).resolve().parents[2]
MARKS = "_mutation_marks"
"""The module through which instrumented statements mark themselves."""


class Coverage(NamedTuple):
    """What the fast tests run, and how long they take."""

    digest: str
    seconds: dict[str, float]
    """Of each test that passes."""
    tests_of: dict[str, list[str]]
    """By "path:line:column" of a statement, and by "path" of a file of which anything in a function ran."""


def source_files() -> list[str]:
    """Every file of the package, from the root."""
    found = (
        path.relative_to(ROOT) for room in ("deepspeed_cad", "integrations") for path in (ROOT / room).rglob("*.py")
    )
    return sorted(str(path) for path in found if path.parts[:2] != ("deepspeed_cad", "integrations"))


def copy_checkout(target: Path) -> None:
    """A copy that imports its own package, whatever is installed."""
    shutil.rmtree(target, ignore_errors=True)
    skip = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
    shutil.copytree(ROOT, target, ignore=skip)
    (target / "deepspeed_cad" / "integrations").symlink_to(target / "integrations")


def collect(output: Path, selection: list[str], say: Callable[[str], None]) -> Coverage:
    """Run the fast tests once on an instrumented copy, or read what an earlier run found on the same code and tests."""
    tests = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py")]
    digest = hashlib.sha256(repr(selection).encode())
    for path in [*source_files(), *sorted(tests)]:
        digest.update((ROOT / path).read_bytes())
    saved = output / "coverage.json"
    if saved.exists() and (found := Coverage(*json.loads(saved.read_text()))).digest == digest.hexdigest():
        return found
    copy = output / "instrumented"
    copy_checkout(copy)
    places = _instrument(copy)
    say("running the fast tests to see what each of them runs")
    code, seconds = run_tests(copy, ["-m", "not slow", *selection], 3600.0, [_Recorder(copy, len(places))])
    if code not in (0, 1):
        raise SystemExit(f"the tests ended with {code} after {seconds:.0f} s: see {copy / 'tests.log'}")
    took, marked = json.loads((copy / "recorded.json").read_text())
    tests_of: dict[str, set[str]] = defaultdict(set)
    for test, at in marked:
        for place in (places[at], places[at].split(":")[0]):
            tests_of[place].add(test)
    say(f"{len(took)} tests in {seconds:.0f} s; those that were skipped or failed are left out")
    found = Coverage(digest.hexdigest(), took, {place: sorted(tests) for place, tests in tests_of.items()})
    saved.write_text(json.dumps(found))
    return found


def _instrument(copy: Path) -> list[str]:
    """Let every statement in functions mark itself; gives which is which."""
    places: list[str] = []
    for path in source_files():
        tree = ast.parse((ROOT / path).read_text())
        _mark(tree, path, places, False)
        first = [is_text(one) or getattr(one, "module", "") == "__future__" for one in tree.body]
        at = first.index(False) if False in first else len(first)
        tree.body.insert(at, ast.parse(f"from {MARKS} import marks as mutation_marks").body[0])
        (copy / path).write_text(ast.unparse(ast.fix_missing_locations(tree)))
    (copy / f"{MARKS}.py").write_text(
        "import mmap\n"
        f"with open({str(copy / 'marks')!r}, 'r+b') as file:\n    marks = mmap.mmap(file.fileno(), {len(places)})\n"
    )
    (copy / "marks").write_bytes(bytes(len(places)))
    return places


def _mark(owner: Any, path: str, places: list[str], inside: bool) -> None:
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        body = getattr(owner, field, [])
        for node in list(body) if isinstance(body, list) else []:
            if inside and isinstance(node, ast.stmt) and not is_text(node):
                if not isinstance(node, ast.Global | ast.Nonlocal):
                    mark = ast.parse(f"mutation_marks[{len(places)}] = 1").body[0]
                    places.append(f"{path}:{node.lineno}:{node.col_offset}")
                    body.insert(body.index(node), ast.copy_location(mark, node))
            _mark(node, path, places, isinstance(node, FUNCTIONS) or (inside and not isinstance(node, ast.ClassDef)))


class _Recorder:
    """A pytest plugin: what each test that passed marked, and how long it took."""

    def __init__(self, copy: Path, count: int) -> None:
        self.copy, self.count = copy, count
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: set[str] = set()
        self.marked: list[tuple[str, int]] = []
        self.marks: mmap.mmap | None = None

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += report.duration
        if not report.passed:
            self.failed.add(report.nodeid)

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        if self.marks is None:
            with open(self.copy / "marks", "r+b") as file:
                self.marks = mmap.mmap(file.fileno(), self.count)
        self.marks[:] = bytes(self.count)

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        assert self.marks is not None
        self.marked += [(nodeid, at) for at, marked in enumerate(bytes(self.marks)) if marked]

    def pytest_sessionfinish(self) -> None:
        took = {name: seconds for name, seconds in self.seconds.items() if name not in self.failed}
        marked = [one for one in self.marked if one[0] in took]
        (self.copy / "recorded.json").write_text(json.dumps((took, marked)))


def preload() -> None:
    """Import what tests need and what knows nothing of the package, so that forked processes have it."""
    for name in ("pytest", "_pytest.assertion.rewrite", "hypothesis.extra.numpy", "highspy", "torch", "transformers"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)
    # Child processes then wait for the import of deepspeed as always.
    os.environ.pop("DEEPSPEED_CAD_AUTOLOAD", None)


def run_tests(copy: Path, arguments: list[str], limit: float, plugins: Iterable[Any] = ()) -> tuple[int | None, float]:
    """pytest's exit code on a copy, None where it did not end in time; and seconds."""
    started = time.monotonic()
    pid = os.fork()
    if not pid:
        _in_child(copy, arguments, list(plugins))
    status = None
    while status is None and time.monotonic() - started < limit:
        found, code = os.waitpid(pid, os.WNOHANG)
        status = code if found else None
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if status is None:
        os.waitpid(pid, 0)
    return None if status is None else os.waitstatus_to_exitcode(status), time.monotonic() - started


def _in_child(copy: Path, arguments: list[str], plugins: list[Any]) -> None:
    code = 70
    try:
        os.setsid()
        os.chdir(copy)
        log = os.open(copy / "tests.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1), os.dup2(log, 2)
        os.environ["PYTHONPATH"] = str(copy)
        sys.path[:0] = [str(copy)]
        if hasattr(sys.modules["__main__"], "__file__"):
            del sys.modules["__main__"].__file__  # or every worker would import this script
        import hypothesis
        import pytest

        phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
        hypothesis.settings.register_profile("mutate", phases=phases, database=None, derandomize=True)
        hypothesis.settings.load_profile("mutate")
        code = int(pytest.main(["-q", "-p", "no:cacheprovider", "--no-header", *arguments], plugins=plugins))
    finally:
        os._exit(code)
