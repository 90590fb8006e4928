"""CAD on GPUs against every document alone in fp64: `torchrun --nproc-per-node 2 benchmarks/gpu_exactness.py`.

A Llama of two layers in bf16: its outputs and parameter gradients with CAD, for every kernel × transport × overlap, and
for the first kernel also × checkpointing. An error passes where it is at most twice what the same kernel has on whole
documents without CAD. Documents stay on their rank ("rows") or span ranks ("stream").
Prints a table; the exit code is 1 where a line fails. Without GPUs it runs in fp32 on gloo: a dry run.
The mixed transport is checked with `--hosts 0,0,1,1`: the ranks pretend to be on these hosts, and only it is run.
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AttentionInterface, LlamaForCausalLM

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from exchange import machine  # noqa: E402
from process_group import open_process_group  # noqa: E402
from train_attention import local_attention, make_sequences  # noqa: E402
from train_model import make_model  # noqa: E402

import deepspeed_cad  # noqa: E402
from deepspeed_cad.errors import CADUnsupportedError  # noqa: E402
from deepspeed_cad.exchange import probe  # noqa: E402
from deepspeed_cad.kernels.interface import KernelNeed  # noqa: E402
from deepspeed_cad.kernels.registry import KERNELS, choose  # noqa: E402
from deepspeed_cad.session import close_session  # noqa: E402

OVERLAPS = ("interleave", "local_first", "none")
CHECKPOINTING = ("no", "kept", "recomputed")
"""Without activation checkpointing; with it, attention kept; with it, attention run again."""


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    kernel: str
    transport: str
    overlap: str
    documents: str
    checkpointing: str
    waves: str | int = "auto"

    def block(self) -> dict[str, Any]:
        """The "cad" block."""
        return {
            "kernel": self.kernel,
            "transport": self.transport,
            # Rows as short as these would not be worth moving over links as they are.
            "links": {"inside": 1000.0, "between": 1000.0},
            "overlap": self.overlap,
            "recompute_attention": self.checkpointing == "recomputed",
            "waves": self.waves,
            # What a wave costs by itself is known in seconds only, and is more than so little attention takes.
            "cost": "auto" if self.waves == "auto" else "pairs",
            "tolerance": 0.02,
            "granularity": 64,
            "timeout_s": 120.0,
        }


@dataclass(frozen=True, eq=False)
class Documents:
    """One stream of documents; rank r has tokens [r·n, (r+1)·n)."""

    lengths: tuple[int, ...]
    ids: torch.Tensor
    weights: torch.Tensor
    """[tokens, hidden]: the loss is the sum of outputs times these."""

    @staticmethod
    def make(kind: str, ranks: int, tokens: int, hidden: int, vocab: int, device: torch.device) -> Documents:
        """Very uneven rows, or a stream whose first document lies on all ranks but the last."""
        long, short = [tokens], [tokens // 7, 1, tokens // 3, 5, tokens // 11]
        short.append(tokens - sum(short))
        lengths = [n for r in range(ranks) for n in (short if r % 2 else long)]
        if kind == "stream":
            first = (ranks - 1) * tokens + tokens // 2 - 3
            lengths = [first, 2, ranks * tokens - first - 2]
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, vocab, (ranks * tokens,), generator=generator)
        weights = torch.randn(ranks * tokens, hidden, generator=generator)
        return Documents(tuple(lengths), ids.to(device), weights.bfloat16().to(device))

    def positions(self) -> torch.Tensor:
        """[tokens]"""
        return torch.cat([torch.arange(n) for n in self.lengths]).to(self.ids.device)


Results = dict[str, torch.Tensor]


def run(model: LlamaForCausalLM, given: Documents, here: slice, **more: Any) -> Results:
    """Outputs and gradients of one forward and backward over the rows `here`."""
    model.zero_grad()
    inputs = {"input_ids": given.ids[here][None], "position_ids": given.positions()[here][None]}
    output = model.model(**inputs, use_cache=False, **more).last_hidden_state[0]
    (output * given.weights[here].to(output.dtype)).sum().backward()
    found = {name: p.grad.double() for name, p in model.model.named_parameters() if p.grad is not None}
    return {**found, "output": output.detach().double()}


def references(
    model: LlamaForCausalLM, kernel: str, documents: Documents, device: torch.device
) -> tuple[Results, dict[str, float]]:
    """Every document alone in fp64 with transformers' own attention, and the errors of the kernel without CAD."""
    exact = copy.deepcopy(model).double()
    exact.set_attn_implementation("eager")
    ends = np.cumsum(documents.lengths)
    total: Results = {}
    outputs = []
    for end, length in zip(ends, documents.lengths):
        one = run(exact, documents, slice(int(end) - length, int(end)))
        outputs.append(one.pop("output"))
        total = {name: grad + total.get(name, 0) for name, grad in one.items()}
    total["output"] = torch.cat(outputs)
    config = model.config
    size = config.hidden_size // config.num_attention_heads
    share = config.num_attention_heads // config.num_key_value_heads
    chosen = choose(kernel, KernelNeed(device, model.dtype, size, size, share))
    AttentionInterface.register("ordinary_varlen", local_attention(chosen))
    ordinary = copy.deepcopy(model)
    ordinary.set_attn_implementation("ordinary_varlen")
    sequences = make_sequences(documents.lengths, documents.lengths, device)
    found = run(ordinary, documents, slice(0, len(documents.ids)), documents=sequences)
    return total, errors(found, total)


