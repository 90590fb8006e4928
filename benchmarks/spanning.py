"""What plans of documents on many ranks move and hold, from each start: at home, dealt out by head groups, as taken.

    python benchmarks/spanning.py               # prints the table and writes results/spanning.md
    python benchmarks/spanning.py --workload benchmarks/workloads/… …    # adds steps of workloads

Bytes are those of one layer in bf16, in GiB. Forward: Q, K and V to servers, O back. Backward: dO, Q, K and V out; dQ,
dK and dV back. What lands is what a rank needs room for at once if it does not go in waves: dO and Q of the rows of
others that it serves, K and V of all that is read for that, its own among them; and dQ, dK and dV that come back
(backward needs more of both). Costs are those of the shipped profile of FlashAttention-4, the tolerance is 0.05, a
fifth of it for "even", a twentieth for "more even".
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from deepspeed_cad.layout import Ints, Layout
from deepspeed_cad.planner import HeadShape, PlanInput, core, make_plan
from deepspeed_cad.planner.answer import most_ranks
from deepspeed_cad.planner.constants import EVEN, READ_FROM
from deepspeed_cad.planner.core import Aim, Solution, solve, split_own_rows
from deepspeed_cad.planner.plan import O_RECEIVED, O_SENT, QKV_RECEIVED, QKV_SENT, Plan
from deepspeed_cad.profiles import Profile
from deepspeed_cad.profiles.profile import SHIPPED
from deepspeed_cad.schedule import build_slices

HERE = Path(__file__).parent
STARTS = {"home": -1, "dealt out": 0, "but the first rows": 1}
MORE = ("even", "more even")
GIB, MILLION = 1 << 30, 1 << 20
SHAPES = {
    "32 / 8": HeadShape(32, 8, 128, 128, 2),
    "32 / 32": HeadShape(32, 32, 128, 128, 2),
    "32 / 2": HeadShape(32, 2, 128, 128, 2),
}
LAYOUTS: dict[str, tuple[Any, ...]] = {
    "524,288 over 2": ([MILLION // 2], 2, MILLION // 4),
    "786,432 over 3": ([3 * MILLION // 4], 3, MILLION // 4),
    "1,048,576 over 4": ([MILLION], 4, MILLION // 4),
    "1,048,576 over 8": ([MILLION], 8, MILLION // 8),
    "1,048,576 over 4, zigzag": ([MILLION], 4, MILLION // 4, True),
    "1,048,576 over 8, zigzag": ([MILLION], 8, MILLION // 8, True),
    "2,097,152 over 16": ([2 * MILLION], 16, MILLION // 8),
    "8,388,608 over 64": ([8 * MILLION], 64, MILLION // 8),
    "700,000 and 40 × 8,000 over 4": ([700_000] + [8000] * 40, 4, MILLION // 4),
    "600,000 and 448,576 over 4": ([600_000, 448_576], 4, MILLION // 4),
    "600,000 and 448,576 over 8": ([600_000, 448_576], 8, MILLION // 8),
    "100, 1,000,000 and 900,000 over 8": ([100, 1_000_000, 900_000], 8, MILLION // 4),
}
HEADER = (
    "| documents | start | forward | to the hottest | backward | to the hottest | lands out | back | max/mean | tasks |"
)


def row(name: str, start: str, problem: PlanInput, found: Solution) -> str:
    """One line of the table."""
    moved = found.flows.bytes.sum(1)
    forward = moved[QKV_RECEIVED] + moved[O_RECEIVED]
    backward = moved[QKV_RECEIVED] + moved[O_SENT] + moved[QKV_SENT]
    slices = build_slices(problem.tick, own_tasks(problem, found), problem.window)
    shape = problem.shape
    out = slices.served_rows @ np.array([shape.query_bytes + shape.output_bytes, shape.key_value_bytes])
    back = slices.landed_rows @ np.array([shape.query_bytes, shape.key_value_bytes])
    figures = (forward.sum(), forward.max(), backward.sum(), backward.max(), out.max(), back.max())
    sizes = " | ".join(f"{value / GIB:.2f}" for value in figures)
    return f"| {name} | {start} | {sizes} | {found.work.max() / found.work.mean():.4f} | {len(found.tasks)} |"


def own_tasks(problem: PlanInput, found: Solution) -> Ints:
    """Tasks as plans give them: rows that need no other rank apart."""
    return split_own_rows(problem.tick, found.tasks, problem.window, problem.granularity)


def rows(name: str, layout: Layout, shape: HeadShape) -> list[str]:
    """Start at home, pure head split, and which of the starts is taken."""
    cost = Profile.load(SHIPPED / "h200_flash_attn_4.json").cost_for(shape)
    problem = PlanInput(layout.tick(), shape, cost)
    plan: Plan = make_plan(problem)
    starts = {label: solve(problem, Aim(problem.tolerance, kept=kept)) for label, kept in STARTS.items()}
    if most_ranks(problem) > 1:
        for label, share in zip(MORE, EVEN[1:]):
            for start, kept in STARTS.items():
                starts[f"{start}, {label}"] = solve(problem, Aim(share * problem.tolerance, kept=kept))
    if np.array_equal(starts["dealt out"].tasks, starts["home"].tasks):
        starts["dealt out"] = also_on_two(problem)
    taken = next(label for label, found in starts.items() if np.array_equal(own_tasks(problem, found), plan.tasks))
    if np.array_equal(starts["dealt out"].tasks, starts["home"].tasks):
        taken, starts = "home", {"home": starts["home"]}  # no document lies on two ranks
    shown = {label: found for label, found in starts.items() if label in (*STARTS, taken)}
    return [row(name, f"**{label}**" if label == taken else label, problem, found) for label, found in shown.items()]


def also_on_two(problem: PlanInput) -> Solution:
    """Documents on two ranks dealt out too, which plans never do."""
    core.READ_FROM = 2
    try:
        return solve(problem, Aim(problem.tolerance, kept=0))
    finally:
        core.READ_FROM = READ_FROM


def main() -> None:
    """Print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", type=Path, nargs="*", default=[], help="of train_step.py")
    options = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE)
    lines = ["# Documents on many ranks: what plans move and hold", ""]
    lines += [f"Commit {commit.stdout.strip()}, date {datetime.now(timezone.utc).date().isoformat()}.", ""]
    lines += (__doc__ or "").splitlines()[5:]
    layouts = {name: Layout.from_stream(*stream) for name, stream in LAYOUTS.items()}
    for path in options.workload:
        found = json.loads(path.read_text())
        for number, step in enumerate(found["steps"]):
            name = f"{path.stem}, step {number}"
            if found.get("stream"):
                layouts[name] = Layout.from_stream(step, found["ranks"], found["tokens_per_rank"])
            else:
                layouts[name] = Layout.from_rank_lengths(step)
    for heads, shape in SHAPES.items():
        lines += ["", f"## {heads} heads of 128", "", HEADER, "|---" * HEADER.count(" | ") + "|---|"]
        for name, layout in layouts.items():
            lines += rows(name, layout, shape)
    text = "\n".join(lines) + "\n"
    (HERE / "results" / "spanning.md").write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
