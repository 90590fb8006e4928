"""Mutation testing: changes the code in small wrong ways and counts how many of them the fast tests notice.

    python tests/mutate.py --rooms planner layout --mutants 200
    python tests/mutate.py --mutants 600 --seconds 3600          # all rooms; again: goes on where it stopped

Each mutant is written into a copy of the checkout, and the fast tests are run on the copy until one fails, those first
that name its module or room. The checkout itself is never changed. Writes report.json and report.md to `--output`.
Equivalent mutants, listed in tests/README.md with the reason, do not count.
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
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers  # noqa: F401, forked processes have it then
from mutants import Mutant, find_mutants

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ("killed", "survived", "equivalent")
PASSES: set[str] = set()
"""Tests that killed a mutant and are known to pass without."""


def room_of(path: str) -> str:
    """A folder of the package, or a module on its ground floor."""
    parts = Path(path).parts
    return "integrations" if parts[0] == "integrations" else parts[1].removesuffix(".py")


def choose(rooms: list[str], count: int, seed: int) -> list[Mutant]:
    """Mutants in random order, from each room in proportion to what can be changed there."""
    by_room: dict[str, list[Mutant]] = defaultdict(list)
    unknown = set(rooms)
    files = [
        path.relative_to(ROOT) for room in ("deepspeed_cad", "integrations") for path in (ROOT / room).rglob("*.py")
    ]
    for path in sorted(str(file) for file in files if file.parts[:2] != ("deepspeed_cad", "integrations")):
        names = {room_of(path), path.removeprefix("deepspeed_cad/").removesuffix(".py")}
        if not rooms or names & set(rooms):
            by_room[room_of(path)] += find_mutants(path, (ROOT / path).read_text())
            unknown -= names
    if unknown:
        raise SystemExit(f"no such room: {', '.join(sorted(unknown))}")
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


def tests_for(path: str) -> list[str]:
    """All files of tests: those first that name the module, then by their own names, then those of its room."""
    words = Path(path).with_suffix("").parts
    module = ".".join(words if words[0] == "deepspeed_cad" else ("deepspeed_cad", *words)).removesuffix(".__init__")
    package, _, stem = module.rpartition(".")
    module_named = re.compile(rf"{re.escape(module)}\b|{re.escape(package)} import (?:.*\b)?{stem}\b")
    room_named = re.compile(rf"{re.escape(package)}\b")

    def distance(file: Path) -> tuple[bool | str, ...]:
        text, elsewhere = file.read_text(), file.parent.name != "unit"
        return not module_named.search(text), stem not in file.name, not room_named.search(text), elsewhere, file.name

    return [str(file.relative_to(ROOT)) for file in sorted((ROOT / "tests").glob("*/test_*.py"), key=distance)]


def run_tests(copy: Path, tests: list[str], limit: float) -> int | None:
    """pytest's exit code on a copy of the checkout, in a process that has torch already; None: not done in time."""
    pid, started, status = os.fork(), time.monotonic(), None
    if not pid:
        _in_child(copy, tests)
    while status is None and time.monotonic() - started < limit:
        found, code = os.waitpid(pid, os.WNOHANG)
        status = code if found else None
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if status is None:
        os.waitpid(pid, 0)
    return None if status is None else os.waitstatus_to_exitcode(status)


def _in_child(copy: Path, tests: list[str]) -> None:
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
        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not long", *tests]))
    finally:
        os._exit(code)


