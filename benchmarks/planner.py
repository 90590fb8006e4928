"""What plans reach and what planning costs.

    python benchmarks/planner.py                      # growth over ranks and documents
    python benchmarks/planner.py --reference FILE     # and beside the figures of another planner, which do not ship
    python benchmarks/planner.py --output FOLDER      # writes planner.json and planner.md there

FILE holds `cases`: each with documents (lengths in stream order), tokens_per_rank, ranks, heads, kv_heads, head_dim,
bytes_per_element and `published`, which maps a tolerance to total_bytes and hottest_receive_bytes.

What counts: bytes of Q, K, V and O that leave or reach a rank in one layer's forward. A rank receives Q, K and V of
what it serves for others, K and V of other ranks that its own rows read (documents that span ranks), and O of its own
rows that others computed. `server` beside it counts O where it is made instead of where it goes. K and V count once per
(server, document, head group). Times are the least of several runs on one core. Slices are those of all ranks, and the
schedule is that of one: every rank makes its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from plan_checks import check_coverage, check_cuts

from deepspeed_cad import schedule
from deepspeed_cad.cost import PAIRS
from deepspeed_cad.layout import Layout
from deepspeed_cad.planner import HeadShape, Plan, PlanInput, make_plan

LLAMA_8B = HeadShape(32, 8, 128, 128, 2)
PUBLISHED_TOLERANCE = "0.05"


def compare(case: dict[str, Any], tolerance: float) -> dict[str, Any]:
    """Plan one case and set it against what is published for it."""
    layout = Layout.from_stream(case["documents"], case["ranks"], case["tokens_per_rank"])
    shape = HeadShape(case["heads"], case["kv_heads"], case["head_dim"], case["head_dim"], case["bytes_per_element"])
    problem = PlanInput(layout.tick(), shape, PAIRS, tolerance=tolerance)
    plan = make_plan(problem)
    check_coverage(plan.tasks, problem.tick, shape.groups)
    published, mean = case["published"][PUBLISHED_TOLERANCE], plan.load.mean()
    return {
        "name": case["name"],
        "ranks": case["ranks"],
        "before": plan.load_before.max() / mean,
        "max": plan.load.max() / mean,
        "min": plan.load.min() / mean,
        "total_mib": plan.sent_bytes.sum() / 2**20,
        "total_ratio": plan.sent_bytes.sum() / published["total_bytes"],
        "hottest_mib": plan.received_bytes.max() / 2**20,
        "hottest_ratio": plan.received_bytes.max() / published["hottest_receive_bytes"],
        "hottest_server_ratio": served_bytes(problem, plan).max() / published["hottest_receive_bytes"],
        "tasks": len(plan.tasks),
        "home_tasks": len(problem.tick.query),
        "wrong_cuts": check_cuts(plan.tasks, problem.tick, problem.granularity),
        "plan_ms": least_ms(lambda: make_plan(problem), 15),
    }


def served_bytes(problem: PlanInput, plan: Plan) -> np.ndarray:
    """[ranks]: Q, K and V that reach each rank and O that it makes for others."""
    shape, tick = problem.shape, problem.tick
    landed, made = np.zeros(tick.ranks, np.int64), np.zeros(tick.ranks, np.int64)
    homes: dict[int, list[tuple[int, int, int]]] = {}
    for document, begin, end, rank in zip(tick.query.document, tick.query.begin, tick.query.end, tick.query.rank):
        homes.setdefault(int(document), []).append((int(begin), int(end), int(rank)))
    for document, begin, end, group, group_end, server in plan.tasks.tolist():
        for low, high, rank in homes[document]:
            rows = max(min(end, high) - max(begin, low), 0) if rank != server else 0
            landed[rank] += rows * (group_end - group) * shape.output_bytes
            made[server] += rows * (group_end - group) * shape.output_bytes
    return plan.received_bytes - landed + made


def grow(ranks: int, tokens: int, spanning: bool, median: int, tolerance: float) -> dict[str, Any]:
    """Time plan and schedules on documents drawn from a heavy-tailed distribution."""
    random = np.random.default_rng(ranks)
    lengths = np.minimum(random.lognormal(np.log(median), 1.3, 4 * ranks * tokens // median).astype(np.int64) + 16,
                         tokens * (8 if spanning else 1))  # fmt: skip
    if spanning:
        kept = lengths[np.cumsum(lengths) <= ranks * tokens].tolist()
        layout = Layout.from_stream(kept, ranks, tokens)
    else:
        rows: list[list[int]] = [[]]
        for length in lengths.tolist():
            if sum(rows[-1]) + length > tokens:
                if len(rows) == ranks:
                    break
                rows.append([])
            rows[-1].append(length)
        layout = Layout.from_rank_lengths(rows + [[]] * (ranks - len(rows)))
    problem = PlanInput(layout.tick(), LLAMA_8B, PAIRS, tolerance=tolerance)
    plan = make_plan(problem)
    tick, groups, mean = problem.tick, LLAMA_8B.groups, plan.load.mean()
    slices = schedule.build_slices(tick, plan.tasks)
    repeats = 15 if ranks <= 512 else 5
    result = {
        "ranks": ranks,
        "spanning": spanning,
        "documents": len(np.unique(tick.query.document)),
        "before": plan.load_before.max() / mean,
        "max": plan.load.max() / mean,
        "min": plan.load.min() / mean,
        "tasks": len(plan.tasks),
        "slices": len(slices.table),
        "plan_ms": least_ms(lambda: make_plan(problem), repeats),
        "slices_ms": least_ms(lambda: schedule.build_slices(tick, plan.tasks), repeats),
        "schedule_ms": least_ms(lambda: schedule.schedule_rank(tick, slices, 0, groups), repeats),
    }
    return result | {"all_ms": result["plan_ms"] + result["slices_ms"] + result["schedule_ms"]}


def least_ms(run: Callable[[], Any], repeats: int) -> float:
    """Milliseconds of one call, the least of several."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times) * 1e3


