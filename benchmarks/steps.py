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
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from deepspeed_cad.cli.data.lengths import read_lengths
from deepspeed_cad.forecast import Cluster, Foreseen, Machine, Setting, seat_shape
from deepspeed_cad.forecast.model_shape import SHAPES
from deepspeed_cad.forecast.modes import plain
from deepspeed_cad.forecast.modes_cad import in_place
from deepspeed_cad.forecast.steps import deal_out, lay
from deepspeed_cad.layout import Layout
from deepspeed_cad.planner.deal import Costs, Step, deal
from deepspeed_cad.planner.question import read_cost
from deepspeed_cad.profiles.choice import SHIPPED

GROUPED = 50
"""Micro-batches that are sorted by length together: what transformers takes."""
LONGEST = 131072
"""Tokens at which documents are cut off: `max_length`."""


def make_setting(ranks: int, per_host: int, between: float) -> Setting:
    """An 8B model on so many H200."""
    model, machine = SHAPES["llama-8b"], Machine.load("h200").with_links(None, between * 1e9)
    cost = read_cost(str(SHIPPED / machine.profile), seat_shape(model, 1))
    return Setting(model, Cluster(ranks, min(ranks, per_host), machine), cost, deals=True)


def make_steps(batches: list[list[int]], ranks: int, accumulation: int, padded: bool) -> list[list[Layout]]:
    """Steps of micro-batches; ranks take them in turn, as Accelerate deals batches out."""
    turns = [lay(batches[at : at + ranks], padded) for at in range(0, len(batches), ranks)]
    return [turns[at : at + accumulation] for at in range(0, len(turns), accumulation)]


def group(lengths: list[int], documents: int) -> list[list[int]]:
    """Micro-batches, those of GROUPED micro-batches sorted by length, the longest first."""
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
    args = parser.parse_args()
    setting = make_setting(args.ranks, args.per_host, args.between)
    stays = replace(setting, deals=False)
    print("| ranks × documents × micro-batches | tokens | plain | grouped | by tokens | CAD | dealt | idle, dealt |")
    print("|---|---|---|---|---|---|---|---|")
    for documents in map(int, args.documents.split(",")):
        count = args.steps * args.ranks * args.accumulation * documents
        drawn = read_lengths([args.lengths], count * LONGEST, None, None, count, [], lambda text: None)
        lengths = [min(one, LONGEST) for one in drawn[:count]]
        batches = [lengths[at : at + documents] for at in range(0, count, documents)]
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
        print(
            f"| {args.ranks} × {documents} × {args.accumulation} | {spread(steps):.2f} → {spread(dealt):.2f} | "
            f"{' | '.join(f'{seconds[3] / one:.2f}' for one in seconds)} | {idle:.1%} |"
        )


if __name__ == "__main__":
    main()
