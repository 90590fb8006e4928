"""A training step with reserved attention servers, or with CAD in place: one long document, or rows of packed ones.

    torchrun --standalone --nproc-per-node 2 -m deepspeed_cad.run --cad '{"servers": {"reserved": 1}}' \\
        benchmarks/servers_step.py --tokens 131072 --output results/reserved.json
    python benchmarks/servers_step.py --table results

Ranks that train hold equal parts of the document: all of it where one trains and one serves, a half each in place. The
last line of a run, and `--table` for all runs in a folder, give tokens/s of the machine, how long servers were idle,
what trainers waited and their peak memory. benchmarks/gpus servers runs both over two kinds of links.

`--workload FILE --rows N` trains the first N rows of a file instead, each a micro-batch of one trainer: three trainers
beside a server take 12 rows in four micro-batches, four trainers in place in three. So both train the same documents
in one step, with the same tokens at a time on each GPU (benchmarks/gpus servers_rows).

The default is 131,072 tokens in 8 layers of 8B size. By the profile that ships for an H200 (1.12e-11 s per pair and
head group) and 3.5 µs per token for the rest of a layer with full checkpointing, attention is 63 % of the work there,
nearest to a half among documents of 128K to 256K. One trainer then needs about 50 GiB: 4 + 4 for weights and gradients,
16 for what checkpointing and CAD keep, the rest while a layer runs. The optimizer is SGD without state, so that peak
memory is that of activations, whatever number of ranks shards an optimizer. The learning rate is 0: all runs compute
the same loss. Where several ranks train they add up their gradients, as training does; `summing` says how long.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from process_group import open_process_group  # noqa: E402
from slowed import measure_alone, meet_all, slowed  # noqa: E402
from train_model import ChunkedLoss, add_sizes, make_model  # noqa: E402
from train_workload import Workload  # noqa: E402

import deepspeed_cad  # noqa: E402
from deepspeed_cad.config import CADConfig  # noqa: E402
from deepspeed_cad.kernels.interface import KernelNeed  # noqa: E402
from deepspeed_cad.kernels.registry import choose  # noqa: E402
from deepspeed_cad.request import read_environment  # noqa: E402
from deepspeed_cad.session import Session  # noqa: E402

COLUMNS = (
    "run", "ranks", "transport", "step s", "tokens/s", "÷ in place", "servers idle", "trainer waited", "summing",
    "peak GiB", "loss",
)  # fmt: skip


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131072, help="of the document; with --workload, of a row")
    parser.add_argument("--workload", type=Path, help="instead of a document: JSON with the documents of rows")
    parser.add_argument("--rows", type=int, default=0, help="with --workload: how many are a step (default: all)")
    parser.add_argument("--warmup", type=int, default=3, help="steps in which kernels compile and paces are learned")
    parser.add_argument("--steps", type=int, default=2, help="steps that are timed")
    parser.add_argument(
        "--commit", default="", help="where this is not a git checkout: what results name as the commit"
    )
    parser.add_argument("--output", type=Path, help="JSON file of this run")
    parser.add_argument("--table", type=Path, help="only print a table of the JSON files in this folder")
    parser.add_argument("--slowed", type=int, metavar="GPU", help="run matrix products beside this GPU: see slowed.py")
    parser.add_argument("--alone", action="store_true", help="measure each trainer alone first: see slowed.py")
    parser.add_argument(
        "--in-place", metavar="BLOCK", help='the "cad" block, in place; then without -m deepspeed_cad.run'
    )
    add_sizes(parser)
    options = parser.parse_args()
    if options.workload and options.alone:
        parser.error("--alone measures one document, not a --workload")
    if options.alone and options.in_place is None:
        # Under the launcher the first forward that trains turns CAD on, and nothing is measured without it.
        parser.error("--alone needs --in-place BLOCK")
    return options


class Part(NamedTuple):
    """What one micro-batch of this rank has, [T] each; and tokens and targets of the whole step, over all ranks."""

    ids: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    tokens: int
    all_targets: int


def make_part(tokens: int, rank: int, trainers: int, vocab: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Ids, positions and next tokens of this rank's part of the document."""
    ids = torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(1))
    targets = torch.cat([ids[1:], ids.new_full((1,), -100)])
    here = slice(rank * tokens // trainers, (rank + 1) * tokens // trainers)
    return tuple(one[here].to(device) for one in (ids, torch.arange(tokens), targets))


def make_parts(options: argparse.Namespace, rank: int, trainers: int, device: torch.device) -> list[Part]:
    """This rank's micro-batches of a step."""
    if options.workload is None:
        part = make_part(options.tokens, rank, trainers, options.vocab, device)
        return [Part(*part, options.tokens, options.tokens - 1)]
    workload = Workload.load(options.workload)
    workload = workload.fit(workload.ranks, min(options.tokens, workload.tokens_per_rank), True, None)
    if workload.stream:
        raise SystemExit(f"{options.workload} is a stream over all ranks, and rows of whole documents are needed here")
    rows = [row for step in range(len(workload.steps)) for row in workload.make_rows(step, options.vocab)]
    count = options.rows or len(rows)
    if count > len(rows) or count % trainers:
        raise SystemExit(
            f"--rows {count}: {options.workload} has {len(rows)} rows, and each of {trainers} trainers takes as many"
        )
    targets = sum(int((row.targets >= 0).sum()) for row in rows[:count])
    tokens = sum(len(row.tokens) for row in rows[:count])
    own = rows[rank:count:trainers]
    return [Part(*(x.to(device) for x in (r.tokens, r.positions, r.targets)), tokens, targets) for r in own]


def landing_bytes(session: Session) -> int:
    """Device memory of landing areas, which lie outside of torch's allocator."""
    return 0 if session.transport is None else session.transport.landing_bytes


def train(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """All steps; figures of this rank."""
    rank, trainers, cuda = dist.get_rank(), dist.get_world_size(), device.type == "cuda"
    model = make_model(
        options.layers, options.hidden, options.heads, options.kv_heads, options.ffn, options.vocab, options.tokens,
        device, torch.bfloat16 if cuda else torch.float32,
    )  # fmt: skip
    model.gradient_checkpointing_enable({"use_reentrant": False})
    request = read_environment()
    if (request is None) == (options.in_place is None):
        raise SystemExit(
            "start this by torchrun -m deepspeed_cad.run --cad '{...}' benchmarks/servers_step.py, or give --in-place"
        )
    config = CADConfig.from_dict(json.loads(options.in_place)) if request is None else request.config
    parts = make_parts(options, rank, trainers, device)

    def compute(part: Part) -> torch.Tensor:
        ids, positions = part.ids[None], part.positions[None]
        hidden = model.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state[0]
        loss: torch.Tensor = ChunkedLoss.apply(hidden, model.lm_head.weight, part.targets, 1.0 / part.all_targets)
        loss.backward()
        return loss.detach()

    def finish() -> None:
        if cuda:
            torch.cuda.synchronize()

    meet = meet_all(device)
    alone = measure_alone(model, lambda: compute(parts[0]), options.tokens, meet) if options.alone else None
    deepspeed_cad.apply(model, config)
    session = deepspeed_cad.current_session()
    assert session is not None
    feed = session.find_binding(model).feed
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batches = [{"input_ids": one.ids[None].cpu(), "position_ids": one.positions[None].cpu()} for one in parts]

    seconds, summing = [], []
    count = options.warmup + options.steps
    # Read one micro-batch ahead, as a loader does.
    coming = itertools.islice(itertools.cycle(batches), count * len(batches))
    feed.announce(feed.read(next(coming)))
    for step in range(count):
        if step == options.warmup:
            session.take_statistics("benchmark")
            if cuda:
                torch.cuda.reset_peak_memory_stats()
        meet()
        begin = time.perf_counter()
        total = torch.zeros((), device=device)
        for part in parts:
            following = next(coming, None)
            if following is not None:
                feed.announce(feed.read(following))
            total += compute(part)
        finish()
        computed = time.perf_counter()
        if trainers > 1:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        finish()
        if step >= options.warmup:
            seconds.append(time.perf_counter() - begin)
            summing.append(time.perf_counter() - computed)
        if rank == 0:
            sys.stderr.write(f"step {step}: {time.perf_counter() - begin:.3f} s\n")
    dist.all_reduce(total)
    found = session.take_statistics("benchmark")
    known = session.learned.layer_times
    linear = None if known is None else known.seconds(0)
    return {
        "seconds": seconds,
        "summing": summing,
        "waited": found.waited_s / options.steps,
        "servers_idle": found.servers_idle if found.servers_s else None,
        "peak": torch.cuda.max_memory_allocated() + landing_bytes(session) if cuda else 0,
        "loss": float(total),
        "transport": "none" if session.transport is None else session.transport.name,
        "links": str(session.links),
        "reserved": session.group_ranks - trainers,
        "linear_s_per_token": None if linear is None else linear.tolist(),
        "attention_planned": (found.load / max(found.micro_batches, 1)).tolist(),
        "speeds": None if session.speeds is None else session.speeds.tolist(),
        "alone": alone,
        "tokens": parts[0].tokens,
        "micro_batches": len(parts),
    }


def for_predictions(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """What benchmarks/foreseen.py foresees a run with: sizes, kernel, speeds of links, hosts."""
    session = deepspeed_cad.current_session()
    assert session is not None
    names = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
    size, dtype = options.hidden // options.heads, torch.bfloat16 if device.type == "cuda" else torch.float32
    need = KernelNeed(device, dtype, size, size, options.heads // options.kv_heads)
    where = session.plans.crew.hosts
    hosts = None if where is None else ",".join(map(str, where.tolist()))
    speeds = {} if session.links is None else {"inside": session.links.inside, "between": session.links.between}
    return {
        "settings": {**{name: getattr(options, name) for name in names}, "hosts": hosts},
        "kernel": choose(session.config.kernel, need).name,
        "link_GBps": {kind: speed and speed / 1e9 for kind, speed in speeds.items()},
    }


def write(options: argparse.Namespace, everyone: list[dict[str, Any]], device: torch.device) -> None:
    """One run as JSON, and its line of the table."""
    first = everyone[0]
    step = statistics.median(max(times) for times in zip(*(one["seconds"] for one in everyone)))
    result = {
        "run": options.output.stem if options.output else "run",
        **for_predictions(options, device),
        "machine": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "commit": options.commit, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "workload": None if options.workload is None else options.workload.stem, "tokens": first["tokens"],
        "layers": options.layers, "hidden": options.hidden, "trainers": len(everyone), "servers": first["reserved"],
        "slowed": options.slowed, "step_s": step, "tokens_per_s": first["tokens"] / step, "ranks": everyone,
    }  # fmt: skip
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    sys.stdout.write(table([result]))


def table(runs: list[dict[str, Any]]) -> str:
    """Markdown; runs are compared with the run in place whose name ends alike."""
    lines = [" | ".join(COLUMNS), " | ".join("---" for _ in COLUMNS)]
    for run in sorted(runs, key=lambda one: one["run"].rpartition("_")[::-1]):
        link = run["run"].rpartition("_")[2]
        other = [one for one in runs if one["servers"] == 0 and one["run"].rpartition("_")[2] == link]
        ratio = f"{run['tokens_per_s'] / other[0]['tokens_per_s']:.3f}" if other else "?"
        ranks, idle = run["ranks"], run["ranks"][0]["servers_idle"]
        waited = max(one["waited"] for one in ranks) / run["step_s"]
        cells = (
            run["run"], f"{run['trainers']} + {run['servers']}", ranks[0]["transport"], f"{run['step_s']:.3f}",
            f"{run['tokens_per_s']:.0f}", ratio, "none" if idle is None else f"{idle:.1%}", f"{waited:.1%}",
            f"{statistics.median(ranks[0]['summing']) / run['step_s']:.1%}",
            f"{max(one['peak'] for one in ranks) / 2**30:.1f}", f"{ranks[0]['loss']:.5f}",
        )  # fmt: skip
        lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines) + "\n"


def main() -> None:
    options = parse()
    if options.table:
        found = [json.loads(path.read_text()) for path in sorted(options.table.glob("*.json"))]
        # Other benchmarks may have written there too.
        sys.stdout.write(table([run for run in found if "trainers" in run]))
        return
    device = open_process_group(minutes=5)
    with slowed(options.slowed if dist.get_rank() == 0 else None):
        dist.barrier()
        own = train(options, device)
        dist.barrier()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    if dist.get_rank() == 0:
        write(options, everyone, device)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
