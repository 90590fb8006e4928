"""How long a 1F1B pipeline step takes by arithmetic, and how much less with even attention; needs no GPU.

    python benchmarks/pipeline_bound.py --result benchmarks/results/h200x2/pipeline_pp2_2r_prolong_64k_2r.json
    python benchmarks/pipeline_bound.py --workload benchmarks/workloads/heavy_64k_2r.json --without-attention 8.8 \\
        --stages 2 --micro-batches 8 --layers 8

In: the documents of each micro-batch, seconds of a step without attention, and attention by a profile times a factor.
Out: for each step, seconds of 1F1B and of the bound of benchmarks/pipeline.py (the same bubble, mean attention).
1F1B ÷ bound is what CAD gains by even attention; what idle stages serve in the bubble would come on top.

A step without attention has M + P − 1 slots, each with a forward and a backward of one micro-batch; stages are equal.
Layers are checkpointed: their forward is a quarter of a slot, and 1F1B attends twice forward. The bound attends once.

`--result` is a file of pipeline.py: its settings and its seconds of mode `none` are taken where no option says other,
and what is foreseen is compared with what it measured. It keeps one median of all steps, so their mean is compared.
`--workload` is a file, or the name of one in results/workloads.json, where documents of equal figures stand in.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from foreseen_runs import SUMMARIES, WORKLOADS, stand_in  # noqa: E402

from deepspeed_cad.forecast import Machine  # noqa: E402
from deepspeed_cad.forecast.attention import Floats, of_documents  # noqa: E402
from deepspeed_cad.forecast.schedule import one_forward_one_backward  # noqa: E402
from deepspeed_cad.layout import Layout  # noqa: E402
from deepspeed_cad.planner.plan import HeadShape  # noqa: E402
from deepspeed_cad.profiles import Profile  # noqa: E402
from deepspeed_cad.profiles.profile import SHIPPED  # noqa: E402

FORWARD = 1 / 4
"""Of the linear work of a checkpointed layer: forward, again in the recompute, and twice as much backward."""


class Step(NamedTuple):
    """Seconds of one optimizer step."""

    one_f_one_b: float
    bound: float


def read_rows(workload: str, documents: int | None = None) -> list[list[int]]:
    """Document lengths of every row of a workload, step after step; raises SystemExit where it is not known.

    `documents`: in their place, documents of this length.
    """
    path = Path(workload)
    path = path if path.is_file() else WORKLOADS / f"{workload}.json"
    summaries = json.loads(SUMMARIES.read_text())
    if path.is_file():
        found = json.loads(path.read_text())
        rows = found["steps"] if found.get("stream") else [row for step in found["steps"] for row in step]
    elif workload in summaries:
        found = summaries[workload]
        tokens = found["tokens_per_rank"] * (found["ranks"] if found["stream"] else 1)
        rows = [stand_in(count, pairs, tokens) for step in found["documents_and_pairs"] for count, pairs in step]
    else:
        raise SystemExit(f"--workload {workload}: no such file, and none of {', '.join(summaries)}")
    if documents:
        rows = [[min(documents, sum(row) - begin) for begin in range(0, sum(row), documents)] for row in rows]
    return rows


def attention_of(rows: list[list[int]], profile: Profile, shape: HeadShape) -> Floats:
    """[2, rows]: seconds of one layer's attention, all heads."""
    return of_documents(Layout.from_rank_lengths(rows), profile.cost_for(shape)) * shape.groups


def foresee(attention: Floats, without: float, stages: int) -> Step:
    """A step of equal stages.

    Args:
        attention: [2, micro-batches, replicas] seconds of one stage, forward and backward once.
        without: seconds of the step without attention.
        stages: P.
    """
    slots = attention.shape[1] + stages - 1
    linear, (forward, backward) = without / slots, attention
    each = np.stack([FORWARD * linear + forward, (1 - FORWARD) * linear + backward + forward])
    took = one_forward_one_backward(each, stages)
    return Step(float(took.max()), without + float(attention.sum(0).mean()) * slots)


