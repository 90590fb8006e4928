"""Mutation testing: changes the code in small wrong ways and counts how many of them the tests notice.

    python tests/mutate.py --rooms planner layout --mutants 200 --unit
    python tests/mutate.py --mutants 100 --seconds 3600          # all rooms; again: goes on where it stopped

This process imports torch and the frameworks, never the package. A fork of it reads one file of tests, and each of
its tests runs in a fork of that, where coverage.py notes which lines it runs. Then each mutant is written into a copy
of the checkout, and in a fork that imports it the tests of its line run, each in a fork of its own, until one fails.
Workers of tests of processes are forks, too. The checkout is never changed. Writes report.json to `--output`.
Equivalent mutants, listed in tests/README.md with the reason, do not count.
"""

import argparse
import ast
import contextlib
import difflib
import hashlib
import importlib
import json
import os
import re
import shutil
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import coverage
import pool
import pytest
import torch
from _pytest.runner import runtestprotocol
from mutants import Mutant, find_mutants

ROOT = Path(__file__).resolve().parents[1]
FORK = get_context("fork")
RESULTS = ("killed", "survived", "equivalent")
STORE = "tests.json"
"""Which tests ran which line, for the next run."""
RULES = """[run]
source = {copy}/deepspeed_cad
    {copy}/integrations
data_file = {place}/data
parallel = true
sigterm = true
patch = _exit
    fork
    subprocess
"""


def room_of(path: str) -> str:
    """A folder of the package, or a module on its ground floor."""
    parts = Path(path).parts
    return "integrations" if parts[0] == "integrations" else parts[1].removesuffix(".py")


def sources() -> dict[str, str]:
    """All modules, from the root of the checkout, and their text."""
    files = [*(ROOT / "deepspeed_cad").rglob("*.py"), *(ROOT / "integrations").rglob("*.py")]
    return {str(file.relative_to(ROOT)): file.read_text() for file in sorted(files)}


def choose(rooms: list[str], scope: str, count: int, seed: int) -> list[Mutant]:
    """Mutants in random order, from each room in proportion to what can be changed there."""
    by_room: dict[str, list[Mutant]] = defaultdict(list)
    for path, text in sources().items():
        names = {room_of(path), path.removeprefix("deepspeed_cad/").removesuffix(".py")}
        if not rooms or names & set(rooms):
            by_room[room_of(path)] += [one for one in find_mutants(path, text) if re.fullmatch(scope, one.scope)]
    if not (total := sum(map(len, by_room.values()))):
        raise SystemExit(f"no such room: {', '.join(rooms)}")
    chosen = []
    for found in by_room.values():
        share = min(len(found), round(count * len(found) / total))
        # The place in the room's own order, so that a run that is stopped has seen all rooms alike.
        chosen += [(at / share, one) for at, one in enumerate(sorted(found, key=lambda one: one.rank(seed))[:share])]
    return [one for _, one in sorted(chosen, key=lambda pair: pair[0])]


def equivalent() -> list[re.Pattern[str]]:
    """Mutants of which tests/README.md says why they change nothing; `*` stands for anything."""
    entries = re.findall(r"^- (\S+\.py .*)\n  .*$", (ROOT / "tests" / "README.md").read_text(), re.MULTILINE)
    return [re.compile(re.escape(entry).replace(r"\*", ".*")) for entry in entries]


