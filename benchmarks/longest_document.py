"""The longest document that a deep model fits, from passes of two shallow ones: memory grows by the layer.

    torchrun --standalone --nproc-per-node 2 benchmarks/longest_document.py --layers 2 --output results
    torchrun --standalone --nproc-per-node 2 benchmarks/longest_document.py --layers 3 --output results
    python benchmarks/longest_document.py --table results

Each run trains one optimizer step on one document of each length, the shortest first, as examples/million_tokens.py
does: DeepSpeed ZeRO-3 with the optimizer on the host, activation checkpointing with checkpoints on the host, tiled MLP
and loss, CAD with `"keep": "host"` unless `--cad` says otherwise. Two layers are the fewest of which one is parked
while the other runs, so what the third adds is what each further one adds.

Peak memory of a GPU is what torch had allocated at most, landing areas, and what CUDA, NCCL and kernels hold outside of
both. Host memory is what the host has less of at the end of a step than before the model was made, of all ranks. What
`--deep` layers would take is the larger model and its last layer as often as is missing; it fits where it leaves a
twentieth of a GPU and of the host free. A length that another one foresees not to fit is not tried, nor is one that
would take longer than there is time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent), str(ROOT / "examples")]

from alst_step import zero3  # noqa: E402
from servers_step import landing_bytes, make_part  # noqa: E402
from torch.autograd.graph import save_on_cpu  # noqa: E402
from train_model import add_sizes, make_model  # noqa: E402

import deepspeed_cad  # noqa: E402
from deepspeed_cad.attention.parking import available_host_memory  # noqa: E402

GiB = 2**30
PER_RANK = (262144, 393216)
"""Tokens of a rank that are tried: half a million and three quarters of one on two GPUs."""
LEFT_FREE = 0.05
COLUMNS = (
    "tokens", "GPUs", "peak GiB per GPU, {0} layers", "{1} layers", "GiB per layer", "host GiB, {0} layers",
    "{1} layers", "host GiB per layer", "{2} layers: GiB per GPU", "of", "host GiB", "of", "fits",
)  # fmt: skip


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tokens", type=int, nargs="+", help="lengths, ascending (default: 262144 and 393216 times the ranks)")
    add("--tile", type=int, default=8192, help="tokens of a tile of MLPs and loss")
    add("--cad", type=json.loads, default={"keep": "host", "tolerance": 0.01}, help='the "cad" block')
    add("--checkpoints", choices=("host", "device"), default="host", help="where inputs of layers wait for backward")
    add("--seconds", type=float, default=130.0, help="of all passes of this run")
    add("--deep", type=int, default=32, help="layers of the model that shall fit")
    add("--host-gib", type=float, help="memory of the host that it shall fit (default: of this one)")
    add("--commit", default="", help="where this is not a git checkout: what results name as the commit")
    add("--output", type=Path, help="folder of this run's JSON file")
    add("--table", type=Path, help="only print a table of the JSON files in this folder")
    add_sizes(parser)
    parser.set_defaults(layers=2, vocab=128256)
    return parser.parse_args()


class Trainer:
    """The model and its engine on this rank."""

    def __init__(self, options: argparse.Namespace, longest: int, device: torch.device) -> None:
        """For documents of up to `longest` tokens."""
        import deepspeed

        # Otherwise the first start on a CPU compiles a library for 80 s.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        from tiling import TiledLoss, tile_mlps

        self.options, self.device, self.cuda = options, device, device.type == "cuda"
        deepspeed.init_distributed(dist_backend="nccl" if self.cuda else "gloo", auto_mpi_discovery=False)
        dtype = torch.bfloat16 if self.cuda else torch.float32
        model = make_model(
            options.layers, options.hidden, options.heads, options.kv_heads, options.ffn, options.vocab, longest,
            device, dtype,
        )  # fmt: skip
        tile_mlps(model, options.tile)
        TiledLoss(model, options.tile)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        deepspeed_cad.apply(model, options.cad)
        self.session = deepspeed_cad.current_session()
        self.feed = self.session.find_binding(model).feed
        self.engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=zero3(self.cuda, 1e-5)
        )
        self.engine.train()

    def step(self, tokens: int) -> float:
        """One optimizer step on a document of so many tokens; its loss."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        ids, positions, targets = make_part(tokens, rank, ranks, self.options.vocab, self.device)
        batch = {"input_ids": ids[None], "position_ids": positions[None]}
        labels = {"labels": targets[None], "shift_labels": targets[None]}
        self.feed.announce(self.feed.read({name: value.cpu() for name, value in batch.items()}))
        stored = self.options.checkpoints == "host"
        with save_on_cpu(pin_memory=self.cuda) if stored else contextlib.nullcontext():
            items = (tokens - 1) / ranks
            loss = self.engine(**batch, **labels, num_items_in_batch=items, use_cache=False).loss
        self.engine.backward(loss)
        self.engine.step()
        total = loss.detach().float()
        dist.all_reduce(total)
        return float(total) / ranks

    def forget(self) -> None:
        """Begin to measure: what an earlier length left for later ones goes back, pinned memory of torch included."""
        if self.cuda:
            torch.cuda.empty_cache()
            getattr(torch._C, "_host_emptyCache", lambda: None)()
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        """Bytes of this GPU that were in use at most; 0 on a CPU."""
        if not self.cuda:
            return 0
        free, whole = torch.cuda.mem_get_info()
        return torch.cuda.max_memory_allocated() + whole - free - torch.cuda.memory_reserved()


