"""The recurrent kernel of a delta net on fewer heads of more tokens, as ranks run a document that they share.

    python benchmarks/state_heads.py --tokens 32768 --ranks 1,2,4,8

With n ranks each runs heads / n of all n × tokens: as many operations, but the chunks of a document follow one another,
so fewer can run at a time. Handed from rank to rank instead, the state of one document makes ranks wait for each other:
n times the first line. The kernel is the one that transformers calls: of flash-linear-attention where that is
installed, which needs a GPU, else its own in torch. Sizes are those of Qwen3-Next and Qwen3.5. Prints a table.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from transformers.models.qwen3_5 import modeling_qwen3_5 as home

HEADS, KEY_HEADS = 32, 16
"""Of values, and of queries and keys."""


def seconds(
    tokens: int, ranks: int, size: int, device: torch.device, repeats: int, trains: bool
) -> tuple[float, float]:
    """Of a forward and of a backward on one rank's share of the heads; medians. The second is 0 without backward."""

    def tensor(heads: int, *more: int) -> torch.Tensor:
        return torch.randn(1, tokens, heads // ranks, *more, device=device, dtype=dtype)

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    query, key, value = tensor(KEY_HEADS, size), tensor(KEY_HEADS, size), tensor(HEADS, size)
    repeated = [one.repeat_interleave(HEADS // KEY_HEADS, dim=2).requires_grad_() for one in (query, key)]
    decay, beta = -torch.rand_like(value[..., 0].float()), tensor(HEADS).sigmoid().requires_grad_()
    gradient = torch.randn_like(value)
    inputs = [*repeated, value.requires_grad_(), decay.requires_grad_(), beta]
    forward, backward = [], []
    for _ in range(repeats + 1):
        begin = _now(device)
        found = home.torch_chunk_gated_delta_rule(
            *inputs[:3], g=decay, beta=beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=True
        )
        middle = _now(device)
        if trains:
            torch.autograd.grad(found[0], inputs, gradient)
        forward.append(middle - begin)
        backward.append(_now(device) - middle)
    return median(forward[1:]), median(backward[1:])


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768, help="of each rank")
    parser.add_argument("--ranks", default="1,2,4,8")
    parser.add_argument("--size", type=int, default=128, help="of a head")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--forward", action="store_true", help="without backward, which some kernels refuse")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print("| ranks | tokens | value heads | forward ms | backward ms | ÷ one rank |\n|---|---|---|---|---|---|")
    first = 0.0
    for ranks in map(int, options.ranks.split(",")):
        tokens = options.tokens * ranks
        forward, backward = seconds(tokens, ranks, options.size, device, options.repeats, not options.forward)
        first = first or forward + backward
        ratio = (forward + backward) / first
        print(
            f"| {ranks} | {tokens} | {HEADS // ranks} | {forward * 1e3:.1f} | {backward * 1e3:.1f} | {ratio:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