def foresee_all(options: argparse.Namespace) -> list[Step]:
    """Every step, with micro-batches dealt out to replicas as pipeline.py does it."""
    profile = Profile.load(options.profile)
    shape = HeadShape(options.heads, options.kv_heads, options.head_dim, options.head_dim, 2)
    layer = attention_of(read_rows(options.workload, options.documents), profile, shape)
    replicas, size = options.ranks // options.stages, options.micro_batches * (options.ranks // options.stages)
    stage, steps = layer * (options.factor * options.layers / options.stages), []
    for step in range(options.steps):
        rows = np.arange(step * size, (step + 1) * size).reshape(-1, replicas) % stage.shape[1]
        steps.append(foresee(stage[:, rows], options.without_attention, options.stages))
    return steps


def table(steps: list[Step], measured: dict[str, float]) -> str:
    """Markdown. `measured`: seconds of the modes of a run, empty where there is none."""
    mean = Step(*np.mean(steps, axis=0).tolist())
    lines = ["step | 1F1B, s | bound, s | 1F1B ÷ bound", "--- | --- | --- | ---"]
    for name, one in [*((str(number), one) for number, one in enumerate(steps)), ("mean", mean)]:
        lines.append(f"{name} | {one.one_f_one_b:.3f} | {one.bound:.3f} | {one.one_f_one_b / one.bound:.3f}")
    text = "\n".join(f"| {line} |" for line in lines) + "\n"
    if "1f1b" in measured:
        text += f"\n1F1B, foreseen ÷ measured: {mean.one_f_one_b / measured['1f1b']:.4f}\n"
    if "cad" in measured:
        text += f"CAD, bound ÷ measured: {mean.bound / measured['cad']:.4f}\n"
    return text


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line, completed by the result where there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--result", type=Path, help="JSON that pipeline.py wrote")
    add("--workload", help="JSON with document lengths, or a name in results/workloads.json")
    add("--without-attention", type=float, help="seconds of a step of mode `none`")
    add("--stages", type=int)
    add("--micro-batches", type=int, help="of each replica in a step")
    add("--ranks", type=int, help="of all stages and replicas; default: one replica")
    add("--layers", type=int, help="of the model")
    add("--documents", type=int, help="instead of the workload's, documents of this length")
    for name, size in (("heads", 32), ("kv-heads", 8), ("head-dim", 128)):
        add(f"--{name}", type=int, default=size)
    add("--steps", type=int, default=2, help="different steps of documents")
    add("--profile", type=Path, default=SHIPPED / "h200_flash_attn_4.json", help="seconds of attention")
    add(
        "--factor", type=float, default=Machine.load("h200").in_training,
        help="attention seconds in training over those of the profile; default: what the simulator takes for H200s in "
        "every mode (%(default)s), from runs of train_step.py",
    )  # fmt: skip
    options = parser.parse_args(argv)
    result: dict[str, Any] = json.loads(options.result.read_text()) if options.result else {}
    options.measured = result.get("seconds", {})
    known = {"without_attention": options.measured.get("none"), **result}
    for name in ("workload", "without_attention", "stages", "micro_batches", "ranks", "layers", "documents"):
        if getattr(options, name) is None:
            setattr(options, name, known.get(name))
    options.ranks = options.ranks or options.stages
    for name in ("workload", "without_attention", "stages", "micro_batches", "layers"):
        if getattr(options, name) is None:
            parser.error(f"give --{name.replace('_', '-')}, or a --result that says it")
    if options.ranks % options.stages or options.layers % options.stages:
        parser.error(f"{options.ranks} ranks and {options.layers} layers must be multiples of {options.stages} stages")
    return options


def main() -> None:
    """Print the table."""
    options = parse()
    sys.stdout.write(table(foresee_all(options), options.measured))


if __name__ == "__main__":
    main()
