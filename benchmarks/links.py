"""What plans can reach where links between hosts are slow: predicted steps over the bound, without any GPU.

    python benchmarks/links.py --workload FILE --hosts 0,1 --between 23.9 6.6

For each speed between hosts and each step of the workload one layer is planned, forward and backward, with the costs
of a profile, and timed by the planner's model of transfers (planner/finish.py). A step ends with its slowest rank: the
rest of a layer, the same on all ranks, and its attention. The bound has every rank at the mean, with transfers that
take no time. "even" is the plan that minds no speeds between hosts, "best level" the earliest end over many levels down
to which the slowest host comes; the planner, which tries a few, should come close.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from deepspeed_cad.layout import Layout  # noqa: E402
from deepspeed_cad.planner import make_plan  # noqa: E402
from deepspeed_cad.planner.answer import slowest, span, ways  # noqa: E402
from deepspeed_cad.planner.constants import WAVES  # noqa: E402
from deepspeed_cad.planner.core import Aim, solve  # noqa: E402
from deepspeed_cad.planner.plan import HeadShape, PlanInput  # noqa: E402
from deepspeed_cad.planner.question import with_links  # noqa: E402
from deepspeed_cad.profiles import Profile  # noqa: E402
from deepspeed_cad.profiles.profile import SHIPPED  # noqa: E402

LEVELS = np.linspace(0.0, 1.0, 41)


class Ends(NamedTuple):
    """Seconds of one layer's attention on the slowest rank, and bytes between hosts in its forward."""

    plain: float
    mean: float
    even: float
    planned: float
    best: float
    between: int
    waves: int


def time_step(problem: PlanInput) -> Ends:
    """Plan one step in all ways."""
    even = solve(problem, Aim(problem.tolerance))
    ends = []
    for units in ways(problem):
        top, mean = span(problem, even, units)
        for share in LEVELS:
            found = solve(problem, Aim(problem.tolerance, units, top - share * (top - mean)))
            ends.append(slowest(problem, found))
    plan = make_plan(problem)
    return Ends(
        float(plan.load_before.max()), float(plan.load_before.mean()), slowest(problem, even), float(plan.finish.max()),
        min(ends), plan.between_bytes, plan.waves,
    )  # fmt: skip


def main() -> None:
    """Print one row for each speed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", type=Path, required=True)
    parser.add_argument("--hosts", required=True, help="the host of each rank, 0,1")
    parser.add_argument("--between", type=float, nargs="+", required=True, help="GB/s into a rank from other hosts")
    parser.add_argument("--inside", type=float, default=362.0, help="GB/s into a rank from its host (default: 362)")
    parser.add_argument(
        "--linear-ms", type=float, default=229.0,
        help="the rest of a step, for each layer: by default 64K tokens of 8B size with full checkpointing on an H200, "
        "8 layers with embedding and loss at 35.7K tokens/s without attention",
    )  # fmt: skip
    parser.add_argument("--waves", type=int, nargs="+", default=WAVES, help="numbers to choose from (default: all)")
    parser.add_argument("--profile", type=Path, default=SHIPPED / "h200_flash_attn_4.json")
    parser.add_argument("--tolerance", type=float, default=0.02)
    options = parser.parse_args()
    workload = json.loads(options.workload.read_text())
    hosts = np.array([int(one) for one in options.hosts.split(",")])
    shape = HeadShape(32, 8, 128, 128, 2)
    costs = Profile.load(options.profile).cost_for(shape)
    say = sys.stdout.write
    say(
        "| GB/s between hosts | bound ÷ plain | even ÷ bound | CAD ÷ bound | best level ÷ bound | CAD ÷ plain | MB "
        "| waves |\n"
    )
    say("|---|---|---|---|---|---|---|---|\n")
    for between in options.between:
        cost, steps = with_links(costs, options.inside, between), []
        for lengths in workload["steps"]:
            layout = (
                Layout.from_stream(lengths, workload["ranks"], workload["tokens_per_rank"])
                if workload.get("stream")
                else Layout.from_rank_lengths(lengths)
            )
            problem = PlanInput(
                layout.tick(), shape, cost, tolerance=options.tolerance, hosts=hosts, waves=tuple(options.waves),
            )  # fmt: skip
            steps.append(time_step(problem))
        plain, mean, even, planned, best, *_ = np.array(steps).sum(0) + len(steps) * options.linear_ms / 1e3
        waves = "/".join(map(str, sorted({step.waves for step in steps})))
        moved = sum(step.between for step in steps) / len(steps) / 1e6
        say(
            f"| {between:g} | {plain / mean:.3f} | {mean / even:.3f} | {mean / planned:.3f} | {mean / best:.3f} "
            f"| {plain / planned:.3f} | {moved:.0f} | {waves} |\n"
        )


if __name__ == "__main__":
    main()
