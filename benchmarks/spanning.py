"""What plans of documents on many ranks move and hold, from each start: at home, dealt out by head groups, as taken.

    python benchmarks/spanning.py               # prints the table and writes results/spanning.md
    python benchmarks/spanning.py --workload benchmarks/workloads/… …    # adds steps of workloads

Bytes are those of one layer in bf16, in GiB. Forward: Q, K and V to servers, O back. Backward: dO, Q, K and V out; dQ,
dK and dV back. What lands is what a rank needs room for in one area: dO, Q, K and V of all that it serves, its own rows
among them; and dQ, dK and dV that come back (backward needs more of both). The `nvlink` transport has two of the first
and one of the second. Costs are those of the shipped profile of FlashAttention-4, the tolerance is 0.05.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from deepspeed_cad.layout import Layout
from deepspeed_cad.planner import HeadShape, PlanInput, make_plan, native, reference, spread
from deepspeed_cad.planner.aim import Aim, Solution
from deepspeed_cad.planner.constants import READ_FROM
from deepspeed_cad.planner.flows import O_RECEIVED, O_SENT, QKV_RECEIVED, QKV_SENT
from deepspeed_cad.planner.plan import Plan
from deepspeed_cad.planner.starts import landing
from deepspeed_cad.profiles import Profile
from deepspeed_cad.profiles.choice import SHIPPED

HERE = Path(__file__).parent
GIB, MILLION = 1 << 30, 1 << 20
SHAPES = {
    "32 / 8": HeadShape(32, 8, 128, 128, 2),
    "32 / 32": HeadShape(32, 32, 128, 128, 2),
    "32 / 2": HeadShape(32, 2, 128, 128, 2),
}
LAYOUTS: dict[str, tuple[list[int], int, int]] = {
    "524,288 over 2": ([MILLION // 2], 2, MILLION // 4),
    "786,432 over 3": ([3 * MILLION // 4], 3, MILLION // 4),
    "1,048,576 over 4": ([MILLION], 4, MILLION // 4),
    "1,048,576 over 8": ([MILLION], 8, MILLION // 8),
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
    out, back = landing(problem, found.flows)
    figures = (forward.sum(), forward.max(), backward.sum(), backward.max(), out.max(), back.max())
    sizes = " | ".join(f"{value / GIB:.2f}" for value in figures)
    return f"| {name} | {start} | {sizes} | {found.work.max() / found.work.mean():.4f} | {len(found.tasks)} |"


def rows(name: str, layout: Layout, shape: HeadShape) -> list[str]:
    """Start at home, pure head split, and which of the starts is taken."""
    cost = Profile.load(SHIPPED / "h200_flash_attn_4.json").cost_for(shape)
    problem = PlanInput(layout.tick(), shape, cost)
    solve = native.solve if native.is_available() else reference.solve
    plan: Plan = make_plan(problem)
    starts = {
        label: solve(problem, Aim(problem.tolerance, kept=kept))
        for label, kept in (("home", -1), ("dealt out", 0), ("but the first rank's", 1))
    }
    if np.array_equal(starts["dealt out"].tasks, starts["home"].tasks):
        starts["dealt out"] = also_on_two(problem)
    taken = next(label for label, found in starts.items() if np.array_equal(found.tasks, plan.tasks))
    if np.array_equal(starts["dealt out"].tasks, starts["home"].tasks):
        taken, starts = "home", {"home": starts["home"]}  # no document lies on two ranks
    shown = {label: found for label, found in starts.items() if label != "but the first rank's" or label == taken}
    return [row(name, f"**{label}**" if label == taken else label, problem, found) for label, found in shown.items()]


def also_on_two(problem: PlanInput) -> Solution:
    """Documents on two ranks dealt out too, which plans never do."""
    spread.READ_FROM = 2
    try:
        return reference.solve(problem, Aim(problem.tolerance, kept=0))
    finally:
        spread.READ_FROM = READ_FROM


def main() -> None:
    """Print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", type=Path, nargs="*", default=[], help="of train_step.py")
    options = parser.parse_args()
    lines = ["# Documents on many ranks: what plans move and hold", "", *(__doc__ or "").splitlines()[5:]]
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
