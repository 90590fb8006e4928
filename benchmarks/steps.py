"""What dealing documents out to ranks gains, beside what trainers do themselves, as the forecast sees it.

    python benchmarks/steps.py LENGTHS.json [--ranks 8] [--documents 4,16] [--accumulation 1] [--padded]

LENGTHS: a JSON list of document lengths, or the name of a distribution that ships (`deepspeed-cad plan --help`). Each
rank reads so many documents a micro-batch, in the order of the file, unpacked (`padding_free`), or padded to the
longest of its micro-batch. Steps of an 8B model on H200, ZeRO-1, activation checkpointing. Side by side, on the same
documents:

    plain       data parallelism, attention kept through checkpointing
    grouped     the same, by the Trainer's group_by_length: stretches of 50 micro-batches are sorted by length
    by tokens   the same, documents of a step dealt out by their tokens alone, as trainers of rollouts balance batches
    CAD         in place, documents where they were loaded ("documents": "keep")
    dealt       the same, documents dealt out ("documents": "auto")

Numbers are times as fast as CAD without dealing; `tokens` is max over mean of the ranks' tokens, as loaded and dealt
out.

    torchrun --nproc-per-node 4 benchmarks/steps.py LENGTHS --processes 256

takes real steps instead, of a tiny model on CPU processes, lengths divided by 256: with "keep" and with "deal". Plans
and dealing count what the whole lengths cost an 8B layer on H200; printed are the planned seconds of whole layers of
the slowest rank, by the statistics of each micro-batch, without the first step of each.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from process_group import open_process_group  # noqa: E402
from train_model import make_model  # noqa: E402

import deepspeed_cad  # noqa: E402
from deepspeed_cad.cli.data.documents import read_lengths  # noqa: E402
from deepspeed_cad.forecast import Cluster, Foreseen, Machine, Setting, seat_shape  # noqa: E402
from deepspeed_cad.forecast.modes import plain  # noqa: E402
from deepspeed_cad.forecast.modes_cad import in_place  # noqa: E402
from deepspeed_cad.forecast.packing import deal_out  # noqa: E402
from deepspeed_cad.forecast.setting import SHAPES  # noqa: E402
from deepspeed_cad.layout import Layout  # noqa: E402
from deepspeed_cad.planner.deal import Costs, Step, deal  # noqa: E402
from deepspeed_cad.planner.plan import HeadShape  # noqa: E402
from deepspeed_cad.planner.question import read_cost  # noqa: E402
from deepspeed_cad.profiles import Profile  # noqa: E402
from deepspeed_cad.profiles.profile import SHIPPED, ShapeCost  # noqa: E402
from deepspeed_cad.session import close_session  # noqa: E402

GROUPED = 50
"""Micro-batches that are sorted by length together: what transformers takes."""
LONGEST = 131072
"""Tokens at which documents are cut off: `max_length`."""


def make_setting(ranks: int, per_host: int, between: float) -> Setting:
    """An 8B model on so many H200."""
    model, machine = SHAPES["llama-8b"], Machine.load("h200").with_links(None, between * 1e9)
    cost = read_cost(str(SHIPPED / machine.profile), seat_shape(model, 1))
    return Setting(model, Cluster(ranks, min(ranks, per_host), machine), cost, deals=True)


def lay(rows: list[list[int]], padded: bool) -> Layout:
    """Documents of every rank, or samples that are padded to its longest."""
    layout = Layout.from_rank_lengths(rows)
    return replace(layout, tokens=np.array([max(row, default=0) * len(row) for row in rows])) if padded else layout


def make_steps(batches: list[list[int]], ranks: int, accumulation: int, padded: bool) -> list[list[Layout]]:
    """Steps of micro-batches; ranks take them in turn, as Accelerate deals batches out."""
    turns = [lay(batches[at : at + ranks], padded) for at in range(0, len(batches), ranks)]
    return [turns[at : at + accumulation] for at in range(0, len(turns), accumulation)]


def group(lengths: list[Any], documents: int) -> list[list[Any]]:
    """Micro-batches, those of GROUPED micro-batches sorted by length, the longest first; also of (length, …)."""
    size = GROUPED * documents
    ordered = [one for at in range(0, len(lengths), size) for one in sorted(lengths[at : at + size], reverse=True)]
    return [ordered[at : at + documents] for at in range(0, len(ordered), documents)]


def by_tokens(step: Sequence[Layout], padded: bool) -> list[Layout]:
    """Documents of each micro-batch dealt out by their tokens alone, longest first."""
    found = []
    for layout in step:
        rows, ranks = layout.segments, layout.ranks
        costs = Costs(np.zeros(len(rows)), np.ones(ranks), np.ones(ranks))
        given = Step(rows.rank, np.zeros(len(rows), np.int64), rows.end, layout.tokens[:, None], padded)
        dealt = deal(given, costs, 0.05)
        rank = rows.rank if dealt is None else dealt.pieces.rank
        found.append(lay([rows.end[rank == one].tolist() for one in range(ranks)], padded))
    return found


def spread(steps: Sequence[Sequence[Layout]]) -> float:
    """Max over mean of the ranks' tokens, summed over micro-batches."""
    tokens = np.array([layout.tokens for step in steps for layout in step])
    return float(tokens.max(axis=1).sum() / tokens.mean(axis=1).sum())