def compared_table(rows: list[dict[str, Any]], tolerance: float) -> list[str]:
    """Markdown of the comparison."""
    lines = [
        f"Tolerance {tolerance:g} here, {PUBLISHED_TOLERANCE} there. Bytes are shares of the published ones.",
        "",
        "| case | max/mean before | after | min/mean | total bytes | hottest rank | hottest, server | tasks (at home) "
        "| wrong cuts | plan ms |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['name']} | {row['before']:.2f} | {row['max']:.4f} | {row['min']:.4f} "
            f"| {row['total_ratio']:.3f} "
            f"| {row['hottest_ratio']:.3f} | {row['hottest_server_ratio']:.3f} | {row['tasks']} ({row['home_tasks']}) "
            f"| {row['wrong_cuts']} | {row['plan_ms']:.2f} |"
        )
    total, hottest, server = (
        float(np.mean([row[key] for row in rows])) for key in ("total_ratio", "hottest_ratio", "hottest_server_ratio")
    )
    worst = f"**{max(row['max'] for row in rows):.4f}** | **{min(row['min'] for row in rows):.4f}**"
    wrong = sum(row["wrong_cuts"] for row in rows)
    lines.append(
        f"| **mean, or worst** | | {worst} | **{total:.3f}** | **{hottest:.3f}** | **{server:.3f}** | | **{wrong}** | |"
    )
    return lines


def growth_table(rows: list[dict[str, Any]]) -> list[str]:
    """Markdown of the growth."""
    lines = [
        "| ranks | documents | span ranks | max/mean before | after | min/mean | tasks | slices | plan ms | slices ms "
        "| schedule ms | all ms |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['ranks']} | {row['documents']} | {'yes' if row['spanning'] else 'no'} | {row['before']:.2f} "
            f"| {row['max']:.4f} | {row['min']:.4f} | {row['tasks']} | {row['slices']} | {row['plan_ms']:.2f} "
            f"| {row['slices_ms']:.2f} | {row['schedule_ms']:.2f} | {row['all_ms']:.2f} |"
        )
    return lines


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--reference", help="file with cases and published figures")
    parser.add_argument("--tolerance", type=float, default=0.02)
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 64, 512, 4096])
    parser.add_argument("--tokens", type=int, default=131072, help="tokens of each rank")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="for JSON and Markdown; printed only without it")
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
                            cwd=Path(__file__).parent)  # fmt: skip
    about = {
        "commit": commit.stdout.strip(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "machine": processor(),
    }
    lines = ["# Planner", "", ", ".join(f"{key} {value}" for key, value in about.items()) + ". One core.", ""]
    result: dict[str, Any] = {"about": about}
    if args.reference:
        cases = json.loads(Path(args.reference).read_text())["cases"]
        result["compared"] = [compare(case, args.tolerance) for case in cases]
        lines += ["## Against what is published", "", *compared_table(result["compared"], args.tolerance), ""]
    result["growth"] = [
        grow(ranks, args.tokens, spanning, median, args.tolerance)
        for ranks in args.ranks
        for spanning, median in ((False, 3000), (False, 20000), (True, 60000))
    ]
    lines += [f"## Growth: {args.tokens} tokens per rank, 32 / 8 heads of 128", "", *growth_table(result["growth"])]
    text = "\n".join(lines) + "\n"
    print(text)
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "planner.md").write_text(text)
        (args.output / "planner.json").write_text(json.dumps(result, indent=1) + "\n")


def processor() -> str:
    """The processor's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()


if __name__ == "__main__":
    main()
