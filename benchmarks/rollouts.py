"""The training phase of reinforcement learning, with and without CAD: rollouts dealt out by length, forwards without
backward, then training, under FSDP2.

    torchrun --nproc-per-node 2 benchmarks/rollouts.py rollouts --packing by_work --batch 64 --layers 8
    torchrun --nproc-per-node 2 benchmarks/rollouts.py rollouts --batch 8 --divide 128 --context 512 --layers 2 \\
        --hidden 64 --heads 8 --kv-heads 4 --ffn 96 --vocab 128          # CPU processes, to see that it runs

LENGTHS: as `deepspeed-cad plan` takes it. Whole rollouts are dealt out to ranks and micro-batches as their trainers do
it (by_length and by_work of `deepspeed-cad plan`), the same in both modes: `plain:kept` attends on each rank alone,
`cad` together, in forwards without backward too. Both keep attention through checkpointing. A step forwards all
micro-batches `--forwards` times under no_grad for log-probabilities, as for old policy and reference (of the same
weights here), then trains them. The optimizer is left out: it is the same in both.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from fsdp2_step import WithLoss, shard  # noqa: E402
from process_group import open_process_group  # noqa: E402
from train_attention import local_attention, make_sequences, use_attention  # noqa: E402
from train_kept import KeptOutputs  # noqa: E402
from train_model import LOSS_ROWS, add_sizes, make_model  # noqa: E402
from train_workload import Row, Workload  # noqa: E402

import deepspeed_cad  # noqa: E402
from deepspeed_cad.cli.data.documents import read_lengths  # noqa: E402
from deepspeed_cad.forecast.packing import DEALT, Rows, deal_by_length  # noqa: E402
from deepspeed_cad.kernels.interface import KernelNeed  # noqa: E402
from deepspeed_cad.kernels.registry import choose  # noqa: E402
from deepspeed_cad.layout import Layout  # noqa: E402
from deepspeed_cad.session import find_binding  # noqa: E402


class Policy(WithLoss):
    """Also gives log-probabilities of targets, under no_grad."""

    def forward(self, targets: torch.Tensor, scale: float, **inputs: object) -> torch.Tensor:
        """See WithLoss; under no_grad [tokens] log-probabilities, 0 where there is no target."""
        if torch.is_grad_enabled():
            return super().forward(targets, scale, **inputs)
        hidden, weight = self.model.model(**inputs).last_hidden_state[0], self.model.lm_head.weight
        found = [
            -torch.nn.functional.cross_entropy((rows @ weight.t()).float(), own, reduction="none")
            for rows, own in zip(hidden.split(LOSS_ROWS), targets.split(LOSS_ROWS))
        ]
        return torch.cat(found)


class Way:
    """One mode: its model, and the micro-batches of this rank as the model takes them."""

    def __init__(self, name: str, model: Policy, device: torch.device, feed: object = None) -> None:
        self.name, self.model, self.device, self.feed = name, model, device, feed

    def pass_over(self, rows: Iterable[Row], scale: float, trains: bool) -> tuple[float, list[torch.Tensor]]:
        """Seconds of the slowest rank, and losses or log-probabilities of micro-batches."""
        found = []
        self._meet()
        begun = time.perf_counter()
        for row in rows:
            inputs = {"input_ids": row.tokens[None], "position_ids": row.positions[None]}
            more = {}
            if self.feed is None:
                more["documents"] = make_sequences(row.lengths, row.lengths, self.device)
            elif trains:
                self.feed.announce(self.feed.read(inputs))
            given = {name: value.to(self.device) for name, value in inputs.items()}
            with torch.set_grad_enabled(trains):
                out = self.model(row.targets.to(self.device), scale, **given, **more, use_cache=False)
            if trains:
                out.backward()
            found.append(out.detach())
        self._meet()
        seconds = torch.tensor(time.perf_counter() - begun)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return float(seconds), found

    def _meet(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()


def deal_out(options: argparse.Namespace, ranks: int) -> list[list[Layout]]:
    """Micro-batches of every step."""
    count = options.steps * ranks * options.batch
    tokens = count * options.context * options.divide
    lengths = read_lengths([options.lengths], tokens, None, None, count, [], lambda text: None)[:count]
    lengths = [max(1, length // options.divide) for length in lengths]
    return list(deal_by_length(lengths, ranks, Rows(options.context, options.packing, 1, options.batch)))


def own_rows(steps: list[list[Layout]], step: int, rank: int, vocab: int) -> list[Row]:
    """This rank's micro-batches of a step."""
    rows = [[one.segments.end[one.segments.rank == rank].tolist()] for one in steps[step]]
    made = Workload("", 1, 0, False, tuple(tuple(map(tuple, row)) for row in rows))
    return [made.make_rows(number, vocab)[0] for number in range(len(rows))]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("lengths", metavar="LENGTHS", help="a distribution by name, or a file of lengths")
    add("--packing", choices=DEALT, default="by_work")
    add("--batch", type=int, default=64, help="rollouts of a step for each rank (default: 64)")
    add("--context", type=int, default=65536, help="most tokens of a micro-batch (default: 65536)")
    add("--divide", type=int, default=1, help="lengths by this, for a dry run (default: 1)")
    add("--forwards", type=int, default=2, help="passes without backward (default: 2)")
    add("--steps", type=int, default=2, help="the first warms up and is not counted (default: 2)")
    add_sizes(parser)
    add("--cad", type=json.loads, default={}, help='keys of the "cad" block')
    add("--output", type=Path, help="JSON file")
    return parser.parse_args()