def errors(found: Results, exact: Results) -> dict[str, float]:
    """Relative L2 error of outputs and of each parameter's gradient."""
    return {name: float((found[name] - exact[name]).norm() / exact[name].norm()) for name in exact}


def check(
    case: Case, model: LlamaForCausalLM, documents: Documents, exact: Results, ordinary: dict[str, float]
) -> tuple[bool, str]:
    """Run one case; gives whether it passes and what was found."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tokens = len(documents.ids) // ranks
    ours = copy.deepcopy(model).train()
    if case.checkpointing != "no":
        ours.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        deepspeed_cad.apply(ours, case.block())
    except CADUnsupportedError as error:
        close_session()
        return True, f"refused: {error}"
    session = deepspeed_cad.current_session()
    assert session is not None
    here = slice(rank * tokens, (rank + 1) * tokens)
    for _ in range(2):  # the second time with warm buffers
        found = run(ours, documents, here)
    moved = torch.tensor([session.transport.bytes_sent if session.transport else 0])
    parts = [torch.empty_like(found["output"]) for _ in range(ranks)]
    dist.all_gather(parts, found["output"])
    found["output"] = torch.cat(parts)
    for name in found:
        if name != "output":
            dist.all_reduce(found[name])
    dist.all_reduce(moved)
    close_session()
    ratios = {name: error / ordinary[name] for name, error in errors(found, exact).items()}
    worst = max(ratios, key=lambda name: ratios[name])
    ok = all(ratio <= 2.0 for ratio in ratios.values()) and int(moved) > 0
    text = f"output {ratios['output']:.2f}, worst gradient {ratios[worst]:.2f} ({worst}), {int(moved) >> 10} KiB moved"
    return ok, text


def cases(options: argparse.Namespace, cuda: bool, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """All of one kernel, transport and overlap; the rest for the first kernel, or for all with --all."""
    transports = ["mixed"] if options.hosts else ["nvlink", "nccl"] * cuda + ["c10d"]
    if options.transports:
        transports = options.transports.split(",")
    size = options.hidden // options.heads
    need = KernelNeed(device, dtype, size, size, options.heads // options.kv_heads)
    kernels = [kernel.name for kernel in KERNELS if kernel.refuse(need) is None]
    if options.kernels:
        kernels = options.kernels.split(",")
    for kernel, transport, overlap in product(kernels, transports, OVERLAPS):
        full = options.all or kernel == kernels[0]
        for documents in ("rows", "stream"):
            for checkpointing in CHECKPOINTING if full else CHECKPOINTING[1:2]:
                yield Case(kernel, transport, overlap, documents, checkpointing)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--kernels", help="comma-separated; default all that work here")
    add("--transports", help="comma-separated; default all, with --hosts mixed")
    add("--hosts", help='pretend that the ranks are on these hosts, "0,0,1,1"')
    add("--all", action="store_true", help="checkpointing modes for every kernel")
    add("--tokens", type=int, default=2048 if cuda else 256, help="per rank")
    add("--hidden", type=int, default=1024 if cuda else 64)
    add("--heads", type=int, default=8)
    add("--kv-heads", type=int, default=4)
    add("--output", type=Path, help="Markdown file")
    add("--commit", help="where this is not a git checkout: what the file names as the commit")
    return parser.parse_args(argv)


def main() -> int:
    options = parse()
    warnings.simplefilter("ignore", FutureWarning)
    device = open_process_group()
    cuda = device.type == "cuda"
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if options.hosts:
        host = [int(one) for one in options.hosts.split(",")][rank]
        probe.host_number = lambda: host
    dtype = torch.bfloat16 if cuda else torch.float32
    size = (2, options.hidden, options.heads, options.kv_heads, options.hidden // 2, 512)
    model = make_model(*size, ranks * options.tokens, device, dtype)
    lines = ["| kernel | transport | overlap | documents | checkpointing | | error ÷ ordinary error |"]
    lines.append("|" + "---|" * 7)
    failed = 0
    known: dict[tuple[str, str], tuple[Documents, Results, dict[str, float]]] = {}
    write(rank, lines)
    for case in cases(options, cuda, dtype, device):
        key = (case.kernel, case.documents)
        if key not in known:
            documents = Documents.make(case.documents, ranks, options.tokens, options.hidden, 512, device)
            known[key] = documents, *references(model, case.kernel, documents, device)
        try:
            ok, text = check(case, model, *known[key])
        except Exception as error:  # one line of the table says what happened
            ok, text = False, f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
            close_session()
        verdict = torch.tensor([int(ok)])
        dist.all_reduce(verdict, dist.ReduceOp.MIN)
        failed += not int(verdict)
        names = (case.kernel, case.transport, case.overlap, case.documents, case.checkpointing)
        lines.append(f"| {' | '.join(names)} | {'right' if int(verdict) else 'WRONG'} | {text} |")
        write(rank, lines[-1:])
    lines.append(f"\n{len(lines) - 2} cases, {failed} wrong.")
    write(rank, lines[-1:])
    if rank == 0 and options.output:
        about = ", ".join(f"{key} {value}" for key, value in machine(options.commit).items())
        options.output.write_text("\n".join([f"{ranks} ranks, {about}", "", *lines]) + "\n")
    dist.barrier()
    dist.destroy_process_group()
    return 1 if failed else 0


def write(rank: int, lines: list[str]) -> None:
    """Print on rank 0."""
    if rank == 0:
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
