"""A training step on documents that are not packed to one length: dealt out by CAD, and what trainers do themselves.

    torchrun --nproc-per-node 2 benchmarks/dealt_steps.py chat --documents 4 --longest 32768 [--padded] [--layers 4]
    torchrun --nproc-per-node 2 benchmarks/dealt_steps.py chat --documents 4 --divide 64 --layers 2 --hidden 64 \\
        --heads 8 --kv-heads 4 --ffn 96 --vocab 128 --steps 4          # CPU processes, to see that it runs

LENGTHS: as `deepspeed-cad plan` takes it. Each rank reads so many documents a micro-batch, laid end to end
(`padding_free`), or padded to the longest of the micro-batch, one micro-batch a step. Every mode trains all documents
once, one mode after the other, then all again:

    plain:kept     each rank attends its own documents, attention kept through checkpointing; of padded batches the
                   padding is left out of attention
    grouped:kept   the same, by the Trainer's group_by_length: stretches of 50 micro-batches are sorted by length
    cad            `"documents": "keep"`
    dealt          `"documents": "deal"`

All share weights, kernel, loss, checkpointing and the optimizer of train_model.py at a learning rate of 0, so the loss
of all documents together is the same; it is compared. Two steps of each mode warm up. Printed are tokens that are no
padding, by GPU and second.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from exchange import machine  # noqa: E402
from process_group import open_process_group  # noqa: E402
from steps import group  # noqa: E402
from train_attention import VarlenAttention, make_sequences, use_attention  # noqa: E402
from train_kept import KeptOutputs  # noqa: E402
from train_model import ChunkedLoss, ShardedAdamW, add_sizes, make_model, share_parameters  # noqa: E402

import deepspeed_cad  # noqa: E402
from deepspeed_cad.cli.data.documents import read_lengths  # noqa: E402
from deepspeed_cad.kernels.interface import Kernel, KernelNeed, MaskRule  # noqa: E402
from deepspeed_cad.kernels.registry import choose  # noqa: E402
from deepspeed_cad.session import close_session  # noqa: E402

MODES = ("plain:kept", "grouped:kept", "cad", "dealt")
WARMUP = 2
"""Steps of each mode that are not timed."""

Batch = dict[str, torch.Tensor]


def unpadded_attention(kernel: Kernel, outputs: KeptOutputs) -> Any:
    """Attention of the rows that are no padding; `documents`: their sequences, and which rows they are."""

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
        documents: Any = None, **_: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        sequences, rows = documents
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        kept = outputs.of(module) if torch.is_grad_enabled() else None
        given = (x.flatten(0, 1) for x in (q, k, v))
        if rows is None:
            return VarlenAttention.apply(*given, kernel, sequences, rule(query), None, kept).view_as(q), None
        own = VarlenAttention.apply(*(x[rows] for x in given), kernel, sequences, rule(query), None, kept)
        return own.new_zeros(q.shape).flatten(0, 1).index_copy(0, rows, own).view_as(q), None

    def rule(query: torch.Tensor) -> MaskRule:
        return MaskRule(query.shape[-1] ** -0.5)

    return attend


def make_batch(documents: list[tuple[int, int]], padded: bool, vocab: int) -> Batch:
    """A micro-batch of documents, each a length and a number, from which its tokens follow."""
    ids = [
        torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(number))
        for length, number in documents
    ]
    labels = [torch.cat([one.new_full((1,), -100), one[1:]]) for one in ids]
    if not padded:
        positions = torch.cat([torch.arange(len(one)) for one in ids])
        return {"input_ids": torch.cat(ids)[None], "position_ids": positions[None], "labels": torch.cat(labels)[None]}

    def pad(rows: list[torch.Tensor], value: int) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)

    mask = pad([torch.ones_like(one) for one in ids], 0)
    return {"input_ids": pad(ids, 0), "attention_mask": mask, "labels": pad(labels, -100)}


class Trainer:
    """The shared weights and their optimizer; runs batches through one mode's model."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self.device = device
        self.optimizer = ShardedAdamW(list(model.parameters()), 0.0)

    def step(self, model: Any, batch: Batch, plain: bool) -> torch.Tensor:
        """One step: the sum of the loss over this rank's targets."""
        given = {name: value.to(self.device) for name, value in batch.items()}
        labels = given.pop("labels")
        mask = batch.get("attention_mask")
        if plain:
            if mask is None:
                starts = torch.nonzero(batch["position_ids"][0] == 0)[:, 0].tolist()
                lengths = [end - begin for begin, end in zip(starts, [*starts[1:], labels.shape[1]])]
            else:
                lengths = mask.sum(1).tolist()
                given.pop("attention_mask")
            rows = None if mask is None else torch.nonzero(mask.flatten())[:, 0].to(self.device)
            given["documents"] = (make_sequences(lengths, lengths, self.device), rows)
        targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100).flatten()
        self.optimizer.zero_grad()
        hidden = model.model(**given, use_cache=False).last_hidden_state.flatten(0, 1)
        loss = ChunkedLoss.apply(hidden, model.lm_head.weight, targets, 1.0)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def run(self, model: Any, batches: Iterable[Batch], plain: bool) -> tuple[float, float]:
        """Seconds of all steps but those that warm up, and the loss of their documents over all ranks."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        begun = 0.0
        for number, batch in enumerate(batches):
            if number == WARMUP:
                begun = self._now()
            loss = self.step(model, batch, plain)
            if number >= WARMUP:
                total += loss
        seconds = self._now() - begun
        dist.all_reduce(total)
        return seconds, float(total)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        return time.perf_counter()


def own_batches(options: argparse.Namespace, lengths: list[int], grouped: bool) -> list[Batch]:
    """This rank's micro-batches of all steps, behind those that warm up: the first ones once more."""
    rank, ranks, size = dist.get_rank(), dist.get_world_size(), options.documents
    numbered = [(length, number) for number, length in enumerate(lengths)]
    found = group(numbered, size) if grouped else [numbered[at : at + size] for at in range(0, len(numbered), size)]
    made = [make_batch(documents, options.padded, options.vocab) for documents in found[rank::ranks]]
    return [*made[:WARMUP], *made]