def try_lengths(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """All lengths; written to the output after each, so that one that fails leaves the others."""
    rank, ranks, cuda = dist.get_rank(), dist.get_world_size(), device.type == "cuda"
    lengths = options.tokens or [ranks * own for own in PER_RANK]
    gpu = torch.cuda.mem_get_info()[1] if cuda else 0
    dist.barrier()
    free = available_host_memory() or 0
    run: dict[str, Any] = {
        "layers": options.layers, "ranks": ranks, "deep": options.deep, "hidden": options.hidden,
        "checkpoints": options.checkpoints, "cad": options.cad, "tile": options.tile, "gpu": gpu,
        "host": int(options.host_gib * GiB) if options.host_gib else free,
        "machine": torch.cuda.get_device_name(device) if cuda else "CPU", "commit": options.commit,
        "torch": torch.__version__, "date": time.strftime("%Y-%m-%d", time.gmtime()), "tries": [],
    }  # fmt: skip
    trainer = Trainer(options, max(lengths), device)
    # Kernels compile, and the optimizer makes its state.
    trainer.step(lengths[0] // (16 * ranks) * ranks)
    begun = time.perf_counter()
    for tokens in lengths:
        told = [why for why in _gather(why_not(run, tokens, time.perf_counter() - begun, options.seconds)) if why]
        if told:
            run["tries"].append({"tokens": tokens, "skipped": told[0]})
            _write(options, run)
            continue
        trainer.forget()
        dist.barrier()
        start = time.perf_counter()
        # Should the machine run out of memory, this is what is left of the try.
        _write(options, {**run, "tries": [*run["tries"], {"tokens": tokens, "skipped": "it did not end"}]})
        loss = trainer.step(tokens)
        peak = trainer.peak()
        dist.barrier()
        spent, left_free = time.perf_counter() - start, available_host_memory() or 0
        found = _gather((peak, left_free, landing_bytes(trainer.session), spent))
        peaks, left, landing, seconds = (list(values) for values in zip(*found))
        run["tries"].append(
            {"tokens": tokens, "peak": max(peaks), "peaks": peaks, "landing": max(landing), "host": free - min(left),
             "seconds": max(seconds), "loss": loss}
        )  # fmt: skip
        _write(options, run)
        dist.barrier()
        if rank == 0:
            sys.stderr.write(f"{tokens} tokens, {options.layers} layers: {max(seconds):.1f} s, loss {loss:.4f}\n")
    return run


def why_not(run: dict[str, Any], tokens: int, spent: float, seconds: float) -> str:
    """Why a length is not tried, from those before it; "" where it is. Attention grows with the square, memory by the
    token."""
    done = [one for one in run["tries"] if "skipped" not in one]
    if not done:
        return ""
    last = done[-1]
    more = tokens / last["tokens"]
    if spent + last["seconds"] * more**2 > seconds:
        return f"would take {last['seconds'] * more**2:.0f} s"
    for what, name in (("gpu", "peak"), ("host", "host")):
        if run[what] and last[name] * more > run[what]:
            return f"would take {last[name] * more / GiB:.0f} GiB of {what} memory"
    return ""


def table(runs: list[dict[str, Any]]) -> str:
    """Markdown of two runs with different layers: what each length takes, and what it would with all layers."""
    layers = sorted({run["layers"] for run in runs})
    if len(layers) != 2:
        raise SystemExit(f"a table needs runs of two numbers of layers; there are {layers}")
    few, many = (next(run for run in runs if run["layers"] == count) for count in layers)
    deep, gpu, host = many["deep"], many["gpu"], many["host"]
    lines = [" | ".join(COLUMNS).format(few["layers"], many["layers"], deep), " | ".join("---" for _ in COLUMNS)]
    points: list[tuple[int, float, float]] = []
    for one in few["tries"]:
        other = next((x for x in many["tries"] if x["tokens"] == one["tokens"]), {"skipped": "it was not reached"})
        words = [x["skipped"] for x in (one, other) if "skipped" in x]
        head = f"{one['tokens']:,} | {few['ranks']}"
        if words:
            lines.append(f"{head} | not measured: {words[0]}" + " |" * (len(COLUMNS) - 3))
            continue
        cells, whole = [], []
        for name in ("peak", "host"):
            each = (other[name] - one[name]) / (many["layers"] - few["layers"])
            whole.append(other[name] + (deep - many["layers"]) * each)
            cells += [f"{x / GiB:.2f}" for x in (one[name], other[name], each)]
        points.append((one["tokens"], *whole))
        fits = "yes" if not too_much(whole, gpu, host) else f"no: {too_much(whole, gpu, host)}"
        cells += [f"{whole[0] / GiB:.1f}", f"{gpu / GiB:.1f}", f"{whole[1] / GiB:.1f}", f"{host / GiB:.1f}", fits]
        lines.append(f"{head} | {' | '.join(cells)}")
    text = "\n".join(f"| {line} |" for line in lines) + "\n"
    return text + longest(points, gpu, host, deep)


def too_much(whole: list[float], gpu: int, host: int) -> str:
    """What is exceeded."""
    sizes = (("GPU", whole[0], gpu), ("host", whole[1], host))
    return " and ".join(name for name, size, most in sizes if most and size > most * (1 - LEFT_FREE))


def longest(points: list[tuple[int, float, float]], gpu: int, host: int, deep: int) -> str:
    """The length at which memory is full, on the line through the longest two that were measured."""
    if len(points) < 2 or not gpu:
        return ""
    (short, *low), (far, *high) = points[-2:]
    found = {}
    for name, a, b, most in (("GPU", low[0], high[0], gpu), ("host", low[1], high[1], host)):
        slope = (b - a) / (far - short)
        found[name] = far + (most * (1 - LEFT_FREE) - b) / slope if slope > 0 else float("inf")
    least = min(found, key=lambda name: found[name])
    return f"\nBy the memory per token {deep} layers are full at {found[least]:,.0f} tokens, where the {least} ends.\n"


def _gather(mine: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _write(options: argparse.Namespace, run: dict[str, Any]) -> None:
    if options.output and dist.get_rank() == 0:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / f"{options.layers}_layers.json").write_text(json.dumps(run, indent=1) + "\n")


def main() -> None:
    options = parse()
    if options.table:
        sys.stdout.write(table([json.loads(path.read_text()) for path in sorted(options.table.glob("*.json"))]))
        return
    cuda = torch.cuda.is_available()
    if not cuda:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, timeout=timedelta(minutes=5))
    else:
        dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    try_lengths(options, device)
    dist.barrier()
    # ZeRO-3's threads may abort the interpreter when it takes itself down.
    os._exit(0)


if __name__ == "__main__":
    main()
