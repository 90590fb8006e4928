"""Which of the fast tests run which statement, in whatever process.

In: the tests. Out: `Coverage`. Statements of an instrumented copy mark themselves in memory that the test's process,
the pool's workers and every process that a test starts share; the test that was running gets the marks.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mutation.copies import ROOT, copy_checkout, instrument, source_files
from mutation.runner import run_tests


@dataclass
class Coverage:
    """What the fast tests run, and how long they take."""

    digest: str
    seconds: dict[str, float]
    """Of each test that passes."""
    tests_of: dict[str, list[str]]
    """By "path:line:column" of a statement, and by "path" of a file of which anything in a function ran."""


class Recorder:
    """A pytest plugin: what each test marked, and how long it took."""

    def __init__(self, copy: Path, count: int) -> None:
        self.copy, self.count = copy, count
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()
        self.marked: dict[str, list[int]] = {}
        self.marks: mmap.mmap | None = None

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Seconds of setup, call and teardown; tests that were skipped or failed say nothing."""
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if not report.passed:
            self.failed.add(report.nodeid)

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        """A test begins with nothing marked."""
        if self.marks is None:
            with open(self.copy / "marks", "r+b") as file:
                self.marks = mmap.mmap(file.fileno(), self.count)
        self.marks[:] = bytes(self.count)

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        """What it marked, in whatever process."""
        assert self.marks is not None
        marked = bytes(self.marks)
        self.marked[nodeid] = [at for at in range(self.count) if marked[at]]

    def pytest_sessionfinish(self) -> None:
        """Write what the parent reads."""
        passed = {name: seconds for name, seconds in self.seconds.items() if name not in self.failed}
        found = {
            "seconds": passed,
            "failed": sorted(self.failed),
            "marked": {name: self.marked[name] for name in passed},
        }
        (self.copy / "recorded.json").write_text(json.dumps(found))


def collect(output: Path, selection: list[str], say: Callable[[str], None]) -> Coverage:
    """Run the fast tests once on an instrumented copy, or read what an earlier run found on the same code and tests."""
    digest = _digest(selection)
    saved = output / "coverage.json"
    if saved.exists():
        found = Coverage(**json.loads(saved.read_text()))
        if found.digest == digest:
            return found
    copy = output / "instrumented"
    copy_checkout(copy)
    count = instrument(copy)
    say("running the fast tests to see what each of them runs")
    code, seconds = run_tests(copy, ["-m", "not slow", *selection], 3600.0, [Recorder(copy, count)])
    if code not in (0, 1):
        raise SystemExit(f"the tests ended with {code} after {seconds:.0f} s: see {copy / 'tests.log'}")
    recorded = json.loads((copy / "recorded.json").read_text())
    places = json.loads((copy / "places.json").read_text())
    tests_of: dict[str, set[str]] = defaultdict(set)
    for test, marked in recorded["marked"].items():
        for at in marked:
            tests_of[places[at]].add(test)
            tests_of[places[at].split(":")[0]].add(test)
    found = Coverage(digest, recorded["seconds"], {place: sorted(tests) for place, tests in tests_of.items()})
    say(f"{len(found.seconds)} tests in {seconds:.0f} s; {len(recorded['failed'])} skipped or failed and left out")
    saved.write_text(json.dumps(asdict(found)))
    return found


def _digest(selection: list[str]) -> str:
    digest = hashlib.sha256(repr(selection).encode())
    for path in sorted([*(ROOT / path for path in source_files()), *(ROOT / "tests").rglob("*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()
