"""What each number of the planner's heuristic does: plans again with one of them changed.

    python benchmarks/planner_trials.py --reference FILE                    # all of TRIALS; FILE as for planner.py
    python benchmarks/planner_trials.py --reference FILE --only SLACK NEAR

Plans are made by the Python planner, which is the compiled one to the row, at tolerance 0.02: once by pairs, once with
a KV row at 250 pairs. Bytes are shares of the published ones. planner/constants.py quotes this table.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from deepspeed_cad.cost import PAIRS, CostModel
from deepspeed_cad.layout import Layout
from deepspeed_cad.planner import HeadShape, PlanInput, constants, levels, offers, reference, round
from deepspeed_cad.planner.answer import answer

TRIALS: dict[str, list[Any]] = {
    "BAND": [0.25, 0.75, 1.0],
    "AIMS": [(0.8,), (0.95,) * 4, (0.5, 0.6, 0.7, 0.8)],
    "SLACK": [0.02, 0.05, 0.2],
    "BISECTIONS": [30, 100],
    "OVERSHOOT": [0.0, 1.0],
    "MOVE_SHARES": [(0.4,), (0.5,), (0.7,), (1.0,)],
    "LEFTOVER_PRICE": [1.0, 1.1, 1.4, 2.0],
    "DEARER": [1.0, 1.05, 1.2, math.inf],
    "GROUP_STEPS": [2, 100],
    "DOCUMENTS": [1, 4, 8],
    "LONGEST": [8, 16, 64],
    "SHORTEST": [2, 32],
    "SHORT_STEPS": [0, 2, 32],
    "NEAR": [1, 2, 8],
}
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
            answer(PlanInput(layout.tick(), shape, cost, tolerance=TOLERANCE), reference.solve)
            for cost in (PAIRS, BY_KEYS)
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


def main() -> None:
    """Print the table, the numbers as they are first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", required=True, help="file with cases and published figures")
    parser.add_argument("--only", nargs="*", choices=TRIALS, help="names of numbers")
    args = parser.parse_args()
    cases = json.loads(Path(args.reference).read_text())["cases"]
    print("| number | value | bytes | bytes, by keys | hottest rank | max/mean | min/mean | tasks | seconds |")
    print("|---|---|---|---|---|---|---|---|---|")
    print("| as they are | |", plan_all(cases)[2:], flush=True)
    for name in args.only or TRIALS:
        holders = [module for module in (levels, offers, reference, round) if hasattr(module, name)]
        for value in TRIALS[name]:
            for module in holders:
                setattr(module, name, value)
            print(f"| {name} | {value} {plan_all(cases)}", flush=True)
        for module in holders:
            setattr(module, name, getattr(constants, name))


if __name__ == "__main__":
    main()