def try_mutant(mutant: Mutant, tests: list[str], copy: Path, limit: float) -> dict[str, Any]:
    """Write a mutant into the copy, run tests until one fails, and put the file back."""
    target, started = copy / mutant.path, time.monotonic()
    target.write_text(mutant.apply((ROOT / mutant.path).read_text()))
    # Compiled files are found by size and second of change: no mutant may be taken for another, or for the original.
    os.utime(target, (0, int(mutant.rank(0)[:7], 16)))
    try:
        code = run_tests(copy, tests, limit)
    finally:
        shutil.copy2(ROOT / mutant.path, target)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", (copy / "tests.log").read_text(errors="replace"), re.MULTILINE)
    if code is not None and code > 2:  # below 0: a signal, such as of an abort in compiled code
        raise SystemExit(f"pytest ended with {code}: see {copy / 'tests.log'}")
    result = "killed" if code != 0 else "survived"
    by = "time" if code is None else " ".join(failed[:1])
    if "::" in by and (test := by.partition("[")[0]) not in PASSES:
        if run_tests(copy, [test], limit):
            raise SystemExit(f"{test} fails without a mutant, too")
        PASSES.add(test)
    return {"result": result, "seconds": round(time.monotonic() - started, 1), "by": by}


def write_report(output: Path, results: dict[str, dict[str, Any]], about: str) -> str:
    """report.json, and report.md with a table per room and every survivor; returns the table."""
    (output / "report.json").write_text(json.dumps({"about": about, "mutants": results}, indent=1, ensure_ascii=False))
    count = Counter((room, one["result"]) for one in results.values() for room in (one["room"], "all"))
    lines = [f"| room | {' | '.join(RESULTS)} | killed of all |", "|---" * (len(RESULTS) + 2) + "|"]
    for room in [*sorted({room for room, _ in count} - {"all"}), "all"]:
        numbers = [count[room, result] for result in RESULTS]
        total = sum(numbers[:2])
        lines.append(f"| {room} | {' | '.join(map(str, numbers))} | {f'{numbers[0] / total:.0%}' if total else '–'} |")
    left = [
        f"- line {one['line']}, {one['operator']}: {name}"
        for name, one in sorted(results.items())
        if one["result"] == "survived"
    ]
    text = "\n".join(["# Mutants", "", about, "", *lines, "", "## Survived", "", *left]) + "\n"
    (output / "report.md").write_text(text)
    return "\n".join(lines)


def main() -> None:
    """Choose, mutate, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rooms", nargs="*", default=[], help="folders or modules, as in planner layout; default: all")
    parser.add_argument("--mutants", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0, help="another seed, other mutants")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no mutant after so long")
    parser.add_argument("--tests-seconds", type=float, default=900.0, help="of tests for one mutant; later is a kill")
    parser.add_argument("--unit", action="store_true", help="unit tests alone")
    parser.add_argument("--again", action="store_true", help="try those again that no test killed")
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
    (copy / "deepspeed_cad" / "integrations").symlink_to(copy / "integrations")
    chosen, harmless = choose(args.rooms, args.mutants, args.seed), equivalent()
    earlier = json.loads(report.read_text())["mutants"] if report.exists() else {}
    results: dict[str, dict[str, Any]] = {}
    about = f"Seed {args.seed}, {len(chosen)} mutants of {', '.join(args.rooms) or 'all rooms'}."
    print(about, flush=True)
    for mutant in chosen:
        digest = hashlib.sha256((ROOT / mutant.path).read_bytes()).hexdigest()[:12]
        known = earlier.get(mutant.name, {"digest": "", "result": ""})
        names = mutant.name, f"{mutant.path} {mutant.scope}: {mutant.operator}"
        if any(entry.fullmatch(name) for entry in harmless for name in names):
            found = {"result": "equivalent", "seconds": 0.0, "by": ""}
        elif known["digest"] == digest and (not args.again or known["result"] == "killed" and known["by"] != "time"):
            found = known
        elif time.monotonic() - started > args.seconds:
            continue
        else:
            tests = [one for one in tests_for(mutant.path) if not args.unit or "/unit/" in one]
            found = try_mutant(mutant, tests, copy, args.tests_seconds)
            if found["result"] != "killed":
                print(f"{found['result']}: {mutant.name} (line {mutant.line}, {found['seconds']:.0f} s)", flush=True)
        facts = {"room": room_of(mutant.path), "line": mutant.line, "operator": mutant.operator, "digest": digest}
        results[mutant.name] = facts | found
        write_report(args.output, results, about)
    print(write_report(args.output, results, about))


if __name__ == "__main__":
    main()