def modes(
    options: argparse.Namespace, model: Any, kernel: Kernel, lengths: list[int]
) -> Iterator[tuple[str, Any, Iterable[Batch]]]:
    """Each mode with its model and the micro-batches of this rank."""
    for name in MODES:
        copy = share_parameters(model)
        batches: Iterable[Batch] = own_batches(options, lengths, name.startswith("grouped"))
        if name.endswith(":kept"):
            use_attention(copy, "benchmark_kept", unpadded_attention(kernel, KeptOutputs()))
            yield name, copy, batches
        else:
            documents = "deal" if name == "dealt" else "keep"
            deepspeed_cad.apply(copy, {"documents": documents, **options.cad})
            yield name, copy, deepspeed_cad.current_session().look_ahead(batches, copy, accumulation=1)
            close_session()


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("lengths", metavar="LENGTHS", help="a distribution by name, or a file of lengths")
    add("--documents", type=int, default=4, help="of a micro-batch (default: 4)")
    add("--padded", action="store_true")
    add("--longest", type=int, default=32768, help="tokens at which documents are cut off (default: 32768)")
    add("--divide", type=int, default=1, help="lengths by this, for a dry run (default: 1)")
    add("--steps", type=int, default=25, help="25 of 2 ranks are a whole stretch of 50 micro-batches (default: 25)")
    add("--repeats", type=int, default=2, help="of all modes; the fastest of each counts (default: 2)")
    add_sizes(parser)
    add("--cad", type=json.loads, default={}, help='keys of the "cad" block')
    add("--commit", help="where this is not a git checkout: what results name as the commit")
    add("--output", type=Path, help="JSON file")
    return parser.parse_args()


def main() -> None:
    """Run all modes, print a table."""
    options = parse()
    device = open_process_group()
    ranks, cuda = dist.get_world_size(), device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    count = options.steps * ranks * options.documents
    drawn = read_lengths([options.lengths], count * options.longest, None, None, count, [], lambda text: None)
    lengths = [max(2, min(one, options.longest) // options.divide) for one in drawn[:count]]
    sizes = (options.layers, options.hidden, options.heads, options.kv_heads, options.ffn, options.vocab)
    size = options.hidden // options.heads
    kernel = choose("auto", KernelNeed(device, dtype, size, size, options.heads // options.kv_heads))
    model = make_model(*sizes, options.longest, device, dtype)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    trainer = Trainer(model, device)
    seconds: dict[str, list[float]] = {name: [] for name in MODES}
    losses: dict[str, float] = {}
    peaks: dict[str, float] = {}
    for repeat in range(options.repeats):
        for name, own, batches in modes(options, model, kernel, lengths):
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            taken, losses[name] = trainer.run(own, batches, name.endswith(":kept"))
            seconds[name].append(taken)
            peak = torch.tensor(torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0)
            dist.all_reduce(peak, dist.ReduceOp.MAX)
            peaks[name] = float(peak)
            if dist.get_rank() == 0:
                sys.stderr.write(f"pass {repeat}, {name}: {taken:.3f} s, loss {losses[name]:.4f}\n")
    if dist.get_rank() == 0:
        report(options, lengths, seconds, losses, peaks, kernel.name)
    dist.barrier()
    dist.destroy_process_group()


def report(
    options: argparse.Namespace, lengths: list[int], seconds: dict[str, list[float]], losses: dict[str, float],
    peaks: dict[str, float], kernel: str,
) -> None:  # fmt: skip
    """Print the table, and write the figures where asked."""
    ranks, tokens = dist.get_world_size(), sum(lengths)
    best = {name: min(of) for name, of in seconds.items()}
    apart = max(abs(one / losses["plain:kept"] - 1) for one in losses.values())
    lines = ["| mode | tokens/s/GPU | ÷ plain | ÷ grouped | ÷ CAD kept | passes s | peak GiB |", "|---|" + "---|" * 6]
    for name, own in best.items():
        over = " | ".join(f"{best[other] / own:.3f}" for other in MODES[:3])
        passes = ", ".join(f"{one:.2f}" for one in seconds[name])
        lines.append(f"| {name} | {tokens / own / ranks:.0f} | {over} | {passes} | {peaks[name]:.1f} |")
    lines += [
        "",
        f"{options.lengths}, {options.documents} documents a rank{', padded' if options.padded else ''}, cut off at "
        f"{options.longest}, {options.steps} steps of {ranks} ranks, {tokens} tokens, {options.layers} layers, "
        f"{kernel}; losses are at most {apart:.1e} apart",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    if options.output is not None:
        found = {
            "seconds": seconds, "losses": losses, "peak_GiB": peaks, "tokens": tokens, "kernel": kernel,
            "settings": {name: str(value) for name, value in vars(options).items()},
            "machine": {**machine(options.commit), "ranks": ranks},
        }  # fmt: skip
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
