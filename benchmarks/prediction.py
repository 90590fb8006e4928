"""Planned attention against measured attention: `python benchmarks/prediction.py --workload FILE --result FILE`.

The result is the JSON that benchmarks/train_step.py wrote for that workload, with a mode "cad". Prints, for every step,
the mean over ranks of planned seconds over that of measured ones, and the worst rank.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from deepspeed_cad.layout import Layout  # noqa: E402
from deepspeed_cad.planner import make_plan  # noqa: E402
from deepspeed_cad.planner.plan import HeadShape, PlanInput  # noqa: E402
from deepspeed_cad.profiles import Profile  # noqa: E402
from deepspeed_cad.profiles.choice import SHIPPED  # noqa: E402


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--profile", type=Path, default=SHIPPED / "h200_flash_attn_4.json")
    parser.add_argument("--tolerance", type=float, default=0.02)
    options = parser.parse_args()
    workload, result = json.loads(options.workload.read_text()), json.loads(options.result.read_text())
    settings, modes = result["settings"], result["modes"]
    found = modes["cad"] if isinstance(modes, dict) else next(mode for mode in modes if mode["name"] == "cad")
    measured = np.array(found["attention_s_by_step_and_rank"]) / settings["layers"]
    size = settings["hidden"] // settings["heads"]
    shape = HeadShape(settings["heads"], settings["kv_heads"], size, size, 2)
    cost = Profile.load(options.profile).cost_for(shape)
    planned = []
    for lengths in workload["steps"][: len(measured)]:
        layout = (
            Layout.from_stream(lengths, workload["ranks"], workload["tokens_per_rank"])
            if workload.get("stream")
            else Layout.from_rank_lengths(lengths)
        )
        planned.append(make_plan(PlanInput(layout.tick(), shape, cost, None, options.tolerance)).load)
    means = np.mean(planned, axis=1) / measured.mean(axis=1)
    worst = np.abs(np.array(planned) / measured - 1).max()
    sys.stdout.write(f"planned over measured, by step: {means.round(3).tolist()}; worst rank off by {worst:.1%}\n")


if __name__ == "__main__":
    main()
