"""What cutting costs the kernel: every batch of a planned step alone, against the whole documents of each rank.

    python benchmarks/pieces.py --workload benchmarks/workloads/heavy_64k_4r.json --steps 0,2,5

In: a workload (document lengths per step and rank). All ranks' batches run one after the other on one device, with
nothing else on it. Prints a line per batch (milliseconds and TFLOP/s, forward and backward) and, for each step, the
mean over ranks of the pieces against that of whole documents. Needs a GPU; on a CPU only tiny workloads end in time.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from train_attention import Stopwatch, TimedKernel  # noqa: E402

from deepspeed_cad.attention.device_schedule import Batches, upload_schedule  # noqa: E402
from deepspeed_cad.attention.planned import whole_rank_tasks  # noqa: E402
from deepspeed_cad.kernels.interface import Kernel, KernelNeed, MaskRule, Sequences  # noqa: E402
from deepspeed_cad.kernels.registry import choose  # noqa: E402
from deepspeed_cad.layout import Layout  # noqa: E402
from deepspeed_cad.planner import make_plan  # noqa: E402
from deepspeed_cad.planner.plan import HeadShape, PlanInput  # noqa: E402
from deepspeed_cad.profiles import Profile  # noqa: E402
from deepspeed_cad.profiles.choice import SHIPPED  # noqa: E402
from deepspeed_cad.schedule import Batch, build_slices, schedule_rank  # noqa: E402

SHAPE = HeadShape(32, 8, 128, 128, 2)


class Trial:
    """Runs batches on random Q, K, V and dO, and times the kernel."""

    def __init__(self, kernel: Kernel, device: torch.device, dtype: torch.dtype, repeats: int) -> None:
        self.device, self.dtype, self.repeats = device, dtype, repeats
        self.watch = Stopwatch(device)
        self.kernel = TimedKernel(kernel, self.watch)

    def run(self, batches: Batches, what: str) -> np.ndarray:
        """[2]: milliseconds forward and backward of batches; prints a line for each."""
        return sum((self._run(batch, sequences, what) for batch, sequences in batches), np.zeros(2))

    def _run(self, batch: Batch, sequences: Sequences, what: str) -> np.ndarray:
        groups = batch.group_end - batch.group_begin
        heads = groups * SHAPE.heads_per_group
        # Local batches are views of all heads, received ones have one group of their own.
        of = SHAPE.groups if what == "local" else groups
        q, do = (self._random(batch.q_rows, of * SHAPE.heads_per_group)[:, :heads] for _ in range(2))
        k, v = (self._random(batch.k_rows, of)[:, :groups] for _ in range(2))
        rule = MaskRule(SHAPE.head_dim**-0.5)
        for repeat in range(self.repeats + 1):
            self.watch.on = repeat > 0
            o, lse = self.kernel.forward(q, k, v, sequences, rule)
            self.kernel.backward(do, q, k, v, o, lse, sequences, rule)
            if self.device.type == "cuda":
                torch.cuda.synchronize()
        spans = self.watch.take()
        forward, backward = (spans[name][0] * 1e3 / self.repeats for name in ("forward", "backward"))
        rows, keys = np.diff(batch.cu_q).astype(float), np.diff(batch.cu_k).astype(float)
        work = float((rows * (keys - rows / 2 + 0.5)).sum()) * heads * 4 * SHAPE.head_dim / 1e9
        sys.stdout.write(
            f"  {what}, {groups} groups, {batch.q_rows} query and {batch.k_rows} key rows, {len(rows)} sequences: "
            f"forward {forward:.3f} ms, {work / forward:.0f} TFLOP/s; "
            f"backward {backward:.3f} ms, {2.5 * work / backward:.0f} TFLOP/s\n"
        )
        return np.array([forward, backward])

    def _random(self, rows: int, heads: int) -> torch.Tensor:
        return torch.randn(rows, heads, SHAPE.head_dim, device=self.device).to(self.dtype)


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", type=Path, required=True)
    parser.add_argument("--steps", default="0", help="which steps, comma-separated")
    parser.add_argument("--profile", type=Path, default=SHIPPED / "h200_flash_attn_4.json")
    parser.add_argument("--tolerance", type=float, default=0.01)
    parser.add_argument("--repeats", type=int, default=6)
    options = parser.parse_args()
    workload = json.loads(options.workload.read_text())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    kernel = choose("auto", KernelNeed(device, dtype, SHAPE.head_dim, SHAPE.value_dim, SHAPE.heads_per_group))
    trial = Trial(kernel, device, dtype, options.repeats)
    cost = Profile.load(options.profile).cost_for(SHAPE)
    for step in map(int, options.steps.split(",")):
        layout = Layout.from_rank_lengths(workload["steps"][step])
        tick = layout.tick()
        plan = make_plan(PlanInput(tick, SHAPE, cost, tolerance=options.tolerance))
        means = []
        for what, tasks in (("whole documents", whole_rank_tasks(layout, SHAPE.groups)), ("pieces", plan.tasks)):
            slices, each = build_slices(tick, tasks), []
            for rank in range(layout.ranks):
                sys.stdout.write(f"step {step}, rank {rank}, {what}\n")
                own = upload_schedule(schedule_rank(tick, slices, rank, SHAPE.groups), device, two_streams=True)
                each.append(trial.run(own.all_local, "local") + trial.run(own.waves[0].served, "served"))
            means.append(np.mean(each, axis=0))
        forward, backward = means[1] / means[0]
        sys.stdout.write(
            f"step {step}, {kernel.name}: mean over ranks, pieces over whole documents: "
            f"forward {forward:.3f}, backward {backward:.3f}\n"
        )


if __name__ == "__main__":
    main()