def main() -> None:
    """Run both modes in turn over all steps, print a table."""
    options = parse()
    device = open_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    sizes = (options.layers, options.hidden, options.heads, options.kv_heads, options.ffn, options.vocab)
    size = options.hidden // options.heads
    kernel = choose("auto", KernelNeed(device, dtype, size, size, options.heads // options.kv_heads))
    kept, balanced = (make_model(*sizes, options.context, device, dtype) for _ in range(2))
    use_attention(kept, "benchmark_kept", local_attention(kernel, KeptOutputs()))
    deepspeed_cad.apply(balanced, {"forward_only": "balanced", "documents": "keep", **options.cad})
    # Else CAD would take it for a reference, and attend for it under no_grad.
    deepspeed_cad.current_session().decoders.add(kept.model)
    ways = [
        Way("plain:kept", shard(kept, dtype, Policy), device),
        Way("cad", shard(balanced, dtype, Policy), device, find_binding(balanced).feed),
    ]
    steps = deal_out(options, ranks)
    seconds: dict[str, list[tuple[float, float]]] = {way.name: [] for way in ways}
    farthest = 0.0
    for step in range(len(steps)):
        rows = own_rows(steps, step, rank, options.vocab)
        scale = 1.0 / sum(int(one.tokens.sum()) for one in steps[step])
        said = []
        for way in ways:
            passes = [way.pass_over(rows, scale, False) for _ in range(options.forwards)]
            trained, losses = way.pass_over(rows, scale, True)
            way.model.zero_grad(set_to_none=True)
            said.append([*(one for _, of in passes for one in of), *losses])
            if step:
                seconds[way.name].append((sum(one for one, _ in passes), trained))
        found = [float((a - b).abs().max()) for a, b in zip(*said)]
        farthest = max([farthest, *found], key=lambda one: (math.isnan(one), one))
    apart = torch.tensor(farthest)
    dist.all_reduce(apart, dist.ReduceOp.MAX)
    if rank == 0:
        report(options, steps, seconds, float(apart))
    dist.barrier()
    deepspeed_cad.current_session().close()
    dist.destroy_process_group()


def report(
    options: argparse.Namespace, steps: list[list[Layout]], seconds: dict[str, list[tuple[float, float]]], apart: float
) -> None:
    """Print the table, and write it where asked."""
    session = deepspeed_cad.current_session()
    trained, looked = session.statistics, session.forward_only
    total = {name: [median(column) for column in zip(*of)] for name, of in seconds.items()}
    before = total["plain:kept"]
    lines = ["| mode | forwards s | training s | phase s | times: forwards | training | phase |", "|---|" + "---|" * 6]
    for name, own in total.items():
        times = [f"{one / other:.3f}" for one, other in zip([*before, sum(before)], [*own, sum(own)])]
        lines.append(f"| {name} | {own[0]:.3f} | {own[1]:.3f} | {sum(own):.3f} | {' | '.join(times)} |")
    lines += [
        "",
        f"{len(steps)} steps of {options.batch} rollouts a rank dealt out {options.packing}, in "
        f"{', '.join(str(len(one)) for one in steps)} micro-batches; attention max/mean in training "
        f"{trained.imbalance_before:.2f} → {trained.imbalance:.2f}, in forwards alone {looked.imbalance_before:.2f} → "
        f"{looked.imbalance:.2f}; losses and log-probabilities of both modes differ by at most {apart:.1e}",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    if options.output is not None:
        settings = {name: str(value) for name, value in vars(options).items()}
        ranks = dist.get_world_size()
        options.output.write_text(json.dumps({"seconds": seconds, "ranks": ranks, "settings": settings}, indent=1))


if __name__ == "__main__":
    main()
