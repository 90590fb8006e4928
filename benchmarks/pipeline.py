"""A pipeline step with CAD against DeepSpeed's own 1F1B with the same kernel, and against the bound.

    torchrun --nproc-per-node 2 benchmarks/pipeline.py --stages 2 --micro-batches 8 \\
        --workload benchmarks/workloads/prolong_64k_4r.json --layers 8 --output benchmarks/results

One engine, one model, the same documents: its schedule and attention are switched between the modes, step by step.

    1f1b    DeepSpeed's schedule; each rank attends its own documents on the kernel that CAD takes
    cad     lockstep rounds, attention of all stages and replicas in one pool
    none    DeepSpeed's schedule without attention (its output is its query)

Two bounds are made of them, with the seconds of attention of all ranks as 1f1b runs it, not recomputed: `bound` is the
step without attention, plus in each of its M + P − 1 forward and backward slots the mean attention of a stage's
micro-batch (same bubble, mean attention); `pool` has attention spread over all ranks and all of the step. The learning
rate is 0, so all modes see the same weights and their losses can be compared. On machines without GPUs it runs on gloo;
take small sizes there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import deepspeed.ops  # noqa: E402

# Otherwise the first start on a CPU compiles a library for 80 s.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

import deepspeed  # noqa: E402
from process_group import open_process_group  # noqa: E402
from train_attention import Stopwatch, TimedKernel, VarlenAttention, make_sequences  # noqa: E402
from train_model import add_sizes  # noqa: E402
from train_workload import Workload  # noqa: E402
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM  # noqa: E402

import deepspeed_cad  # noqa: E402
from deepspeed_cad.kernels.interface import KernelNeed, MaskRule  # noqa: E402
from deepspeed_cad.kernels.registry import choose  # noqa: E402

SWITCHED = ("_train_schedule", "_INSTRUCTION_MAP", "_next_batch", "train_batch", "eval_batch")
"""What CAD sets on an engine."""


class Local:
    """Attention of a rank's own documents on one kernel; all layers of a micro-batch share its sequences."""

    def __init__(self, watch: Stopwatch, kernel: str) -> None:
        self.watch, self.kernel = watch, kernel
        self._made: dict[int, tuple[torch.Tensor, Any]] = {}

    def __call__(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any,
        scaling: float | None = None, position_ids: torch.Tensor | None = None, **_: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """As transformers calls it: [1, heads, T, head size]."""
        # By address: a recompute gets another tensor of the same memory, which is held here and so not used again.
        known = self._made.get(position_ids.data_ptr())
        if known is None:
            starts = (position_ids[0] == 0).nonzero().flatten().tolist()
            lengths = [end - begin for begin, end in zip(starts, [*starts[1:], position_ids.shape[-1]])]
            known = self._made[position_ids.data_ptr()] = position_ids, make_sequences(lengths, lengths, query.device)
            while len(self._made) > 64:
                self._made.pop(next(iter(self._made)))
        q, k, v = (x.transpose(1, 2)[0] for x in (query, key, value))
        need = KernelNeed(q.device, q.dtype, q.shape[-1], v.shape[-1], q.shape[1] // k.shape[1])
        kernel = TimedKernel(choose(self.kernel, need), self.watch)
        rule = MaskRule(q.shape[-1] ** -0.5 if scaling is None else scaling)
        return VarlenAttention.apply(q, k, v, kernel, known[1], rule)[None], None


def query_only(module: Any, query: torch.Tensor, key: Any, value: Any, mask: Any, **_: Any) -> tuple[Any, None]:
    """No attention: its output is its query."""
    return query.transpose(1, 2), None


class Modes:
    """One engine, switched between CAD and DeepSpeed's own schedule."""

    def __init__(self, engine: Any, names: list[str]) -> None:
        self.engine = engine
        self.cad = {name: engine.__dict__[name] for name in SWITCHED}
        self.configs = [m.config for m in engine.module.modules() if hasattr(m, "config")]
        self.attention = {name: {"cad": "cad_pipeline"}.get(name, f"benchmark_{name}") for name in names}

    def switch(self, name: str) -> None:
        """Let the next step run in a mode."""
        for attribute in SWITCHED:
            if name == "cad":
                self.engine.__dict__[attribute] = self.cad[attribute]
            else:
                self.engine.__dict__.pop(attribute, None)
        for config in self.configs:
            config._attn_implementation = self.attention[name]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--workload", type=Path, help="JSON with document lengths per step and rank")
    add("--stages", type=int, default=2)
    add("--micro-batches", type=int, default=8)
    add("--mode", default="1f1b,cad,none", help="comma-separated")
    add_sizes(parser)
    add("--dtype", choices=("bfloat16", "float32"), help="bfloat16 on GPUs, else float32")
    add("--kernel", default="auto", help="attention kernel of every mode")
    add("--cad", type=json.loads, default={}, help='the "cad" block')
    add("--documents", type=int, help="instead of the workload's, documents of this length")
    add("--tokens", type=int, help="tokens of a micro-batch: rows are cut")
    add("--scale", action="store_true", help="with --tokens: scale the lengths down instead")
    add("--no-checkpointing", action="store_true", help="keep all activations")
    add("--steps", type=int, default=2, help="different steps of documents")
    add("--warmup", type=int, default=1, help="passes over the steps before anything is measured")
    add("--repeats", type=int, default=3, help="timed passes over the steps")
    add("--commit", help="where this is not a git checkout: what the results name as the commit")
    add("--output", type=Path, help="folder for JSON, which is written anew after every timed pass")
    add("--table", type=Path, help="only print a table of the JSON files in this folder")
    options = parser.parse_args(argv)
    if not options.workload and not options.table:
        parser.error("give --workload, or --table")
    return options


def make_steps(options: argparse.Namespace, replica: int, replicas: int) -> list[list[Any]]:
    """[step][micro-batch]: the pairs that this replica loads, from the rows of the workload in turn."""
    workload = Workload.load(options.workload)
    workload = workload.fit(workload.ranks, options.tokens, options.scale, None)
    rows = [row for step in range(len(workload.steps)) for row in workload.make_rows(step, options.vocab)]
    if options.documents:
        for i, row in enumerate(rows):
            positions = torch.arange(len(row.tokens)) % options.documents
            rows[i] = type(row)((), row.tokens, positions, row.tokens)
    steps = []
    for step in range(options.steps):
        batches = []
        for m in range(options.micro_batches):
            row = rows[((step * options.micro_batches + m) * replicas + replica) % len(rows)]
            labels = torch.where(row.positions == 0, -100, row.tokens)
            batches.append(((row.tokens[None], row.positions[None]), labels[None]))
        steps.append(batches)
    return steps


def main() -> None:
    options = parse()
    if options.table:
        found = [json.loads(path.read_text()) for path in sorted(options.table.glob("pipeline_*.json"))]
        sys.stdout.write(table(found))
        return
    warnings.simplefilter("ignore", FutureWarning)
    device = open_process_group()
    cuda = device.type == "cuda"
    deepspeed.init_distributed("nccl" if cuda else "gloo", auto_mpi_discovery=False)
    deepspeed_cad.install()
    dtype = getattr(torch, options.dtype or ("bfloat16" if cuda else "float32"))
    watch = Stopwatch(device)
    for name, attend in (("1f1b", Local(watch, options.kernel)), ("none", query_only)):
        AttentionInterface.register(f"benchmark_{name}", attend)
        AttentionMaskInterface.register(f"benchmark_{name}", lambda *args, **kwargs: None)

    config = LlamaConfig(
        vocab_size=options.vocab, hidden_size=options.hidden, intermediate_size=options.ffn,
        num_hidden_layers=options.layers, num_attention_heads=options.heads, num_key_value_heads=options.kv_heads,
        max_position_embeddings=1 << 20, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with device:
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    interval = 0 if options.no_checkpointing else 1
    module = deepspeed_cad.to_pipeline(model, options.stages, activation_checkpoint_interval=interval)
    del model
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": options.micro_batches,
            "bf16": {"enabled": dtype == torch.bfloat16}, "zero_allow_untested_optimizer": True,
            "pipeline": {"use_reentrant": False}, "steps_per_print": 1 << 30,
            "cad": {"kernel": options.kernel, **options.cad},
        },
    )  # fmt: skip
    names = options.mode.split(",")
    modes = Modes(engine, names)
    grid = engine.grid
    # Read ahead as from any loader: each mode reads the same steps over and over.
    steps = make_steps(options, grid.get_data_parallel_id(), grid.get_data_parallel_world_size())
    feeds = {name: itertools.cycle(itertools.chain.from_iterable(steps)) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, list[float]] = {name: [] for name in names}
    peaks = dict.fromkeys(names, 0)
    attention = torch.zeros(1, dtype=torch.float64)
    size = options.hidden // options.heads
    kernel = choose(options.kernel, KernelNeed(device, dtype, size, size, options.heads // options.kv_heads)).name
    for repeat in range(options.warmup + options.repeats):
        for _ in steps:
            for name in names:
                modes.switch(name)
                if cuda:
                    torch.cuda.reset_peak_memory_stats()
                # Not in a warm-up pass, where kernels are compiled between the events.
                watch.on = name == "1f1b" and repeat == options.warmup
                dist.barrier()
                begun = time.perf_counter()
                loss = float(engine.train_batch(feeds[name]))
                if cuda:
                    torch.cuda.synchronize()
                dist.barrier()
                taken = time.perf_counter() - begun
                if watch.on:
                    spans = watch.take()
                    # CAD does not run attention again in the recompute, and the bounds do not either.
                    attention += spans["forward"][0] / (1 if options.no_checkpointing else 2) + spans["backward"][0]
                if cuda:
                    # Landing areas lie outside of torch's allocator, and other modes do not need them.
                    landing = landing_bytes() if name == "cad" else 0
                    peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated() + landing)
                if repeat >= options.warmup:
                    seconds[name].append(taken)
                    losses[name].append(loss)
                if dist.get_rank() == 0:
                    sys.stderr.write(f"pass {repeat}, {name}: {taken:.3f} s, loss {loss:.5f}\n")
        # After every pass, so that a run that is ended early has figures.
        if repeat >= options.warmup:
            spent = attention.clone()
            dist.all_reduce(spent)
            report(options, seconds, losses, peaks, float(spent) / len(steps), kernel)
    dist.barrier()
    dist.destroy_process_group()


TABLE = "stages × replicas", "documents", "1F1B s", "CAD s", "CAD ÷ 1F1B", "÷ bound", "÷ pool", "peak GiB", "loss"


def table(runs: list[dict[str, Any]]) -> str:
    """Markdown: CAD over DeepSpeed's schedule and over the bounds; peaks and losses of both. "?": not in the file."""
    lines = [" | ".join(TABLE), " | ".join("---" for _ in TABLE)]
    for run in runs:
        took, over = run["seconds"], run.get("cad_over_bound", {})
        both = [name for name in ("1f1b", "cad") if name in took]
        peaks = (max(one[name] for one in run["peak_GiB_by_rank"]) for name in both)
        cells = (
            f"{run['stages']} × {run['ranks'] // run['stages']}",
            f"all of {run['documents']}" if run["documents"] else run["workload"],
            *(f"{took[name]:.3f}" if name in took else "?" for name in ("1f1b", "cad")),
            f"{took['1f1b'] / took['cad']:.3f}" if len(both) == 2 else "?",
            *(f"{over[name]:.3f}" if name in over else "?" for name in ("bound", "pool")),
            " ".join(f"{peak:.1f}" for peak in peaks), " ".join(f"{run['losses'][name][0]:.5f}" for name in both),
        )  # fmt: skip
        lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines) + "\n"


def landing_bytes() -> int:
    """Device memory of CAD's landing areas."""
    session = deepspeed_cad.current_session()
    return 0 if session is None or session.transport is None else session.transport.landing_bytes


def find_commit() -> str:
    """Of this checkout."""
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "unknown"


def report(
    options: argparse.Namespace, seconds: dict[str, list[float]], losses: dict[str, list[float]],
    peaks: dict[str, int], attention: float, kernel: str,
) -> None:  # fmt: skip
    """Write figures. `attention`: seconds of a step, summed over all ranks; `kernel`: its name."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, peaks)
    if dist.get_rank() != 0:
        return
    took = {name: statistics.median(values) for name, values in seconds.items()}
    by_step = {
        name: [statistics.median(values[step :: options.steps]) for step in range(options.steps)]
        for name, values in seconds.items()
    }
    sizes = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "no_checkpointing")
    ranks, m, p = dist.get_world_size(), options.micro_batches, options.stages
    if "none" in took:
        took["bound"] = took["none"] + attention / ranks * (m + p - 1) / m
        took["pool"] = took["none"] + attention / ranks
    found = {
        "commit": options.commit or find_commit(), "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "ranks": ranks, "stages": p, "micro_batches": m, "layers": options.layers, "hidden": options.hidden,
        "workload": options.workload.stem, "documents": options.documents, "cad": options.cad,
        "tokens": options.tokens, "settings": {name: getattr(options, name) for name in sizes},
        "kernel": kernel, "step_seconds": by_step,
        "seconds": took, "attention_s_of_all_ranks": attention, "losses": losses,
        "speed_over_1f1b": {name: took["1f1b"] / value for name, value in took.items()} if "1f1b" in took else {},
        "cad_over_bound": {name: took[name] / took["cad"] for name in ("bound", "pool") if name in took},
        "peak_GiB_by_rank": [{name: round(value / 2**30, 2) for name, value in one.items()} for one in everyone],
    }  # fmt: skip
    sys.stdout.write(f"{table([found])}\n")
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        documents = f"even_{options.documents}" if options.documents else options.workload.stem
        stem = f"pipeline_pp{p}_{ranks}r_{documents}"
        (options.output / f"{stem}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