def open_copy(output: Path) -> None:
    """A copy of the checkout for this process alone, which tries one mutant after the other there."""
    global _copy
    _copy = output / "copies" / str(os.getpid())
    shutil.copytree(ROOT, _copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info"))


class Apart:
    """A plugin of pytest: each test runs in a fork of its own, so that none finds what another one left."""

    def __init__(self, limits_s: Mapping[str, float], notes: Path | None) -> None:
        """`limits_s`: after how long a test hangs, which is a failure. Stops at the first failure, unless coverage.py
        is to write into folders of `notes`."""
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []
        self._limits_s, self._notes = limits_s, notes

    def pytest_runtest_protocol(self, item: pytest.Item) -> bool:
        """Called by pytest in place of its own loop over set-up, call and tear-down."""
        signal.alarm(0)
        begun = time.monotonic()
        if not (pid := os.fork()):
            self._run(item)
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            if time.monotonic() - begun > self._limits_s.get(item.nodeid, 300.0):
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        self.seconds[item.nodeid] = round(time.monotonic() - begun, 2)
        if ended[1]:
            self.failed.append(item.nodeid)
            item.session.shouldstop = "" if self._notes else "killed"
        return True

    def _run(self, item: pytest.Item) -> None:
        failed = True
        try:
            os.setsid()
            torch.set_num_threads(1)  # torch makes its pool anew after a fork, which threads must not do at once
            if self._notes:
                place = self._notes / str(len(self.seconds))
                place.mkdir()
                (place / "rules").write_text(RULES.format(copy=Path.cwd(), place=place))
                watch = coverage.Coverage(config_file=str(place / "rules"))
                watch.start()
            reports = runtestprotocol(item, log=False)
            failed = any(report.failed for report in reports)
            print(item.nodeid, *(report.longreprtext for report in reports), flush=True)
        finally:
            if self._notes:
                watch.stop()
                watch.save()
            os._exit(failed)


def run_tests(tests: Iterable[str], limits_s: Mapping[str, float], notes: Path | None = None) -> dict[str, Any]:
    """pytest's exit code, seconds and failures in a fork that imports the package of this process's copy."""
    answer = (notes or _copy) / "answer.json"
    answer.unlink(missing_ok=True)
    if not (pid := os.fork()):
        try:
            _in_child(tests, Apart(limits_s, notes), answer)
        finally:
            os._exit(70)
    os.waitpid(pid, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return json.loads(answer.read_text()) if answer.exists() else {"code": 70, "seconds": {}, "failed": []}


def _in_child(tests: Iterable[str], apart: Apart, answer: Path) -> None:
    os.setsid()
    os.chdir(_copy)
    log = os.open(answer.with_name("tests.log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1), os.dup2(log, 2)
    os.environ["PYTHONPATH"] = str(_copy)
    sys.path[:0] = [str(_copy)]
    pool.fork_server = lambda preload=(): FORK
    if hasattr(sys.modules["__main__"], "__file__"):
        del sys.modules["__main__"].__file__  # or every worker would import this script
    signal.alarm(300)  # a change may keep what is imported, or what parameters are made of, from ever ending
    importlib.import_module("deepspeed_cad.launch.deepspeed_hook").install()
    code = int(pytest.main(["-s", "-q", "-p", "no:cacheprovider", "-m", "not long", *tests], plugins=[apart]))
    answer.write_text(json.dumps({"code": code, "seconds": apart.seconds, "failed": apart.failed}))


def cover(file: str) -> dict[str, dict[str, Any]]:
    """Seconds of each test of a file, and the lines of each module that it runs; not of those that fail."""
    notes, begun, found = _copy / "notes" / Path(file).stem, time.monotonic(), {}
    notes.mkdir(parents=True)
    ran = run_tests([file], {}, notes)
    for number, (test, seconds) in enumerate(ran["seconds"].items()):
        lines: dict[str, set[int]] = defaultdict(set)
        for part in (notes / str(number)).glob("data.*"):
            data = coverage.CoverageData(str(part))
            with contextlib.suppress(coverage.CoverageException):  # of a process that was killed while it wrote
                data.read()
                for path in data.measured_files():
                    lines[str(Path(path).resolve().relative_to(_copy.resolve()))] |= set(data.lines(path) or ())
        found[test] = {"seconds": seconds, "lines": {path: sorted(of) for path, of in lines.items()}}
    for test in ran["failed"]:
        del found[test]
    failed = "".join(f"; fails without a mutant: {test}" for test in ran["failed"])
    print(f"{file}: {time.monotonic() - begun:.0f} s{failed}", flush=True)
    if not failed:
        shutil.rmtree(notes)
    return found


class Tests:
    """Which tests run which line, and how long they take."""

    def __init__(self, workers: ProcessPoolExecutor, output: Path, unit: bool) -> None:
        """What earlier runs noted is read from `output`, for the lines of the modules that are as they were."""
        store, modules = output / STORE, sources()
        folders = ["unit"] if unit else ["processes", "unit"]
        files = [str(one.relative_to(ROOT)) for of in folders for one in (ROOT / "tests" / of).glob("test_*.py")]
        digests = {file: hashlib.sha256((ROOT / file).read_bytes()).hexdigest() for file in files}
        known = json.loads(store.read_text()) if store.exists() else {"modules": {}, "files": {}}
        moved = {path: _moved(text, modules.get(path, "")) for path, text in known["modules"].items()}
        for test in (test for one in known["files"].values() for test in one["tests"].values()):
            for path, lines in test["lines"].items():
                lines[:] = [moved[path][line] for line in lines if line in moved[path]]
        kept = {file: one for file, one in known["files"].items() if digests.get(file, one["digest"]) == one["digest"]}
        new = sorted(set(files) - set(kept))
        for file, tests in zip(new, workers.map(cover, new)):
            kept[file] = {"digest": digests[file], "tests": tests}
        store.write_text(json.dumps({"modules": modules, "files": kept}))
        self._modules, self._lines = modules, defaultdict[str, dict[str, set[int]]](dict)
        self.seconds: dict[str, float] = {}
        for test, one in (pair for file in files for pair in kept[file]["tests"].items()):
            self.seconds[test] = one["seconds"]
            for path, lines in one["lines"].items():
                self._lines[path][test] = set(lines)
        self._count = Counter(test for of in self._lines.values() for test, lines in of.items() for _ in lines)

    def of(self, mutant: Mutant, most_s: float) -> list[str]:
        """Those that run the line of a mutant, in at most `most_s`, half of it for unit tests, which come first: before
        others those of a file named like the module, and those that run few lines."""
        ran, stem, chosen = self._lines[mutant.path], Path(mutant.path).stem, []
        each = ([test for test in ran if ran[test] & piece] for piece in self._around(mutant))
        found = next(filter(None, each), [test for test in self.seconds if room_of(mutant.path) in test])
        for test in sorted(found, key=lambda one: ("processes/" in one, stem not in one, self._count[one])):
            most = most_s if "processes/" in test else most_s / 2
            if sum(self.seconds[one] for one in [*chosen, test]) <= most:
                chosen.append(test)
        return chosen

    def _around(self, mutant: Mutant) -> Iterator[set[int]]:
        """Lines of the pieces of code that hold a mutant, from the smallest to the whole module: of a long call not
        each line is noted. Those of functions alone: what an import runs is noted only where a test starts a Python."""
        nodes: list[Any] = [node for node in ast.walk(ast.parse(self._modules[mutant.path])) if hasattr(node, "lineno")]
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        inside = {line for node in functions for line in range(node.body[0].lineno, node.end_lineno + 1)}
        pieces = [range(node.lineno, node.end_lineno + 1) for node in nodes]
        yield from (inside & set(piece) for piece in sorted(pieces, key=len) if mutant.line in piece)
        yield inside


def _moved(before: str, now: str) -> dict[int, int]:
    """Numbers of the lines that are in both texts: in the first one, in the second one."""
    blocks = difflib.SequenceMatcher(None, before.splitlines(), now.splitlines(), autojunk=False).get_matching_blocks()
    return {1 + one.a + at: 1 + one.b + at for one in blocks for at in range(one.size)}


def try_mutant(mutant: Mutant, limits_s: Mapping[str, float], deadline: float) -> dict[str, Any] | None:
    """Write a mutant into the copy, run tests until one fails, and put the file back; None after the deadline."""
    if (begun := time.monotonic()) > deadline:
        return None
    target = _copy / mutant.path
    target.write_text(mutant.apply((ROOT / mutant.path).read_text()))
    # Compiled files are found by size and second of change: no mutant may be taken for another, or for the original.
    os.utime(target, (0, int(mutant.rank(0)[:7], 16)))
    try:
        ran = run_tests(limits_s, limits_s) if limits_s else {"code": 0, "failed": []}
    finally:
        shutil.copy2(ROOT / mutant.path, target)
    by = " ".join(ran["failed"]) or (f"pytest's exit code {ran['code']}" if ran["code"] else "")
    return {"result": "killed" if by else "survived", "seconds": round(time.monotonic() - begun, 1), "by": by}


def write_report(output: Path, results: dict[str, dict[str, Any]], about: str) -> str:
    """report.json; returns a table of rooms."""
    (output / "report.json").write_text(json.dumps({"about": about, "mutants": results}, indent=1, ensure_ascii=False))
    count = Counter((room, one["result"]) for one in results.values() for room in (one["room"], "all"))
    lines = [f"| room | {' | '.join(RESULTS)} | killed of all |", "|---" * (len(RESULTS) + 2) + "|"]
    for room in [*sorted({room for room, _ in count} - {"all"}), "all"]:
        numbers = [count[room, result] for result in RESULTS]
        total = sum(numbers[:2])
        lines.append(f"| {room} | {' | '.join(map(str, numbers))} | {f'{numbers[0] / total:.0%}' if total else '–'} |")
    return "\n".join(lines)


def main() -> None:
    """Choose, mutate, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rooms", nargs="*", default=[], help="folders or modules, as in planner layout; default: all")
    parser.add_argument("--scope", default=".*", help="of these functions alone: Layout.can_cut; a regular expression")
    parser.add_argument("--mutants", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0, help="another seed, other mutants")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no mutant after so long")
    parser.add_argument("--tests-seconds", type=float, default=120.0, help="of tests for one mutant, in all")
    parser.add_argument("--unit", action="store_true", help="unit tests alone")
    parser.add_argument("--anew", action="store_true", help="forget which tests ran which line")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "mutation")
    args = parser.parse_args()
    if os.environ.get("DEEPSPEED_CAD_AUTOLOAD") != "0":  # nothing of the package before the fork
        os.environ.update(DEEPSPEED_CAD_AUTOLOAD="0", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
        os.execv(sys.executable, [sys.executable, *sys.argv])
    os.environ.pop("DEEPSPEED_CAD_AUTOLOAD")  # child processes then wait for the import of deepspeed as always
    torch.set_num_threads(1)
    for name in (*pool.PRELOAD, *pool.HOSTS):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    begun, report = time.monotonic(), args.output / "report.json"
    shutil.rmtree(args.output / "copies", ignore_errors=True)
    if args.anew:
        (args.output / STORE).unlink(missing_ok=True)
    chosen, harmless = choose(args.rooms, args.scope, args.mutants, args.seed), equivalent()
    earlier = json.loads(report.read_text())["mutants"] if report.exists() else {}
    results: dict[str, dict[str, Any]] = {}
    about = f"Seed {args.seed}, {len(chosen)} mutants of {', '.join(args.rooms) or 'all rooms'}."
    with ProcessPoolExecutor(mp_context=FORK, initializer=open_copy, initargs=(args.output,)) as workers:
        tests = Tests(workers, args.output, args.unit)
        tried = {}
        for mutant in chosen:
            digest = hashlib.sha256((ROOT / mutant.path).read_bytes()).hexdigest()[:12]
            known = earlier.get(mutant.name, {"digest": ""})
            names = mutant.name, f"{mutant.path} {mutant.scope}: {mutant.operator}"
            facts = {"room": room_of(mutant.path), "line": mutant.line, "operator": mutant.operator, "digest": digest}
            if any(entry.fullmatch(name) for entry in harmless for name in names):
                results[mutant.name] = facts | {"result": "equivalent", "seconds": 0.0, "by": ""}
            elif known["digest"] == digest and known["result"] == "killed":
                results[mutant.name] = known
            else:
                some = tests.of(mutant, args.tests_seconds)
                limits_s = {test: 60.0 + 5.0 * tests.seconds[test] for test in some}
                tried[mutant.name] = facts, workers.submit(try_mutant, mutant, limits_s, begun + args.seconds)
        for name, (facts, trial) in tried.items():
            if found := trial.result():
                results[name] = facts | found
                took = f"line {facts['line']}, {found['seconds']:.0f} s"
                print(f"{found['result']}: {name} ({took}) {found['by']}", flush=True)
                write_report(args.output, results, about)
    print(write_report(args.output, results, about))


if __name__ == "__main__":
    main()
