"""Speed of every attention kernel over shard shapes: TFLOP/s forward and backward.

    python benchmarks/kernels.py --output results.json

A batch holds shards of equal many query rows with random prefixes up to 32K keys, as a plan cuts them; shapes: all
heads (32 query heads, 8 head groups), one received group (4/1, group-major), and one group as a strided view of all.
Counted: 4 · pairs · heads · size forward, 2.5 times that backward. Prints a table, and writes JSON, table and picture;
needs a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from exchange import machine  # noqa: E402
from rows import write  # noqa: E402

from deepspeed_cad.kernels.interface import Kernel, KernelNeed, MaskRule, Sequences  # noqa: E402
from deepspeed_cad.kernels.registry import KERNELS, names  # noqa: E402

HEADS, GROUPS, HEAD_DIM, LONGEST = 32, 8, 128, 32768


def shards(rows: int, total: int, rng: np.random.Generator) -> tuple[Sequences, float]:
    """Sequences of `rows` query rows each, with random prefixes, and the pairs of one head."""
    count = max(1, min(total, 131072) // rows)
    keys = np.full(count, rows) if rows == LONGEST else rng.integers(0, LONGEST - rows, count) // 128 * 128 + rows
    # Few long sequences are enough to fill the GPU: bound the key rows, so that memory stays in reach.
    keep = max(1, int(np.searchsorted(np.cumsum(keys), 1_500_000)))
    keys = keys[:keep]
    host_q = (np.arange(len(keys) + 1) * rows).astype(np.int32)
    host_k = np.concatenate([[0], np.cumsum(keys)]).astype(np.int32)
    cu_q, cu_k = (torch.from_numpy(x).cuda() for x in (host_q, host_k))
    pairs = float((rows * (keys - rows) + rows * (rows + 1) / 2).sum())
    return Sequences(host_q, host_k, cu_q, cu_k, rows, int(keys.max())), pairs


def median_ms(run: Callable[[], object], repeats: int) -> float:
    run()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def measure(kernel: Kernel, shape: str, rows: int, total: int, repeats: int) -> dict[str, object]:
    """One kernel at one shard length."""
    sequences, pairs = shards(rows, total, np.random.default_rng(0))
    q_rows, k_rows = int(sequences.host_q[-1]), int(sequences.host_k[-1])
    heads, groups = (HEADS // GROUPS, 1) if shape == "received group" else (HEADS, GROUPS)
    q, do = (torch.randn(q_rows, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(k_rows, groups, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    if shape == "view of a group":
        q, do, k, v = q[:, 4:8], do[:, 4:8], k[:, 1:2], v[:, 1:2]
    rule = MaskRule(HEAD_DIM**-0.5)
    o, lse = kernel.forward(q, k, v, sequences, rule)
    forward = median_ms(lambda: kernel.forward(q, k, v, sequences, rule), repeats)
    backward = median_ms(lambda: kernel.backward(do, q, k, v, o, lse, sequences, rule), repeats)
    work = 4 * pairs * q.shape[1] * HEAD_DIM / 1e9
    return {
        "kernel": kernel.name,
        "heads": shape,
        "rows": rows,
        "shards": len(sequences.host_q) - 1,
        "forward_ms": forward,
        "backward_ms": backward,
        "forward_TFLOPs": work / forward,
        "backward_TFLOPs": 2.5 * work / backward,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", default=",".join(names()[:-1]), help="comma-separated")
    parser.add_argument("--rows", default="64,128,256,512,1024,4096,32768", help="query rows of a shard")
    parser.add_argument("--shapes", default="all heads,received group,view of a group")
    parser.add_argument("--total", type=int, default=65536, help="query rows of a call")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--commit", help="what to write beside the numbers, where there is no git checkout")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    need = KernelNeed(torch.device("cuda", 0), torch.bfloat16, HEAD_DIM, HEAD_DIM, HEADS // GROUPS)
    found: list[dict[str, object]] = []
    for kernel in KERNELS:
        if kernel.name not in options.kernels.split(","):
            continue
        reason = kernel.refuse(need)
        if reason is not None:
            sys.stdout.write(f"{kernel.name} is left out: {reason}\n")
            continue
        for shape in options.shapes.split(","):
            for rows in map(int, options.rows.split(",")):
                found.append(measure(kernel, shape, rows, options.total, options.repeats))
                row = found[-1]
                sys.stdout.write(
                    f"| {row['kernel']} | {row['heads']} | {rows} | {row['shards']} | "
                    f"{row['forward_TFLOPs']:.0f} | {row['backward_TFLOPs']:.0f} |\n"
                )
                sys.stdout.flush()
    if options.output:
        write({"machine": machine(options.commit), "rows": found}, options.output)


if __name__ == "__main__":
    main()
