"""A training step with CAD against what users would pick instead, and against the bound.

    torchrun --nproc-per-node 4 benchmarks/train_step.py --workload benchmarks/workloads/heavy_64k_4r.json \\
        --mode dp,ulysses,allgather_cp,cad,bound --layers 8 --output benchmarks/results

The same Llama, documents, kernel and optimizer in every mode, in one run: step i of one mode, then of the next, several
times over. The learning rate is 0 unless given, so that all modes see the same weights and their losses can be
compared. README.md says what every figure means. On machines without GPUs it runs on gloo; take small sizes there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import re
import sys
import time
import warnings
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from process_group import open_process_group  # noqa: E402
from train_attention import Stopwatch, TimedKernel  # noqa: E402
from train_hybrid import attending_layers, make_hybrid, time_state  # noqa: E402
from train_model import ChunkedLoss, ShardedAdamW, add_sizes, make_model  # noqa: E402
from train_modes import CADMode, Mode, make_modes  # noqa: E402
from train_report import Measured, summarise, write_results  # noqa: E402
from train_shapes import SIZES, kernel_need, make_deepseek, make_gpt_oss, model_flops  # noqa: E402
from train_split import Setting  # noqa: E402
from train_workload import Workload  # noqa: E402

from deepspeed_cad.exchange import probe  # noqa: E402
from deepspeed_cad.kernels.registry import choose  # noqa: E402
from deepspeed_cad.profiles.speed import in_words  # noqa: E402

logger = logging.getLogger("benchmark")

MODELS = {"llama": make_model, "hybrid": make_hybrid, "gpt_oss": make_gpt_oss, "deepseek": make_deepseek}


class Trainer:
    """Runs steps of any mode and notes what they took."""

    def __init__(self, setting: Setting, optimizer: ShardedAdamW, flops: float) -> None:
        self.setting, self.optimizer, self.flops = setting, optimizer, flops
        self.meet = torch.zeros(1, device=setting.device)

    def run(self, mode: Mode, step: int, following: int | None, timed_attention: bool) -> Measured:
        """One step, forward, backward and optimizer, begun and ended together on all ranks."""
        cuda, watch = self.setting.device.type == "cuda", self.setting.watch
        mode.micro_batches(step)  # made now, not while time is taken
        scale = 1.0 / self.setting.workload.targets(step)
        mode.waited()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        watch.on = timed_attention
        dist.all_reduce(self.meet)
        self.finish()
        begun = time.perf_counter()
        mode.before(step, following)
        self.optimizer.zero_grad()
        loss = torch.zeros((), device=self.setting.device)
        for micro_batch in mode.micro_batches(step):
            hidden = mode.model.model(**micro_batch.inputs).last_hidden_state[0]
            part = ChunkedLoss.apply(hidden, mode.model.lm_head.weight, micro_batch.targets, scale)
            part.backward()
            loss += part.detach()
        del hidden, part
        norm = self.optimizer.step()
        self.finish()
        seconds = time.perf_counter() - begun
        watch.on = False
        spans = watch.take()
        waited = mode.waited()
        dist.all_reduce(loss)
        peak = torch.cuda.max_memory_allocated() + mode.buffer_bytes() if cuda else 0
        return Measured(mode.name, step, seconds, waited, float(loss), float(norm), peak, spans)

    def finish(self) -> None:
        """Wait for the device."""
        if self.setting.device.type == "cuda":
            torch.cuda.synchronize()


def compare_gradients(
    trainer: Trainer, modes: list[Mode], options: argparse.Namespace
) -> tuple[list[Measured], dict[str, float]]:
    """Warm up: the first steps of every mode; how far its gradient of step 0 is from that of the first exact mode."""
    done: list[Measured] = []
    expected: torch.Tensor | None = None
    differences: dict[str, float] = {}
    for step in range(options.warmup):
        for mode in modes:
            following = step + 1 if step + 1 < options.warmup else 0
            done.append(trainer.run(mode, step, following, False))
            say(f"warm-up {step}, {mode.name}: {done[-1].seconds:.3f} s, loss {done[-1].loss:.5f}")
            if step == 0 and mode.exact:
                own = trainer.optimizer.own_gradients
                expected = own.clone() if expected is None else expected
                parts = torch.stack([(own.float() - expected.float()).pow(2).sum(), expected.float().pow(2).sum()])
                dist.all_reduce(parts)
                differences[mode.name] = float((parts[0] / parts[1]).sqrt())
        if step == 0:
            expected = None
    return done, differences


def measure(trainer: Trainer, modes: list[Mode], options: argparse.Namespace) -> dict[str, Any]:
    """All steps of all modes: warm-up, one pass with attention timed, then the timed passes."""
    steps = len(trainer.setting.workload.steps)
    options.warmup = min(options.warmup, steps)
    warm, differences = compare_gradients(trainer, modes, options)
    attention: list[Measured] = []
    timed: list[Measured] = []
    a_pass = steps * sum(one.seconds for one in warm[-len(modes) :])
    say(f"by the last warm-up {options.repeats + 1} passes take {a_pass * (options.repeats + 1):.0f} s")
    repeat = 0
    while repeat <= options.repeats:
        begun = moment()
        if repeat and options.until and begun + 2 * a_pass > options.until:
            options.repeats = repeat
        for step in range(steps):
            last = repeat == options.repeats and step == steps - 1
            following = None if last else (step + 1) % steps
            for mode in modes:
                found = trainer.run(mode, step, following, repeat == 0)
                (attention if repeat == 0 else timed).append(found)
                say(f"pass {repeat}, step {step}, {mode.name}: {found.seconds:.3f} s")
        a_pass, repeat = moment() - begun, repeat + 1
    return summarise(trainer.setting, modes, attention, timed, differences, options, trainer.flops)


def moment() -> float:
    """The time, in seconds since 1970, the same on every rank."""
    now = torch.tensor(time.time(), dtype=torch.float64)
    dist.all_reduce(now, dist.ReduceOp.MAX)
    return float(now)


def time_collectives(trainer: Trainer, times: int = 3) -> float:
    """GB/s that reach this rank while gradients are scattered and weights gathered: what ZeRO does at the end of a
    step. Loses the gradients."""
    optimizer = trainer.optimizer
    taken = []
    for _ in range(times + 1):
        dist.all_reduce(trainer.meet)
        trainer.finish()
        begun = time.perf_counter()
        optimizer.scatter()
        optimizer.gather()
        trainer.finish()
        taken.append(time.perf_counter() - begun)
    size = optimizer.weights.numel() * optimizer.weights.element_size()
    # The first one may open connections.
    return 2 * size * (optimizer.ranks - 1) / optimizer.ranks / median(taken[1:]) / 1e9


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--workload", type=Path, required=True, help="JSON with document lengths per step and rank")
    add("--mode", default="dp,cad,bound", help='comma-separated; also cad:recompute, cad@{"overlap": "none"}')
    add_sizes(parser)
    add(
        "--model", choices=tuple(MODELS), default="llama",
        help="hybrid: of four layers three are delta nets; gpt_oss: sinks and windows; deepseek: MLA. The last two "
        "have sizes of their own unless others are given",
    )  # fmt: skip
    add("--dtype", choices=("bfloat16", "float32", "float64"), help="bfloat16 on GPUs, else float32")
    add("--kernel", default="auto", help="attention kernel of every mode")
    add("--cad", type=json.loads, default={}, help='the "cad" block that the modes cad… start from')
    add("--recompute", action="store_true", help='"recompute_attention": true in the modes cad…')
    add("--no-checkpointing", action="store_true", help="keep all activations")
    add("--steps", type=int, help="take the first steps of the workload")
    add("--tokens-per-rank", type=int, help="take fewer tokens: rows are cut")
    add("--scale", action="store_true", help="with --tokens-per-rank: scale the lengths down instead")
    add("--full", help='how full the rows of the ranks are, "1,0.6"; what is beyond is cut off')
    add("--warmup", type=int, default=2, help="steps of every mode before anything is measured")
    add("--repeats", type=int, default=3, help="timed passes over the steps")
    add("--until", type=float, help="seconds since 1970 after which no timed pass but the first should end")
    add("--hosts", help='pretend that the ranks are on these hosts, "0,1"')
    add("--link", choices=("sockets", "host", "nvlink"), default="sockets", help="with --hosts: what is between them")
    add("--lr", type=float, default=0.0, help="learning rate; above 0 the modes' losses cannot be compared")
    add("--peak-tflops", type=float, default=989.0, help="of one GPU, for MFU")
    add("--commit", help="where this is not a git checkout: what the results name as the commit")
    add("--output", type=Path, help="folder for JSON, Markdown and picture")
    model = parser.parse_known_args(argv)[0].model
    parser.set_defaults(**SIZES.get(model, {}))
    return parser.parse_args(argv)


def pretend_hosts(hosts: list[int], link: str) -> None:
    """Let CAD and NCCL take this rank to be on a host of that number; before NCCL starts.

    "sockets": NCCL takes other hosts for machines that it reaches by sockets. "host": NCCL sends through the memory of
    the host. "nvlink": NCCL as it is.
    """
    host = hosts[int(os.environ["RANK"])]
    probe.host_number = lambda: host
    if link == "sockets":
        os.environ.update(
            NCCL_HOSTID=f"pretended-{host}", NCCL_SOCKET_IFNAME="lo", NCCL_SOCKET_NTHREADS="8",
            NCCL_NSOCKS_PERTHREAD="4", NCCL_IB_DISABLE="1",
        )  # fmt: skip
    elif link == "host":
        os.environ["NCCL_P2P_DISABLE"] = "1"


def split_names(text: str) -> list[str]:
    """Mode names between commas that are not inside braces."""
    return [name.strip() for name in re.split(r",(?![^{]*\})", text) if name.strip()]


def say(text: str) -> None:
    """A line on rank 0's stderr, with the time."""
    if dist.get_rank() == 0:
        sys.stderr.write(f"{datetime.now():%H:%M:%S.%f} {text}\n")