def planned_seconds(setting: Setting, steps: Sequence[Sequence[Layout]], divide: int, documents: str) -> float:
    """Of one layer of all steps but the first, as real steps on these processes plan them with so divided lengths."""
    device, rank = torch.device("cpu"), dist.get_rank()
    model = make_model(2, 64, 8, 4, 96, 128, LONGEST, device, torch.float32)
    links = {"inside": setting.machine.copies / 1e9, "between": setting.machine.between / 1e9}
    deepspeed_cad.apply(model, {"documents": documents, "granularity": max(1, 1024 // divide), "links": links})
    session = deepspeed_cad.current_session()
    # As many pairs as the whole lengths have, in seconds of all head groups.
    times = setting.machine.in_training * setting.shape.groups / 4
    pair, row, key = (times * one for one in (setting.cost.pair, setting.cost.row, setting.cost.key))
    entry = ShapeCost(HeadShape(8, 4, 8, 8, 4), pair * divide**2, row * divide, key * divide, times * setting.cost.task)
    session.plans.cost = Profile("H200", "8B", (entry,))
    each = divide * (2 * setting.work.forward + setting.work.backward + setting.work.loss / setting.layers)
    session.learned.layer_times.seconds = lambda *of, **given: np.full(dist.get_world_size(), each)
    batches = []
    for layout in (one for step in steps for one in step):
        own = [max(2, length // divide) for length in layout.segments.end[layout.segments.rank == rank].tolist()]
        positions = torch.cat([torch.arange(length) for length in own])[None]
        labels = torch.where(positions == 0, -100, 1)
        batches.append({"input_ids": positions % 128, "position_ids": positions, "labels": labels})
    seconds = 0.0
    loader = session.look_ahead(batches, model, accumulation=len(steps[0]), global_loss=True)
    for number, batch in enumerate(loader):
        model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits.sum().backward()
        tokens = torch.zeros(dist.get_world_size())
        tokens[rank] = batch["input_ids"].numel()
        dist.all_reduce(tokens)
        if (load := session.take_statistics("steps").load) is not None and number >= len(steps[0]):
            seconds += float((load + each * tokens.numpy()).max())
    close_session()
    return seconds


def foreseen(args: argparse.Namespace, setting: Setting, lengths: list[int], documents: int) -> str:
    """Two cells and more: tokens, how many times as fast each is, and what is idle."""
    stays = replace(setting, deals=False)
    batches = [lengths[at : at + documents] for at in range(0, len(lengths), documents)]
    steps = make_steps(batches, args.ranks, args.accumulation, args.padded)
    grouped = make_steps(group(lengths, documents), args.ranks, args.accumulation, args.padded)
    even = [by_tokens(step, args.padded) for step in steps]

    def run(mode: Callable[[Sequence[Layout]], Foreseen], of: Sequence[Sequence[Layout]]) -> list[Foreseen]:
        return [mode(step) for step in of]

    found = [
        *(run(lambda step: plain(stays, step, kept=True), of) for of in (steps, grouped, even)),
        run(lambda step: in_place(stays, step), steps),
        run(lambda step: in_place(setting, step), steps),
    ]
    seconds = [sum(one.seconds.total for one in mode) for mode in found]
    idle = float(np.mean([one.idle for one in found[-1]]))
    dealt = [deal_out(setting, step) for step in steps]
    times = " | ".join(f"{seconds[3] / one:.2f}" for one in seconds)
    return f"{spread(steps):.2f} → {spread(dealt):.2f} | {times} | {idle:.1%}"


def planned(args: argparse.Namespace, setting: Setting, lengths: list[int], documents: int) -> str:
    """Three cells: planned seconds with documents kept and dealt out, and their ratio."""
    batches = [lengths[at : at + documents] for at in range(0, len(lengths), documents)]
    steps = make_steps(batches, args.ranks, args.accumulation, False)
    kept, dealt = (planned_seconds(setting, steps, args.processes, one) for one in ("keep", "deal"))
    return f"{kept:.3f} | {dealt:.3f} | {kept / dealt:.2f}"


def main() -> None:
    """Print one line per number of documents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lengths")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--per-host", type=int, default=8)
    parser.add_argument("--between", type=float, default=50.0, help="GB/s that a GPU gets from other hosts")
    parser.add_argument("--documents", default="4,16", help="of a micro-batch (default: 4,16)")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--steps", type=int, default=25, help="25 of 8 ranks are whole stretches of 50 micro-batches")
    parser.add_argument("--padded", action="store_true")
    parser.add_argument("--processes", type=int, metavar="DIVIDE", help="real steps on CPU processes, lengths divided")
    args = parser.parse_args()
    if args.processes:
        open_process_group()
        args.ranks = args.per_host = dist.get_world_size()
    setting = make_setting(args.ranks, args.per_host, args.between)
    columns = "tokens | plain | grouped | by tokens | CAD | dealt | idle, dealt"
    columns = "kept s | dealt s | times" if args.processes else columns
    lines = [f"| ranks × documents × micro-batches | {columns} |", "|" + "---|" * (columns.count("|") + 2)]
    for documents in map(int, args.documents.split(",")):
        count = args.steps * args.ranks * args.accumulation * documents
        drawn = read_lengths([args.lengths], count * LONGEST, None, None, count, [], lambda text: None)
        lengths = [min(one, LONGEST) for one in drawn[:count]]
        found = (planned if args.processes else foreseen)(args, setting, lengths, documents)
        lines.append(f"| {args.ranks} × {documents} × {args.accumulation} | {found} |")
    if not args.processes or dist.get_rank() == 0:
        print("\n".join(lines))
    if args.processes:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
