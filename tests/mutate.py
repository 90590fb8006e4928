"""Mutation testing: changes the code in small wrong ways and counts how many of them the fast tests notice.

    python tests/mutate.py --rooms planner layout --mutants 200
    python tests/mutate.py --mutants 600 --seconds 3600          # all rooms; again: goes on where it stopped

Once, the fast tests run on a copy of the checkout in which every statement marks itself: so it is known which tests run
which statement. Then each mutant is written into a second copy, and the tests that run its statement are run on it, the
fastest first, until one fails. The checkout itself is never changed.

Writes report.json and report.md to `--output`. Equivalent mutants, listed in tests/README.md with the reason, do not
count.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from mutation.coverage import ROOT, Coverage, collect, copy_checkout, preload, run_tests, source_files
from mutation.mutants import Mutant, find_mutants

NO_TESTS = (4, 5)
"""Exit codes of pytest for a file or test that is not there: that kills nothing."""
RESULTS = ("killed", "survived", "not covered", "equivalent")


def room_of(path: str) -> str:
    """A folder of the package, or a module on its ground floor."""
    parts = Path(path).parts
    return "integrations" if parts[0] == "integrations" else parts[1].removesuffix(".py")


def choose(rooms: list[str], count: int, seed: int) -> list[Mutant]:
    """Mutants in random order, from each room in proportion to what can be changed there."""
    by_room: dict[str, list[Mutant]] = defaultdict(list)
    unknown = set(rooms)
    for path in source_files():
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
        first = sorted(found, key=lambda one: one.rank(seed))[:share]
        chosen += [(at / share, one) for at, one in enumerate(first)]
    return [one for _, one in sorted(chosen, key=lambda pair: pair[0])]


def equivalent() -> list[re.Pattern[str]]:
    """Mutants of which tests/README.md says why they change nothing; `*` stands for anything."""
    entries = re.findall(r"^- (\S+\.py .*)\n  .*$", (ROOT / "tests" / "README.md").read_text(), re.MULTILINE)
    return [re.compile(re.escape(entry).replace(r"\*", ".*")) for entry in entries]


def tests_for(mutant: Mutant, coverage: Coverage, most_seconds: float) -> list[str]:
    """Tests that run the mutant's statement: of each test first one case, then the others, short ones first."""
    reached = set(coverage.tests_of.get(mutant.statement, []))
    if mutant.statement == mutant.path:
        # What runs at import is seen by whoever uses the file's functions, or speaks of the file.
        stem = re.compile(rf"\b{Path(mutant.path).stem}\b")
        speak = {
            path
            for path in {test.split("::")[0] for test in coverage.seconds}
            if stem.search((ROOT / path).read_text())
        }
        reached |= {test for test in coverage.seconds if test.split("::")[0] in speak}
    found = sorted(reached, key=lambda test: coverage.seconds[test])
    first = {test.split("[")[0]: test for test in reversed(found)}
    chosen, spent = [], 0.0
    for test in sorted(found, key=lambda test: test not in first.values()):
        if spent + coverage.seconds[test] <= most_seconds or not chosen:
            chosen.append(test)
            spent += coverage.seconds[test]
    return chosen


def try_mutant(mutant: Mutant, tests: list[str], coverage: Coverage, copy: Path) -> dict[str, Any]:
    """Write a mutant into the copy, run tests until one fails, and put the file back."""
    if not tests:
        return {"result": "not covered", "seconds": 0.0, "by": ""}
    limit = 60.0 + 5.0 * sum(coverage.seconds[test] for test in tests)
    target = copy / mutant.path
    target.write_text(mutant.apply((ROOT / mutant.path).read_text()))
    # Compiled files are found by size and second of change: no mutant may be taken for another, or for the original.
    os.utime(target, (0, int(mutant.rank(0)[:7], 16)))
    try:
        code, seconds = run_tests(copy, ["-x", "--timeout", str(int(limit)), *tests], limit)
    finally:
        shutil.copy2(ROOT / mutant.path, target)
    if code in NO_TESTS:
        raise SystemExit(f"pytest found no tests to run ({' '.join(tests[:3])} …): were they renamed? Start anew")
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", (copy / "tests.log").read_text(errors="replace"), re.MULTILINE)
    by = "time" if code is None else " ".join(failed[:1])
    return {"result": "killed" if code != 0 else "survived", "seconds": round(seconds, 1), "by": by}


def write_report(output: Path, results: dict[str, dict[str, Any]], about: str) -> str:
    """report.json, and report.md with a table per room and every survivor; returns the table."""
    (output / "report.json").write_text(json.dumps({"about": about, "mutants": results}, indent=1, ensure_ascii=False))
    count = Counter((room, one["result"]) for one in results.values() for room in (one["room"], "all"))
    lines = [f"| room | {' | '.join(RESULTS)} | killed of all |", "|---" * (len(RESULTS) + 2) + "|"]
    for room in [*sorted({room for room, _ in count} - {"all"}), "all"]:
        numbers = [count[room, result] for result in RESULTS]
        total = sum(numbers[:3])
        rate = f"{numbers[0] / total:.0%}" if total else "–"
        lines.append(f"| {room} | {' | '.join(map(str, numbers))} | {rate} |")
    left = [
        f"- {one['result']}, line {one['line']}, {one['operator']}: {name}"
        for name, one in sorted(results.items())
        if one["result"] in ("survived", "not covered")
    ]
    text = "\n".join(["# Mutants", "", about, "", *lines, "", "## Not killed", "", *left]) + "\n"
    (output / "report.md").write_text(text)
    return "\n".join(lines)


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
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "mutation")
    args = parser.parse_args()
    if os.environ.get("DEEPSPEED_CAD_AUTOLOAD") != "0":
        os.environ.update(DEEPSPEED_CAD_AUTOLOAD="0", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
        os.execv(sys.executable, [sys.executable, *sys.argv])
    started = time.monotonic()
    args.output.mkdir(parents=True, exist_ok=True)
    preload()
    coverage = collect(args.output, args.tests, say)
    chosen = choose(args.rooms, args.mutants, args.seed)
    report, harmless = args.output / "report.json", equivalent()
    earlier = json.loads(report.read_text())["mutants"] if report.exists() else {}
    results: dict[str, dict[str, Any]] = {}
    about = f"Seed {args.seed}, {len(chosen)} mutants of {', '.join(args.rooms) or 'all rooms'}."
    say(about)
    copy = args.output / "mutant0"
    copy_checkout(copy)
    for mutant in chosen:
        digest = hashlib.sha256((ROOT / mutant.path).read_bytes()).hexdigest()[:12]
        known = earlier.get(mutant.name, {"digest": "", "result": ""})
        names = mutant.name, f"{mutant.path} {mutant.scope}: {mutant.operator}"
        if any(entry.fullmatch(name) for entry in harmless for name in names):
            found = {"result": "equivalent", "seconds": 0.0, "by": ""}
        elif known["digest"] == digest and (known["result"] == "killed" or not args.again):
            found = known
        elif time.monotonic() - started > args.seconds:
            continue
        else:
            found = try_mutant(mutant, tests_for(mutant, coverage, args.tests_seconds), coverage, copy)
            if found["result"] != "killed":
                say(f"{found['result']}: {mutant.name} (line {mutant.line}, {found['seconds']:.0f} s)")
        facts = {"room": room_of(mutant.path), "line": mutant.line, "operator": mutant.operator, "digest": digest}
        results[mutant.name] = facts | found
        write_report(args.output, results, about)
    say(write_report(args.output, results, about))


if __name__ == "__main__":
    main()
