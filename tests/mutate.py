"""Mutation testing: changes the code in small wrong ways and counts how many of them the fast tests notice.

    python tests/mutate.py --rooms planner layout --mutants 200
    python tests/mutate.py --mutants 600 --seconds 3600          # all rooms; again: goes on where it stopped

Once, the fast tests run on a copy of the checkout in which every statement marks itself in memory that all processes
share, those of the worker pool and those that tests start included: so it is known which tests run which statement.
Then each mutant is written into a second copy, and the tests that run its statement are run on it, the fastest first,
until one fails. They run in a process forked from one that has imported torch, transformers and the like; the pool's
workers are forked from there too. The checkout itself is never changed.

Writes report.json and report.md to `--output`. Equivalent mutants, listed in tests/README.md with the reason, do not
count.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from mutation.copies import ROOT, copy_checkout, room_of, source_files
from mutation.coverage import Coverage, collect
from mutation.mutants import Mutant, find_mutants
from mutation.runner import preload, run_tests

DEFAULT_OUTPUT = ROOT / "build" / "mutation"

NO_TESTS = (4, 5)
"""Exit codes of pytest for a file or test that is not there: that kills nothing."""


def choose(rooms: list[str], count: int, seed: int) -> list[Mutant]:
    """Mutants in random order, from each room in proportion to what can be changed there."""
    by_room: dict[str, list[Mutant]] = defaultdict(list)
    unknown = set(rooms)
    for path in map(str, source_files()):
        names = {room_of(path), path.removeprefix("deepspeed_cad/").removesuffix(".py")}
        if not rooms or names & set(rooms):
            by_room[room_of(path)] += find_mutants(path, (ROOT / path).read_text())
            unknown -= names
    if unknown:
        raise SystemExit(f"no such room: {', '.join(sorted(unknown))}")
    total = sum(len(found) for found in by_room.values())
    chosen = []
    for found in by_room.values():
        found.sort(key=lambda one: one.rank(seed))
        share = min(len(found), round(count * len(found) / total))
        # The place in the room's own order, so that a run that is stopped has seen all rooms alike.
        chosen += [(at / share, one) for at, one in enumerate(found[:share])]
    return [one for _, one in sorted(chosen, key=lambda pair: pair[0])]


def equivalent() -> dict[str, str]:
    """Mutants of which tests/README.md says why they change nothing, and the reasons; `*` stands for anything."""
    text = (ROOT / "tests" / "README.md").read_text()
    lines = re.findall(r"^- (\S+\.py .*)\n  (.*)$", text, re.MULTILINE)
    return dict(lines)


def why_harmless(mutant: Mutant, reasons: dict[str, str]) -> str:
    """The reason in the list, or ""."""
    for name in (mutant.name, f"{mutant.path} {mutant.scope or 'import'}: {mutant.operator}"):
        for entry, reason in reasons.items():
            if name == entry or re.fullmatch(re.escape(entry).replace(r"\*", ".*"), name):
                return reason
    return ""


def tests_for(mutant: Mutant, coverage: Coverage, most_seconds: float) -> list[str]:
    """Tests that run the mutant's statement: of each test first one case, then the others, short ones first."""
    line, column = mutant.statement
    reached = set(coverage.tests_of.get(f"{mutant.path}:{line}:{column}" if line else mutant.path, []))
    if not line:
        # What runs at import is seen by whoever uses the file's functions, or speaks of the file.
        stem = re.compile(rf"\b{Path(mutant.path).stem}\b")
        reached |= {test for test in coverage.seconds if stem.search(_text_of(test.split("::")[0]))}
    found = sorted(reached, key=lambda test: coverage.seconds[test])
    first: dict[str, str] = {}
    for test in found:
        first.setdefault(test.split("[")[0], test)
    ordered = list(first.values()) + [test for test in found if test not in set(first.values())]
    chosen, spent = [], 0.0
    for test in ordered:
        if spent + coverage.seconds[test] <= most_seconds or not chosen:
            chosen.append(test)
            spent += coverage.seconds[test]
    return chosen


@functools.cache
def _text_of(path: str) -> str:
    return (ROOT / path).read_text()


def try_mutant(mutant: Mutant, tests: list[str], coverage: Coverage, copy: Path) -> dict[str, Any]:
    """Write a mutant into the copy, run tests until one fails, and put the file back."""
    if not tests:
        return {"result": "not covered", "seconds": 0.0, "by": ""}
    limit = 30.0 + 5.0 * sum(coverage.seconds[test] for test in tests)
    source = (ROOT / mutant.path).read_text()
    target = copy / mutant.path
    target.write_text(mutant.apply(source))
    # Compiled files are found by size and second of change: no mutant may be taken for another, or for the original.
    os.utime(target, (0, int(mutant.rank(0)[:7], 16)))
    try:
        code, seconds = run_tests(copy, ["-x", "--timeout", str(int(limit)), *tests], limit)
    finally:
        shutil.copy2(ROOT / mutant.path, target)
    log = (copy / "tests.log").read_text(errors="replace")
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", log, re.MULTILINE)
    if code in NO_TESTS:
        raise SystemExit(f"pytest found no tests to run ({' '.join(tests[:3])} …): were they renamed? Start anew")
    result = {0: "survived", None: "killed"}.get(code, "killed")
    return {"result": result, "seconds": round(seconds, 1), "by": "time" if code is None else " ".join(failed[:1])}


