"""A training step under FSDP2 with and without CAD: the same models, documents and kernel, interleaved in one run.

    torchrun --nproc-per-node 4 benchmarks/fsdp2_step.py --workload FILE --layers 8

Every decoder layer is a `fully_shard` unit and checkpointed. `plain` attends again in the recompute, `plain:kept` keeps
attention's output as train_kept.py says, and so does `cad`. Prints tokens/s/GPU of each, ratios, and how often
parameters were gathered in a step. The optimizer is left out: it is the same in all.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from exchange import machine  # noqa: E402
from train_attention import local_attention, make_sequences, use_attention  # noqa: E402
from train_kept import KeptOutputs  # noqa: E402
from train_model import ChunkedLoss, add_sizes, make_model  # noqa: E402
from train_workload import Workload  # noqa: E402
from transformers import LlamaForCausalLM  # noqa: E402

import deepspeed_cad  # noqa: E402
from deepspeed_cad.kernels.interface import KernelNeed  # noqa: E402
from deepspeed_cad.kernels.registry import choose  # noqa: E402
from deepspeed_cad.session import find_binding  # noqa: E402


class Gathers:
    """Counts the all-gathers of parameters."""

    def __init__(self) -> None:
        from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups

        self.count = 0
        gather = groups.foreach_all_gather

        def counted(*args: object, **kwargs: object) -> object:
            self.count += 1
            return gather(*args, **kwargs)

        groups.foreach_all_gather = counted


class WithLoss(torch.nn.Module):
    """A Llama whose forward gives the loss, so that the head is used inside its FSDP2 unit."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, targets: torch.Tensor, scale: float, **inputs: object) -> torch.Tensor:
        """`scale` × the sum of the cross entropy over targets other than −100."""
        hidden = self.model.model(**inputs).last_hidden_state[0]
        return ChunkedLoss.apply(hidden, self.model.lm_head.weight, targets, scale)


def shard(model: LlamaForCausalLM, dtype: torch.dtype, kind: type[WithLoss] = WithLoss) -> WithLoss:
    """Each layer, and the rest, as one FSDP2 unit; layers checkpointed."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    whole = kind(model)
    fully_shard(whole, mp_policy=policy)
    return whole.train()


def landing_bytes() -> int:
    """Device memory of CAD's landing areas, which lie outside of torch's allocator."""
    session = deepspeed_cad.current_session()
    return 0 if session is None or session.transport is None else session.transport.landing_bytes


def report(
    options: argparse.Namespace,
    workload: Workload,
    seconds: dict[str, list[list[float]]],
    losses: dict[str, list[float]],
    counts: dict[str, int],
    peaks: dict[str, float],
    kernel: str,
) -> None:
    """Print the figures, and write them where asked."""
    total = {name: sum(median(one) for one in steps) for name, steps in seconds.items()}
    tokens = workload.tokens_per_rank * len(workload.steps)
    found = {
        "workload": workload.name,
        "tokens_per_s_per_gpu": {name: tokens / one for name, one in total.items()},
        "cad_over_plain": total["plain"] / total["cad"],
        "cad_over_plain_kept": total["plain:kept"] / total["cad"],
        "gathers_per_step": counts,
        "losses": losses,
        "peak_GiB": peaks,
        "step_seconds": {name: [median(one) for one in steps] for name, steps in seconds.items()},
        "settings": {
            name: getattr(options, name)
            for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "tokens_per_rank", "cad")
        }
        | {"steps": len(workload.steps)},
        "kernel": kernel,
        "machine": {
            **machine(options.commit),
            "ranks": dist.get_world_size(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        },
    }
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=1))


def main() -> None:
    """Run all modes over the workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--workload", type=Path, required=True)
    add_sizes(parser)
    add("--steps", type=int, default=4)
    add("--tokens-per-rank", type=int)
    add("--repeats", type=int, default=1)
    add("--cad", type=json.loads, default={})
    add("--output", type=Path)
    add("--commit", help="where this is not a git checkout: what results name as the commit")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dtype = torch.bfloat16 if cuda else torch.float32
    workload = Workload.load(options.workload).fit(ranks, options.tokens_per_rank, False, options.steps)
    sizes = (options.layers, options.hidden, options.heads, options.kv_heads, options.ffn, options.vocab)
    size = options.hidden // options.heads
    kernel = choose("auto", KernelNeed(device, dtype, size, size, options.heads // options.kv_heads))
    plain, kept, balanced = (make_model(*sizes, workload.row_tokens, device, dtype) for _ in range(3))
    use_attention(plain, "benchmark_plain", local_attention(kernel))
    use_attention(kept, "benchmark_kept", local_attention(kernel, KeptOutputs()))
    deepspeed_cad.apply(balanced, options.cad)
    models = {name: shard(model, dtype) for name, model in (("plain", plain), ("plain:kept", kept), ("cad", balanced))}
    feed = find_binding(balanced).feed
    gathers = Gathers()
    seconds: dict[str, list[list[float]]] = {name: [[] for _ in workload.steps] for name in models}
    losses: dict[str, list[float]] = {name: [] for name in models}
    counts: dict[str, int] = {}
    peaks: dict[str, float] = {}
    for repeat in range(options.repeats + 1):
        for step in range(len(workload.steps)):
            row = workload.make_rows(step, options.vocab)[rank]
            inputs = {"input_ids": row.tokens[None].to(device), "position_ids": row.positions[None].to(device)}
            targets = row.targets.to(device)
            for name, model in models.items():
                more = {}
                if name == "cad":
                    feed.announce(feed.read({"input_ids": row.tokens[None], "position_ids": row.positions[None]}))
                else:
                    more["documents"] = make_sequences(row.lengths, row.lengths, device)
                dist.barrier()
                if cuda:
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
                before, begun = gathers.count, time.perf_counter()
                loss = model(**inputs, **more, use_cache=False, targets=targets, scale=1.0 / workload.targets(step))
                loss.backward()
                if cuda:
                    torch.cuda.synchronize()
                slowest = torch.tensor(time.perf_counter() - begun)
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                model.zero_grad(set_to_none=True)
                total = loss.detach().clone()
                dist.all_reduce(total)
                if repeat:
                    seconds[name][step].append(float(slowest))
                else:
                    losses[name].append(float(total))
                counts[name] = gathers.count - before
                if cuda:
                    # All models are there at once: the others' parameters and shards are not part of it.
                    held = torch.cuda.max_memory_allocated() + (landing_bytes() if name == "cad" else 0)
                    others = [p for other in models.values() if other is not model for p in other.parameters()]
                    held -= sum(p.to_local().numel() * p.element_size() for p in others)
                    peak = torch.tensor(float(held) / 2**30)
                    dist.all_reduce(peak, dist.ReduceOp.MAX)
                    peaks[name] = max(peaks.get(name, 0.0), float(peak))
    if rank == 0:
        report(options, workload, seconds, losses, counts, peaks, kernel.name)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
