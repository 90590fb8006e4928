"""One optimizer step on one long document as users of DeepSpeed train it: ALST, and CAD in the place of its Ulysses.

    torchrun --standalone --nproc-per-node 2 benchmarks/alst_step.py --mode alst --output results/alst.json
    torchrun --standalone --nproc-per-node 2 benchmarks/alst_step.py --mode alst:kept --output results/alst_kept.json
    torchrun --standalone --nproc-per-node 2 benchmarks/alst_step.py --mode cad --output results/cad.json
    python benchmarks/alst_step.py --table results

All: DeepSpeed ZeRO-3 with the optimizer on the host, full activation checkpointing with checkpoints in pinned host
memory, DeepSpeed's tiled MLP and tiled loss (examples/tiling.py), the same weights, the same kernel, the same part of
the document on each rank. `alst` attends by DeepSpeed's UlyssesSPAttentionHF, which checkpointing runs again;
`alst:kept` by the Ulysses of train_ulysses.py, which keeps attention's output where CAD would; `cad` by deepspeed_cad
with `"keep": "host"` unless `--cad` says otherwise. The first steps warm up at full length, because
pinned memory is found in the first; losses of all steps are in the table, so those after the first show whether all
trained the same. Host memory is what the host has less of after a step than before the model was made, pinned memory
of all ranks included. `--profile FOLDER` writes what each GPU ran when in the last step's forward and backward, as
Chrome traces; that step takes longer, by the time that they take to be collected. `--traces FOLDER` sums them up.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent), str(ROOT / "examples")]

from process_group import open_process_group  # noqa: E402
from servers_step import landing_bytes, make_part  # noqa: E402
from torch.autograd.graph import save_on_cpu  # noqa: E402
from train_attention import make_sequences  # noqa: E402
from train_kept import KeptOutputs  # noqa: E402
from train_model import add_sizes, make_model  # noqa: E402
from train_ulysses import use_kept_ulysses, use_ulysses  # noqa: E402

import deepspeed_cad  # noqa: E402
from deepspeed_cad.attention.parking import Parking, available_host_memory  # noqa: E402
from deepspeed_cad.kernels.interface import KernelNeed  # noqa: E402
from deepspeed_cad.kernels.registry import choose  # noqa: E402

COLUMNS = (
    "run", "step s", "tokens/s", "÷ alst", "÷ alst:kept", "peak GiB", "÷ alst", "÷ alst:kept", "host GiB",
    "exposed exchange", "losses",
)  # fmt: skip


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--mode", choices=("alst", "alst:kept", "cad"), help="what attends")
    add("--tokens", type=int, default=262144, help="of the document")
    add("--tile", type=int, default=8192, help="tokens of a tile of MLPs and loss")
    add("--warmup", type=int, default=1, help="steps before the timed ones")
    add("--steps", type=int, default=1, help="steps that are timed")
    add("--cad", type=json.loads, default={"keep": "host"}, help='the "cad" block')
    add("--checkpoints", choices=("host", "device"), default="host", help="where inputs of layers wait for backward")
    add("--lr", type=float, default=1e-5)
    add("--commit", default="", help="where this is not a git checkout: what results name as the commit")
    add("--profile", type=Path, help="folder for torch's traces of the last forward and backward, on GPUs")
    add("--traces", type=Path, help="only print what the traces of --profile in this folder say")
    add("--output", type=Path, help="JSON file of this run")
    add("--table", type=Path, help="only print a table of the JSON files in this folder")
    add_sizes(parser)
    parser.set_defaults(layers=16)
    return parser.parse_args()


def zero3(cuda: bool, lr: float) -> dict[str, Any]:
    """The DeepSpeed JSON of both."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "steps_per_print": 1000000,
        "bf16": {"enabled": cuda},
        "zero_optimization": {
            "stage": 3, "overlap_comm": True, "contiguous_gradients": True,
            "offload_optimizer": {"device": "cpu", "pin_memory": cuda},
        },
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": lr, "betas": [0.9, 0.95], "weight_decay": 0.0, "torch_adam": True, "fused": True},
        },
    }  # fmt: skip


