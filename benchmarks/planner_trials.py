"""What each number of the planner's heuristic does: plans again with one of them changed.

    python benchmarks/planner_trials.py --reference FILE                    # all of TRIALS; FILE as for planner.py
    python benchmarks/planner_trials.py --reference FILE --only SLACK NEAR
    python benchmarks/planner_trials.py --spanning                          # SPANNING_TRIALS, documents on many ranks

Plans are made at tolerance 0.02: once by pairs, once with a KV row at 250 pairs. Bytes are shares of the published
ones. For a number of csrc/planner_constants.h the planner is compiled with it. That file and planner/constants.py quote
this table.

With `--spanning`, streams of documents of which some lie on 2 to 16 ranks are planned at tolerance 0.05. Shares are
those of the plan that starts at home: its burden (planner/answer.py), what it moves in a forward, when the rank ends
that has most to attend, and how many tasks it has.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from _deepspeed_cad_build import COMPILE, SYSTEM, find_compiler
from deepspeed_cad import native
from deepspeed_cad.cost import PAIRS, CostModel
from deepspeed_cad.layout import Layout
from deepspeed_cad.planner import HeadShape, PlanInput, answer, constants, core, finish, make_plan
from deepspeed_cad.planner.core import Aim, solve

ROOT = Path(__file__).parents[1]
TRIALS: dict[str, list[Any]] = {
    "BAND": [0.25, 0.75, 1.0],
    "AIMS": ["{0.8}", "{0.95, 0.95, 0.95, 0.95}", "{0.5, 0.6, 0.7, 0.8}"],
    "SLACK": [0.02, 0.05, 0.2],
    "BISECTIONS": [30, 100],
    "OVERSHOOT": [0.0, 1.0],
    "MOVE_SHARES": ["{0.4}", "{0.5}", "{0.7}", "{1.0}"],
    "LEFTOVER_PRICE": [1.0, 1.1, 1.4, 2.0],
    "DEARER": [1.0, 1.05, 1.2, 1e300],
    "GROUP_STEPS": [2, 100],
    "DOCUMENTS": [1, 4, 8],
    "LONGEST": [8, 16, 64],
    "SHORTEST": [2, 32],
    "SHORT_STEPS": [0, 2, 32],
    "NEAR": [1, 2, 8],
}
SPANNING_TRIALS: dict[str, list[Any]] = {
    "READ_FROM": [2, 4, 6],
    "HELP": [0.3, 0.5, 1.0],
    "KEPT": [(0,), (1,), (0, 1), (1, 0, 2)],
    "EVEN": [(1.0,), (0.2,), (0.05,), (1.0, 0.2), (1.0, 0.1, 0.02)],
    "WORTH": [0.0, 0.01, 0.05, 0.1],
    "LEAST_MOVE": [0.0, 0.0005, 0.002],
}
STREAMS = (
    (2, 131072, 60000, 2), (4, 131072, 200000, 4), (8, 131072, 60000, 8), (16, 65536, 300000, 16),
    (32, 65536, 60000, 8), (32, 65536, 200000, 16),
)  # fmt: skip
"""Ranks, tokens of each, median of documents, ranks that the longest has the tokens of."""
BY_KEYS = CostModel("a KV row at 250 pairs", key=250.0)
TOLERANCE = 0.02


def plan_all(cases: list[dict[str, Any]]) -> str:
    """One row of the table."""
    figures = []
    started = time.perf_counter()
    for case in cases:
        layout = Layout.from_stream(case["documents"], case["ranks"], case["tokens_per_rank"])
        shape = HeadShape(
            case["heads"], case["kv_heads"], case["head_dim"], case["head_dim"], case["bytes_per_element"]
        )
        published = case["published"]["0.05"]
        plan, by_keys = (
            make_plan(PlanInput(layout.tick(), shape, cost, tolerance=TOLERANCE)) for cost in (PAIRS, BY_KEYS)
        )
        figures.append(
            (
                plan.sent_bytes.sum() / published["total_bytes"],
                by_keys.sent_bytes.sum() / published["total_bytes"],
                plan.received_bytes.max() / published["hottest_receive_bytes"],
                plan.imbalance,
                plan.load.min() / plan.load.mean(),
                len(plan.tasks),
            )
        )
    seconds = time.perf_counter() - started
    total, keys, hottest, most, least, tasks = np.array(figures).T
    return (
        f"| {total.mean():.4f} | {keys.mean():.4f} | {hottest.mean():.4f} | {most.max():.4f} | {least.min():.4f} "
        f"| {tasks.sum():.0f} | {seconds:.1f} |"
    )


def draw_streams() -> list[Layout]:
    """Two streams of each kind."""
    random, layouts = np.random.default_rng(0), []
    for ranks, tokens, median, longest in STREAMS * 2:
        lengths = np.minimum(random.lognormal(np.log(median), 1.3, 4 * ranks * tokens // median).astype(int) + 16,
                             tokens * longest)  # fmt: skip
        layouts.append(Layout.from_stream(lengths[np.cumsum(lengths) <= ranks * tokens].tolist(), ranks, tokens))
    return layouts


def plan_spanning(layouts: list[Layout]) -> str:
    """One row of the table with `--spanning`."""
    figures = []
    started = time.perf_counter()
    for groups in (8, 32):
        shape = HeadShape(32, groups, 128, 128, 2)
        for layout in layouts:
            problem = PlanInput(layout.tick(), shape, BY_KEYS)
            at_home = solve(problem, Aim(problem.tolerance))
            found = answer.best_start(problem)
            figures.append(
                (
                    answer.burden(problem, found.flows) / answer.burden(problem, at_home.flows),
                    found.flows.sent.sum() / at_home.flows.sent.sum(),
                    found.flows.received.max() / at_home.flows.received.max(),
                    found.work.max() / at_home.work.max(),
                    len(found.tasks) / len(at_home.tasks),
                )
            )
    seconds = time.perf_counter() - started
    few, many = np.array(figures).reshape(2, -1, 5).mean(1)
    shares = " | ".join(f"{share:.4f}" for share in (*few, *many))
    return f"| {shares} | {seconds:.1f} |"


def try_spanning(only: list[str] | None) -> None:
    """The table of documents over many ranks."""
    layouts = draw_streams()
    heads = [f"{heads}: burden | bytes | hottest rank | ends | tasks" for heads in ("8 KV heads", "32")]
    print("| number | value |", " | ".join(heads), "| seconds |")
    print("|---" * 13 + "|")
    print_trials(SPANNING_TRIALS, only, lambda: plan_spanning(layouts))


def print_trials(trials: dict[str, list[Any]], only: list[str] | None, plan: Callable[[], str]) -> None:
    """One row for each value of each number, by `plan`, and first one with the numbers as they are."""
    print("| as they are | |", plan()[2:], flush=True)
    for name in only or trials:
        for value in trials[name]:
            with changed(name, value):
                print(f"| {name} | {value} {plan()}", flush=True)


@contextmanager
def changed(name: str, value: Any) -> Iterator[None]:
    """One number is another one: in planner/constants.py and the modules that took it over from there, and in C++."""
    holders = [module for module in (constants, core, finish) if hasattr(module, name)]
    before = getattr(constants, name, None)
    camel = "k" + name.title().replace("_", "")
    header = (ROOT / "csrc" / "planner_constants.h").read_text()
    text, found = re.subn(rf"^(constexpr \S+ {camel}(?:\[\])?) = [^;]+;", rf"\1 = {value};", header, flags=re.MULTILINE)
    if not holders and not found:
        raise SystemExit(f"{name} is neither in planner/constants.py nor in csrc/planner_constants.h")
    load = native._load_once
    for module in holders:
        setattr(module, name, value)
    if found:
        library = compile_planner(text)
        native._load_once = lambda: (library, "")  # type: ignore[assignment]
    yield
    native._load_once = load
    for module in holders:
        setattr(module, name, before)


def compile_planner(header: str) -> ctypes.CDLL:
    """The planner with another planner_constants.h."""
    compiler = find_compiler()
    if compiler is None:
        raise SystemExit("a C++ compiler is needed to change numbers of csrc/planner_constants.h")
    with tempfile.TemporaryDirectory() as folder:
        for file in (ROOT / "csrc").iterdir():
            shutil.copy(file, folder)
        Path(folder, "planner_constants.h").write_text(header)
        sources = [*Path(folder).glob("planner*.cpp"), Path(folder, "last_error.cpp")]
        library = Path(folder, "planner.so")
        subprocess.run([*compiler.command, *COMPILE, "-o", library, *sources, *SYSTEM], check=True)
        return ctypes.CDLL(str(library))


def main() -> None:
    """Print the table, the numbers as they are first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", help="file with cases and published figures")
    parser.add_argument("--spanning", action="store_true", help="documents over many ranks, of a generator")
    parser.add_argument("--only", nargs="*", choices=[*TRIALS, *SPANNING_TRIALS], help="names of numbers")
    args = parser.parse_args()
    if args.spanning:
        return try_spanning(args.only)
    if not args.reference:
        parser.error("give --reference or --spanning")
    cases = json.loads(Path(args.reference).read_text())["cases"]
    print("| number | value | bytes | bytes, by keys | hottest rank | max/mean | min/mean | tasks | seconds |")
    print("|---|---|---|---|---|---|---|---|---|")
    print_trials(TRIALS, args.only, lambda: plan_all(cases))


if __name__ == "__main__":
    main()