def main() -> None:
    options = parse()
    logging.basicConfig(level=logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)
    if options.hosts:
        pretend_hosts([int(one) for one in options.hosts.split(",")], options.link)
    device = open_process_group()
    cuda = device.type == "cuda"
    rank, ranks = dist.get_rank(), dist.get_world_size()
    logging.getLogger("deepspeed_cad").setLevel(logging.INFO if rank == 0 else logging.WARNING)
    workload = Workload.load(options.workload).fit(ranks, options.tokens_per_rank, options.scale, options.steps)
    if options.full:
        workload = workload.fill([float(share) for share in options.full.split(",")])
    if options.model != "llama":
        workload = dataclasses.replace(workload, name=f"{workload.name}_{options.model}")
    dtype = getattr(torch, options.dtype or ("bfloat16" if cuda else "float32"))
    model = MODELS[options.model](
        options.layers, options.hidden, options.heads, options.kv_heads, options.ffn, options.vocab,
        workload.row_tokens, device, dtype,
    )  # fmt: skip
    options.attending_layers = attending_layers(model)
    if not options.no_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = ShardedAdamW(list(model.parameters()), options.lr)
    watch = Stopwatch(device)
    kernel = choose(options.kernel, kernel_need(model, device, dtype))
    block = {"kernel": options.kernel, **({"recompute_attention": True} if options.recompute else {}), **options.cad}
    setting = Setting(workload, rank, ranks, device, options.vocab, TimedKernel(kernel, watch), watch, block)
    time_state(model, watch)
    modes = make_modes(split_names(options.mode), model, setting)
    trainer = Trainer(setting, optimizer, model_flops(model, workload))
    results = measure(trainer, modes, options)
    results["links"] = {
        mode.name: str(mode.session.learned.links.links)
        for mode in modes
        if isinstance(mode, CADMode) and mode.session.learned.links is not None
    }
    # What benchmarks/foreseen.py foresees steps on several hosts with.
    links = [mode.session.learned.links for mode in modes if isinstance(mode, CADMode)]
    for start in [known.start for known in links if known is not None][:1]:
        speeds = {"inside": start.inside, "between": start.between}
        results["link_GBps"] = {kind: speed and speed / 1e9 for kind, speed in speeds.items()}
    # All on one host, or each on its own: else both kinds of links have a part in it.
    on_hosts = len(set(options.hosts.split(","))) if options.hosts else 1
    if on_hosts in (1, ranks) and ranks > 1:
        results["collective_GBps"] = {"inside" if on_hosts == 1 else "between": time_collectives(trainer)}
    if rank == 0:
        sys.stdout.write(write_results(results, options.output))
    for name, one in results["modes"].items():
        if "state_s" in one:
            say(f"{name}: {one['state_s']:.3f} s in layers that carry state, on the slowest rank, recompute included")
    for mode in modes:
        if isinstance(mode, CADMode):
            known = mode.session.learned
            if known.links is not None:
                say(f"{mode.name}: {known.links.links}, at start {known.links.start}")
            if known.layer_times is not None and (each := known.layer_times.seconds(0)) is not None:
                nanoseconds = " ".join(f"{1e9 * one:.1f}" for one in each)
                say(f"{mode.name}: outside attention {nanoseconds} ns a token and layer, by rank")
                say(f"{mode.name}: {in_words(known.layer_times.speeds(0)) or 'speeds equal, '}by rank")
            found = mode.session.statistics
            say(
                f"{mode.name}: attention max/mean {found.imbalance_before:.3f} as the documents lay, "
                f"{found.imbalance:.3f} as planned; {found.bytes_sent >> 10} KiB sent"
            )
        mode.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