def train(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """All steps; figures of this rank."""
    import deepspeed

    # Otherwise the first start on a CPU compiles a library for 80 s.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    from tiling import TiledLoss, tile_mlps

    rank, ranks, cuda = dist.get_rank(), dist.get_world_size(), device.type == "cuda"
    dist.barrier()
    free = least = available_host_memory() or 0
    dtype = torch.bfloat16 if cuda else torch.float32
    deepspeed.init_distributed(dist_backend="nccl" if cuda else "gloo", auto_mpi_discovery=False)
    model = make_model(
        options.layers, options.hidden, options.heads, options.kv_heads, options.ffn, options.vocab, options.tokens,
        device, dtype,
    )  # fmt: skip
    tile_mlps(model, options.tile)
    TiledLoss(model, options.tile)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    size = options.hidden // options.heads
    kernel = choose("auto", KernelNeed(device, dtype, size, size, options.heads // options.kv_heads))
    feed = session = parking = None
    more: dict[str, Any] = {}
    if options.mode == "cad":
        deepspeed_cad.apply(model, options.cad)
        session = deepspeed_cad.current_session()
        feed = session.find_binding(model).feed
    else:
        if options.mode == "alst:kept":
            parking = Parking(device) if options.cad.get("keep") == "host" else None
            use_kept_ulysses(model, "benchmark_kept", kernel, KeptOutputs(parking))
        else:
            use_ulysses(model, kernel, device)
        more["documents"] = make_sequences([options.tokens], [options.tokens], device)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=zero3(cuda, options.lr)
    )  # fmt: skip
    engine.train()
    ids, positions, targets = make_part(options.tokens, rank, ranks, options.vocab, device)
    batch = {"input_ids": ids[None], "position_ids": positions[None]}
    announced = {name: value.cpu() for name, value in batch.items()}
    labels = {"labels": targets[None], "shift_labels": targets[None]}
    seconds, optimizer, losses, waited = [], [], [], 0.0
    count = options.warmup + options.steps
    for step in range(count):
        if step == options.warmup:
            if session is not None:
                session.take_statistics("benchmark")
            if cuda:
                torch.cuda.reset_peak_memory_stats()
        _meet(cuda)
        begin = time.perf_counter()
        if feed is not None:
            feed.announce(feed.read(announced))
        with _profile(options.profile if step == count - 1 else None, rank):
            with save_on_cpu(pin_memory=cuda) if options.checkpoints == "host" else contextlib.nullcontext():
                items = (options.tokens - 1) / ranks
                loss = engine(**batch, **labels, **more, num_items_in_batch=items, use_cache=False).loss
            engine.backward(loss)
            _meet(cuda)
        before = time.perf_counter()
        engine.step()
        _meet(cuda)
        seconds.append(time.perf_counter() - begin)
        optimizer.append(time.perf_counter() - before)
        least = min(least, available_host_memory() or 0)
        total = loss.detach().float()
        dist.all_reduce(total)
        losses.append(float(total) / ranks)
        if rank == 0:
            took = f"{seconds[-1]:.3f} s, {optimizer[-1]:.3f} s of it the optimizer's"
            sys.stderr.write(f"step {step}: {took}, loss {losses[-1]:.6f}\n")
    if session is not None:
        waited = session.take_statistics("benchmark").waited_s / options.steps
    landing = 0 if session is None else landing_bytes(session)
    parking = parking if session is None else session.parking
    figures = {
        "seconds": seconds[options.warmup :],
        "optimizer": optimizer[options.warmup :],
        "losses": losses,
        "waited": waited if session is not None else None,
        "peak": torch.cuda.max_memory_allocated() + landing if cuda else 0,
        "host": free - least,
        "parked": 0 if parking is None else parking.host_bytes,
        "kernel": kernel.name,
        "transport": "" if session is None or session.transport is None else session.transport.name,
    }
    if session is not None:
        session.close()  # writes its timeline, where --cad names one
    return figures


@contextlib.contextmanager
def _profile(folder: Path | None, rank: int) -> Iterator[None]:
    """Write FOLDER/rankN.json.gz."""
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        yield
    found.export_chrome_trace(str(folder / f"rank{rank}.json.gz"))


def read_traces(folder: Path) -> str:
    """Of each rank: seconds from the first kernel to the last, in attention, and in gathers of parameters."""
    lines = ["| rank | all | attention forward | backward | gathers | those of 0.1 s or more, by number and seconds |"]
    lines.append("|---" * 6 + "|")
    paths = sorted(folder.glob("rank*.json.gz"))
    if not paths:
        raise SystemExit(f"--traces: {folder} has no rank*.json.gz, which --profile writes on GPUs")
    for path in paths:
        with gzip.open(path, "rt") as file:
            kernels = [one for one in json.load(file)["traceEvents"] if one.get("cat") == "kernel"]
        kernels.sort(key=lambda one: one["ts"])
        begin, end = kernels[0]["ts"], max(one["ts"] + one["dur"] for one in kernels)
        took = {
            name: [one["dur"] / 1e6 for one in kernels if re.search(pattern, one["name"])]
            for name, pattern in (("forward", "flash_fwd"), ("backward", "flash_bwd_sm"), ("gathers", "AllGather"))
        }
        sums = " | ".join(f"{sum(one):.2f}" for one in took.values())
        long = ", ".join(f"{i}: {one:.2f}" for i, one in enumerate(took["gathers"]) if one >= 0.1)
        lines.append(f"| {path.name.split('.')[0]} | {(end - begin) / 1e6:.2f} | {sums} | {long} |")
    return "\n".join(lines)


def _meet(cuda: bool) -> None:
    """All ranks are here, and their GPUs are done."""
    if cuda:
        torch.cuda.synchronize()
    dist.barrier()


def summary(options: argparse.Namespace, everyone: list[dict[str, Any]], device: torch.device) -> dict[str, Any]:
    """One run."""
    step = statistics.median(max(times) for times in zip(*(one["seconds"] for one in everyone)))
    return {
        "run": options.mode,
        "machine": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "commit": options.commit, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "tokens": options.tokens, "layers": options.layers, "hidden": options.hidden, "tile": options.tile,
        "cad": options.cad if options.mode == "cad" else None, "step_s": step, "tokens_per_s": options.tokens / step,
        "peak": max(one["peak"] for one in everyone), "host": everyone[0]["host"], "ranks": everyone,
    }  # fmt: skip


def table(runs: list[dict[str, Any]]) -> str:
    """Markdown; runs are compared with those of ALST, as it is and with attention kept."""
    lines = [" | ".join(COLUMNS), " | ".join("---" for _ in COLUMNS)]
    others = [next((one for one in runs if one["run"] == name), None) for name in ("alst", "alst:kept")]
    for run in sorted(runs, key=lambda one: one["run"]):
        rate, memory = (
            " | ".join(f"{run[what] / other[what]:.3f}" if other and other[what] else "?" for other in others)
            for what in ("tokens_per_s", "peak")
        )
        waits = [one["waited"] for one in run["ranks"] if one["waited"] is not None]
        exposed = f"{sum(waits) / len(waits) / run['step_s']:.2%}" if waits else ""
        losses = ", ".join(f"{loss:.5f}" for loss in run["ranks"][0]["losses"])
        lines.append(
            f"{run['run']} | {run['step_s']:.2f} | {run['tokens_per_s']:.0f} | {rate} | {run['peak'] / 2**30:.1f} | "
            f"{memory} | {run['host'] / 2**30:.1f} | {exposed} | {losses}"
        )
    return "\n".join(f"| {line} |" for line in lines) + "\n"


def main() -> None:
    options = parse()
    if options.traces:
        print(read_traces(options.traces))
        return
    if options.table:
        runs = [json.loads(path.read_text()) for path in sorted(options.table.glob("*.json"))]
        sys.stdout.write(table(runs))
        return
    if options.mode is None:
        raise SystemExit("--mode alst, --mode cad, or --table FOLDER")
    if options.profile and not torch.cuda.is_available():
        raise SystemExit("--profile is of what GPUs run, and torch sees none here")
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    device = open_process_group(minutes=5)
    found = train(options, device)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    if dist.get_rank() == 0:
        run = summary(options, everyone, device)
        if options.output:
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps(run, indent=1) + "\n")
        sys.stdout.write(table([run]))
        sys.stdout.flush()
    dist.barrier()
    # ZeRO-3's threads may abort the interpreter when it takes itself down.
    os._exit(0)


if __name__ == "__main__":
    main()