# The report


def write_report(output: Path, results: dict[str, dict[str, Any]], about: str) -> str:
    """report.json, and report.md with a table per room and every survivor; returns the table."""
    (output / "report.json").write_text(json.dumps({"about": about, "mutants": results}, indent=1, ensure_ascii=False))
    rooms: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for one in results.values():
        for room in (one["room"], "all"):
            rooms[room][one["result"]] += 1
    names = sorted(set(rooms) - {"all"}) + ["all"]
    lines = [
        "| room | mutants | killed | survived | not covered | equivalent | killed of all | killed of covered |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for room in names:
        count = rooms[room]
        covered = count["killed"] + count["survived"]
        total = covered + count["not covered"]
        rates = [f"{count['killed'] / of:.0%}" if of else "–" for of in (total, covered)]
        lines.append(
            f"| {room} | {total + count['equivalent']} | {count['killed']} | {count['survived']} "
            f"| {count['not covered']} | {count['equivalent']} | {rates[0]} | {rates[1]} |"
        )
    table = "\n".join(lines)
    left = [
        f"- {one['result']}, line {one['line']}, {one['operator']}: {name}"
        for name, one in sorted(results.items())
        if one["result"] in ("survived", "not covered")
    ]
    text = "\n".join(["# Mutants", "", about, "", table, "", "## Not killed", "", *left]) + "\n"
    (output / "report.md").write_text(text)
    return table


def say(text: str) -> None:
    """Progress, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    """Collect, mutate, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rooms", nargs="*", default=[], help="folders or modules, such as planner, layout, ahead/pace; default: all"
    )
    parser.add_argument("--mutants", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0, help="another seed, other mutants")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no mutant after so long")
    parser.add_argument("--tests-seconds", type=float, default=60.0, help="most seconds of tests for one mutant")
    parser.add_argument("--tests", nargs="*", default=[], help="only these files of tests, from the root")
    parser.add_argument("--again", action="store_true", help="try those again that were not killed")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    args = parser.parse_args()
    if os.environ.get("DEEPSPEED_CAD_AUTOLOAD") != "0":
        os.environ.update(DEEPSPEED_CAD_AUTOLOAD="0", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
        os.execv(sys.executable, [sys.executable, *sys.argv])
    started = time.monotonic()
    args.output.mkdir(parents=True, exist_ok=True)
    preload()
    coverage = collect(args.output, args.tests, say)
    chosen = choose(args.rooms, args.mutants, args.seed)
    results = _earlier(args.output / "report.json", chosen, args.again)
    harmless = equivalent()
    waiting = [one for one in chosen if one.name not in results]
    about = f"Seed {args.seed}, {len(chosen)} mutants of {', '.join(args.rooms) or 'all rooms'}."
    say(f"{len(chosen)} mutants, {len(waiting)} of them not tried yet")
    copy = args.output / "mutant0"
    copy_checkout(copy)

    def attempt(mutant: Mutant) -> dict[str, Any]:
        facts = {
            "room": room_of(mutant.path),
            "line": mutant.line,
            "operator": mutant.operator,
            "digest": _file(mutant),
        }
        if why_harmless(mutant, harmless):
            return facts | {"result": "equivalent", "seconds": 0.0, "by": ""}
        tests = tests_for(mutant, coverage, args.tests_seconds)
        return facts | try_mutant(mutant, tests, coverage, copy)

    for mutant in waiting:
        if time.monotonic() - started > args.seconds:
            break
        results[mutant.name] = found = attempt(mutant)
        if found["result"] != "killed":
            say(f"{found['result']}: {mutant.name} (line {mutant.line}, {found['seconds']:.0f} s)")
        write_report(args.output, results, about)
    for mutant in chosen:
        if mutant.name in results and why_harmless(mutant, harmless):
            results[mutant.name]["result"] = "equivalent"
    say(write_report(args.output, results, about))


def _file(mutant: Mutant) -> str:
    return hashlib.sha256((ROOT / mutant.path).read_bytes()).hexdigest()[:12]


def _earlier(path: Path, chosen: list[Mutant], again: bool) -> dict[str, dict[str, Any]]:
    """What an earlier run found of these mutants, where the file is still the same."""
    if not path.exists():
        return {}
    found = json.loads(path.read_text())["mutants"]
    kept = {}
    for mutant in chosen:
        one = found.get(mutant.name)
        if one and one["digest"] == _file(mutant) and not (again and one["result"] != "killed"):
            kept[mutant.name] = one
    return kept


if __name__ == "__main__":
    main()
