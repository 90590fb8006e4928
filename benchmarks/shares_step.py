"""A training step where ranks divide the heads of a row: tensor parallelism or Ulysses inside each replica, with CAD
between replicas and without.

    torchrun --nproc-per-node 4 benchmarks/shares_step.py --divides tensor \\
        --workload benchmarks/workloads/heavy_64k_2r.json

The workload has a row for each replica. Both modes keep attention through activation checkpointing: `kept` attends
inside its replica alone, `cad` between them, too. Tensor parallelism is torch's parallelize_module in both. Ulysses is
this benchmark's own in `kept` (train_ulysses.py) and DeepSpeed's under CAD. Gradients are summed at the end of a step,
and the optimizer is left out: it is the same in both. On machines without GPUs it runs on gloo; take small sizes there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaForCausalLM

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from exchange import machine  # noqa: E402
from process_group import open_process_group  # noqa: E402
from train_attention import Stopwatch, local_attention, make_sequences, use_attention  # noqa: E402
from train_kept import KeptOutputs  # noqa: E402
from train_model import ChunkedLoss, add_sizes, make_model, share_parameters  # noqa: E402
from train_shapes import kernel_need  # noqa: E402
from train_split import MicroBatch, Setting, make_micro_batch, own_row  # noqa: E402
from train_ulysses import register_ulysses, use_kept_ulysses  # noqa: E402
from train_workload import Workload  # noqa: E402

import deepspeed_cad  # noqa: E402
from deepspeed_cad.kernels.registry import choose  # noqa: E402
from deepspeed_cad.session import find_binding  # noqa: E402

AXES = {"tensor": "tp", "ulysses": "sp"}
COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")


@dataclass(frozen=True)
class Way:
    """One mode, and what its steps found."""

    name: str
    model: LlamaForCausalLM
    summed: Callable[[], None]
    """Sums gradients over the ranks that have other tokens."""
    seconds: list[list[float]]
    """[steps][passes]"""
    feed: Any = None
    """What CAD reads documents by, ahead of their step."""


def divide(model: LlamaForCausalLM, mesh: DeviceMesh) -> None:
    """Heads and MLPs over the ranks of `mesh`; embeddings, norms and head are whole on each."""
    plan: dict[str, Any] = {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWS}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)


def split(setting: Setting, pieces: int, piece: int, step: int, documents: bool) -> MicroBatch:
    """This rank's piece of its replica's row."""
    row = own_row(setting, step)
    tokens, positions, targets = (x.chunk(pieces)[piece] for x in (row.tokens, row.positions, row.targets))
    sequences = make_sequences(row.lengths, row.lengths, setting.device) if documents else None
    return make_micro_batch(setting, tokens, positions, targets, sequences)


def run(way: Way, micro_batch: MicroBatch, scale: float) -> tuple[float, float]:
    """Seconds of a step, which all ranks begin and end together, and its loss on this rank."""
    device = micro_batch.targets.device
    way.model.zero_grad()
    if way.feed is not None:
        way.feed.announce(way.feed.read(micro_batch.inputs))
    _meet(device)
    begun = time.perf_counter()
    hidden = way.model.model(**micro_batch.inputs).last_hidden_state[0]
    loss = ChunkedLoss.apply(hidden, way.model.lm_head.weight, micro_batch.targets, scale)
    loss.backward()
    way.summed()
    _meet(device)
    return time.perf_counter() - begun, float(loss.detach())


def _meet(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def own(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--divides", choices=tuple(AXES), default="tensor", help="what the ranks of a replica divide a row by")
    add("--shares", type=int, default=2, help="ranks of a replica (default: 2)")
    add("--workload", type=Path, required=True, help="JSON with document lengths per step and replica")
    add_sizes(parser)
    add("--steps", type=int, help="take the first steps of the workload")
    add("--tokens", type=int, help="take fewer tokens of each row: lengths are scaled down")
    add("--repeats", type=int, default=2, help="timed passes over the steps, after one that is not (default: 2)")
    add("--kernel", default="auto", help="attention kernel of both modes")
    add("--cad", type=json.loads, default={}, help='keys of the "cad" block')
    add("--commit", help="where this is not a git checkout: what the results name as the commit")
    add("--output", type=Path, help="JSON file")
    return parser.parse_args()


def main() -> None:
    """Run both modes in turn over all steps, print a table."""
    options = parse()
    device = open_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ulysses, replicas = options.divides == "ulysses", ranks // options.shares
    mesh = init_device_mesh(device.type, (replicas, options.shares), mesh_dim_names=("dp", AXES[options.divides]))
    inside = mesh[AXES[options.divides]]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    workload = Workload.load(options.workload).fit(replicas, options.tokens, options.tokens is not None, options.steps)
    sizes = (options.layers, options.hidden, options.heads, options.kv_heads, options.ffn, options.vocab)
    whole = make_model(*sizes, workload.row_tokens, device, dtype)
    kernel = choose(options.kernel, kernel_need(whole, device, dtype))
    whole.gradient_checkpointing_enable({"use_reentrant": False})
    if not ulysses:
        divide(whole, inside)
    setting = Setting(workload, rank // options.shares, replicas, device, options.vocab, kernel, Stopwatch(device), {})
    kept, balanced = share_parameters(whole), share_parameters(whole)
    if ulysses:
        use_kept_ulysses(kept, "benchmark_shares", kernel, KeptOutputs(), inside.get_group())
        balanced.set_attn_implementation("sdpa")
        register_ulysses(balanced, "sdpa", device, options.shares)
    else:
        use_attention(kept, "benchmark_shares", local_attention(kernel, KeptOutputs()))
    deepspeed_cad.apply(balanced, {"kernel": options.kernel, "documents": "keep", **options.cad}, mesh=mesh)
    # Else CAD would take it for a reference.
    deepspeed_cad.current_session().decoders.add(kept.model)
    others = dist.group.WORLD if ulysses else mesh["dp"].get_group()

    def summed() -> None:
        for parameter in whole.parameters():
            dist.all_reduce(own(parameter.grad), group=others)

    pieces = (options.shares, rank % options.shares) if ulysses else (1, 0)
    feeds = {"kept": (kept, None), "cad": (balanced, find_binding(balanced).feed)}
    ways = [Way(name, model, summed, [[] for _ in workload.steps], feed) for name, (model, feed) in feeds.items()]
    apart = [0.0, 0.0]
    for turn in range(options.repeats + 1):
        for step in range(len(workload.steps)):
            scale, found = 1.0 / workload.targets(step), []
            for way in ways:
                seconds, loss = run(way, split(setting, *pieces, step, way.name == "kept"), scale)
                if rank == 0:
                    sys.stderr.write(f"pass {turn}, step {step}, {way.name}: {seconds:.3f} s\n")
                figures = torch.tensor([seconds, loss], dtype=torch.float64)
                dist.all_reduce(figures[1:])
                dist.all_reduce(figures[:1], dist.ReduceOp.MAX)
                compared = whole.parameters() if turn == step == 0 else ()
                gradients = [own(parameter.grad).clone() for parameter in compared]
                found.append((float(figures[1]) / (1 if ulysses else options.shares), gradients))
                if turn:
                    way.seconds[step].append(float(figures[0]))
            apart[0] = max(apart[0], abs(found[0][0] - found[1][0]))
            parts = torch.zeros(2, dtype=torch.float64)
            for one, other in zip(found[0][1], found[1][1]):
                parts += torch.stack([(one.float() - other.float()).pow(2).sum(), one.float().pow(2).sum()]).cpu()
            dist.all_reduce(parts)
            apart[1] = max(apart[1], float((parts[0] / parts[1].clamp(min=1e-30)).sqrt()))
    if rank == 0:
        report(options, workload, ways, apart)
    dist.barrier()
    deepspeed_cad.current_session().close()
    dist.destroy_process_group()


def report(options: argparse.Namespace, workload: Workload, ways: list[Way], apart: list[float]) -> None:
    """Print the table, and write it where asked."""
    session = deepspeed_cad.current_session()
    each = {way.name: [median(one) for one in way.seconds] for way in ways}
    total = {name: sum(of) for name, of in each.items()}
    words = f"{options.divides} {options.shares} × {workload.ranks} replicas"
    lines = ["| mode | s | of each step | kept ÷ |", "|---|---|---|---|"]
    for name, of in each.items():
        steps = " ".join(f"{one:.3f}" for one in of)
        lines.append(f"| {name} | {total[name]:.3f} | {steps} | {total['kept'] / total[name]:.3f} |")
    before, after = session.statistics.imbalance_before, session.statistics.imbalance
    lines += [
        "",
        f"{words}, {workload.name}: attention max/mean {before:.2f} → {after:.2f}; losses differ by at most "
        f"{apart[0]:.1e}, gradients of step 0 by {apart[1]:.1e}; {session.describe()}",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    if options.output is not None:
        found = {
            "workload": workload.name, "step_seconds": each, "attention_max_over_mean": [before, after],
            "losses_differ_by": apart[0], "gradients_differ_by": apart[1],
            "settings": {name: str(value) for name, value in vars(options).items() if name != "output"},
            "machine": {
                **machine(options.commit), "ranks": dist.get_world_size(),
                "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            },
        }  # fmt: skip
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
