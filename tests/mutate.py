"""Mutation testing: changes the code in small wrong ways and counts how many of them the tests notice.

    python tests/mutate.py --rooms planner layout --mutants 200 --unit
    python tests/mutate.py --mutants 100 --seconds 3600          # all rooms; again: goes on where it stopped

First all tests run once in a copy of the checkout, where coverage.py notes which of them run which line. Then each
mutant is written into the copy, and those that run its line are run until one fails. The checkout itself is never
changed. Writes report.json to `--output`. Equivalent mutants, listed in tests/README.md with the reason, do not count.
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import time
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import coverage
import pytest
import torch
import transformers  # noqa: F401, forked processes have it then
from mutants import Mutant, find_mutants

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ("killed", "survived", "equivalent")
RULES = """[run]
source = {copy}/deepspeed_cad
    {copy}/integrations
data_file = {place}/data
parallel = true
dynamic_context = test_function
sigterm = true
patch = _exit
    fork
    subprocess
"""


def room_of(path: str) -> str:
    """A folder of the package, or a module on its ground floor."""
    parts = Path(path).parts
    return "integrations" if parts[0] == "integrations" else parts[1].removesuffix(".py")


def sources() -> list[str]:
    """All modules, from the root of the checkout."""
    files = [*(ROOT / "deepspeed_cad").rglob("*.py"), *(ROOT / "integrations").rglob("*.py")]
    return sorted(str(file.relative_to(ROOT)) for file in files)


def choose(rooms: list[str], count: int, seed: int) -> list[Mutant]:
    """Mutants in random order, from each room in proportion to what can be changed there."""
    by_room: dict[str, list[Mutant]] = defaultdict(list)
    for path in sources():
        names = {room_of(path), path.removeprefix("deepspeed_cad/").removesuffix(".py")}
        if not rooms or names & set(rooms):
            by_room[room_of(path)] += find_mutants(path, (ROOT / path).read_text())
    if not by_room:
        raise SystemExit(f"no such room: {', '.join(rooms)}")
    total = sum(map(len, by_room.values()))
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


def cover(copy: Path, file: str) -> tuple[float, dict[str, dict[str, list[int]]]]:
    """Seconds of a file of tests; and the lines of each module that each of its tests runs. What an import, a fixture,
    a thread or another process runs counts for the file."""
    place, started = copy / "coverage" / Path(file).stem, time.monotonic()
    place.mkdir(parents=True)
    (place / "rules").write_text(RULES.format(copy=copy, place=place))
    code = run_tests(copy, [file], place)
    seconds = time.monotonic() - started
    print(f"{file}: {seconds:.0f} s", flush=True)
    if code not in (0, 5):  # 5: none of its tests is one of these
        raise SystemExit(f"{file} fails without a mutant, too: see {place / 'tests.log'}")
    text = (ROOT / file).read_text()
    found: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for part in place.glob("data.*"):
        data = coverage.CoverageData(str(part))
        try:
            data.read()
        except coverage.CoverageException:  # of a process that was killed while it wrote
            continue
        for path in data.measured_files():
            module = str(Path(path).resolve().relative_to(copy.resolve()))
            for line, contexts in data.contexts_by_lineno(path).items():
                for context in contexts:
                    name = context.rpartition(".")[2]  # hypothesis has a test_function, too
                    found[f"{file}::{name}" if f"def {name}(" in text else file][module].add(line)
    return seconds, {test: {path: sorted(lines) for path, lines in of.items()} for test, of in found.items()}


class Coverage:
    """Which tests run which line."""

    def __init__(self, copy: Path, output: Path, unit: bool) -> None:
        store, modules = output / "coverage.json", hashlib.sha256()
        for path in sources():
            modules.update((ROOT / path).read_bytes())
        folders = ["unit"] if unit else ["processes", "unit"]
        files = [str(one.relative_to(ROOT)) for of in folders for one in (ROOT / "tests" / of).glob("test_*.py")]
        digests = {file: modules.hexdigest() + hashlib.sha256((ROOT / file).read_bytes()).hexdigest() for file in files}
        known = json.loads(store.read_text()) if store.exists() else {}
        known = {file: one for file, one in known.items() if digests.get(file) == one["digest"]}
        new = sorted(set(files) - set(known))
        with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:
            for file, (seconds, ran) in zip(new, pool.map(cover, [copy] * len(new), new)):
                known[file] = {"digest": digests[file], "seconds": seconds, "ran": ran}
        store.write_text(json.dumps(known))
        self._seconds = {file: one["seconds"] for file, one in known.items()}
        self._tests: dict[tuple[str, int], list[str]] = defaultdict(list)
        self._count: Counter[str] = Counter()
        for test, ran in (pair for one in known.values() for pair in one["ran"].items()):
            self._count[test] = sum(map(len, ran.values()))
            for path, line in ((path, line) for path, lines in ran.items() for line in lines):
                self._tests[path, line].append(test)

    def tests(self, mutant: Mutant, most_s: float) -> list[str]:
        """Those that run the line of a mutant: of the module's own tests, and those that run few lines, first; whole
        files last, while all take no more than `most_s`."""
        at, stem, chosen, left = mutant.line, Path(mutant.path).stem, [], most_s
        while at > mutant.line - 12 and (mutant.path, at) not in self._tests:  # of a long call not each line is noted
            at -= 1
        found = self._tests[mutant.path, at]
        for test in sorted(found, key=lambda one: ("::" not in one, stem not in one, self._count[one])):
            left -= 0.0 if "::" in test else self._seconds[test]
            if left >= 0.0:
                chosen.append(test)
        return chosen


def run_tests(copy: Path, tests: list[str], place: Path | None = None) -> int:
    """pytest's exit code on a copy of the checkout, in a process that has torch already; a test that hangs fails.
    `place`: of what coverage.py notes meanwhile."""
    if not (pid := os.fork()):
        _in_child(copy, tests, place)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(status)


def _in_child(copy: Path, tests: list[str], place: Path | None) -> None:
    code = 70
    try:
        os.setsid()
        os.chdir(copy)
        log = os.open((place or copy) / "tests.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1), os.dup2(log, 2)
        os.environ["PYTHONPATH"] = str(copy)
        sys.path[:0] = [str(copy)]
        if hasattr(sys.modules["__main__"], "__file__"):
            del sys.modules["__main__"].__file__  # or every worker would import this script
        watch = None if place is None else coverage.Coverage(config_file=str(place / "rules"))
        if watch is not None:
            watch.start()
        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", "not long", *tests]))
        if watch is not None:
            watch.stop()
            watch.save()
    finally:
        os._exit(code)


def try_mutant(mutant: Mutant, tests: list[str], copy: Path) -> dict[str, Any]:
    """Write a mutant into the copy, run tests until one fails, and put the file back."""
    target, started = copy / mutant.path, time.monotonic()
    target.write_text(mutant.apply((ROOT / mutant.path).read_text()))
    # Compiled files are found by size and second of change: no mutant may be taken for another, or for the original.
    os.utime(target, (0, int(mutant.rank(0)[:7], 16)))
    try:
        code = run_tests(copy, tests) if tests else 0
    finally:
        shutil.copy2(ROOT / mutant.path, target)
    by = " ".join(re.findall(r"^(?:FAILED|ERROR) (\S+)", (copy / "tests.log").read_text(errors="replace"), re.M)[:1])
    seconds = round(time.monotonic() - started, 1)
    return {"result": "killed" if code else "survived", "seconds": seconds, "by": by if code else ""}


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
    parser.add_argument("--mutants", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0, help="another seed, other mutants")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no mutant after so long")
    parser.add_argument("--tests-seconds", type=float, default=900.0, help="of tests of processes for one mutant")
    parser.add_argument("--unit", action="store_true", help="unit tests alone")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "mutation")
    args = parser.parse_args()
    if os.environ.get("DEEPSPEED_CAD_AUTOLOAD") != "0":  # nothing of the package before the fork
        os.environ.update(DEEPSPEED_CAD_AUTOLOAD="0", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
        os.execv(sys.executable, [sys.executable, *sys.argv])
    os.environ.pop("DEEPSPEED_CAD_AUTOLOAD")  # child processes then wait for the import of deepspeed as always
    torch.set_num_threads(1)
    started, copy, report = time.monotonic(), args.output / "copy", args.output / "report.json"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info"))
    chosen, harmless = choose(args.rooms, args.mutants, args.seed), equivalent()
    covered = Coverage(copy, args.output, args.unit)
    earlier = json.loads(report.read_text())["mutants"] if report.exists() else {}
    results: dict[str, dict[str, Any]] = {}
    about = f"Seed {args.seed}, {len(chosen)} mutants of {', '.join(args.rooms) or 'all rooms'}."
    for mutant in chosen:
        digest = hashlib.sha256((ROOT / mutant.path).read_bytes()).hexdigest()[:12]
        known = earlier.get(mutant.name, {"digest": ""})
        names = mutant.name, f"{mutant.path} {mutant.scope}: {mutant.operator}"
        if any(entry.fullmatch(name) for entry in harmless for name in names):
            found = {"result": "equivalent", "seconds": 0.0, "by": ""}
        elif known["digest"] == digest and known["result"] == "killed":
            found = known
        elif time.monotonic() - started > args.seconds:
            continue
        else:
            found = try_mutant(mutant, covered.tests(mutant, args.tests_seconds), copy)
            if found["result"] != "killed":
                print(f"{found['result']}: {mutant.name} (line {mutant.line}, {found['seconds']:.0f} s)", flush=True)
        facts = {"room": room_of(mutant.path), "line": mutant.line, "operator": mutant.operator, "digest": digest}
        results[mutant.name] = facts | found
        write_report(args.output, results, about)
    print(write_report(args.output, results, about))


if __name__ == "__main__":
    main()
