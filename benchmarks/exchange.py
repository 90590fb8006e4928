"""What an exchange costs: GB/s per transport, and how much a matrix product beside it slows down.

    torchrun --nproc-per-node 4 benchmarks/exchange.py --output results.json

Every rank sends its Q, K and V of equal shares of the head groups to every other rank, as strided slices. Times are
medians over repeats, of the slowest rank; bytes are those that leave one rank. Prints a table, and writes JSON, table
and picture; needs GPUs. On one host the mixed transport needs `--hosts 0,0,1,1`: for it the ranks pretend to be on
these hosts.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from rows import table, write  # noqa: E402

from deepspeed_cad.errors import CADUnsupportedError  # noqa: E402
from deepspeed_cad.exchange.probe import NAMES, choose_transport  # noqa: E402
from deepspeed_cad.exchange.transport import Dispatched, Outgoing, Returning, Transport  # noqa: E402
from deepspeed_cad.layout import Layout  # noqa: E402
from deepspeed_cad.schedule import KEY, QUERY, Schedule, build_slices, schedule_rank  # noqa: E402

HEADS_PER_GROUP, HEAD_DIM, GROUPS = 4, 128, 8
CYCLES_PER_US = 2000


def share_groups(ranks: int, rank: int, tokens: int, slices_per_group: int) -> Schedule:
    """One document a rank; server s runs the s-th share of everybody's head groups, in `slices_per_group` tasks."""
    tick = Layout.from_rank_lengths([[tokens]] * ranks).tick()
    edges = np.linspace(0, tokens, slices_per_group + 1).astype(np.int64)
    share = np.linspace(0, GROUPS, ranks + 1).astype(np.int64)
    tasks = [
        (document, low, high, share[server], share[server + 1], server)
        for document in range(ranks)
        for low, high in zip(edges[:-1], edges[1:])
        for server in range(ranks)
        if share[server] < share[server + 1]
    ]
    return schedule_rank(tick, build_slices(tick, np.array(tasks, np.int64)), rank, GROUPS)


def median_ms(
    run: Callable[[], None], repeats: int, queue_us: float = 1000.0, after: Callable[[], None] = lambda: None
) -> float:
    """Milliseconds of one call on the GPU, slowest rank. `after` is queued behind what is timed.

    All GPUs meet and then sleep for longer than the host needs to queue the call (`queue_us`), so that neither the
    host's time nor its jitter is measured.
    """
    times, meet = [], torch.zeros(1, device="cuda")
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        dist.all_reduce(meet)
        torch.cuda._sleep(int(queue_us * 2 * CYCLES_PER_US))
        begin.record()
        run()
        end.record()
        after()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    slowest = torch.tensor(sorted(times)[len(times) // 2], device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def host_us(run: Callable[[], None], repeats: int) -> float:
    """Microseconds that the host spends on one call."""
    times = []
    for _ in range(repeats):
        torch.cuda._sleep(2000 * CYCLES_PER_US)
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
        torch.cuda.synchronize()
    return sorted(times)[len(times) // 2] * 1e6


def measure(
    transport: Transport, schedule: Schedule, tokens: int, repeats: int, zeros: bool = False
) -> dict[str, float]:
    """One transport at one size."""
    device = torch.device("cuda", torch.cuda.current_device())
    q = torch.randn(tokens, GROUPS, HEADS_PER_GROUP * HEAD_DIM, device=device).bfloat16()
    k, v = (torch.randn(tokens, GROUPS, HEAD_DIM, device=device).bfloat16() for _ in range(2))
    o = torch.zeros_like(q)
    out_fields = [Outgoing(QUERY, q), Outgoing(KEY, k), Outgoing(KEY, v)]
    served = transport.dispatch(schedule, out_fields, 0).wait()[0].clone()
    back_fields = [Returning(QUERY, served, o)]
    tiny = share_groups(schedule.ranks, schedule.rank, 1, 1)

    def there() -> None:
        transport.dispatch(schedule, out_fields, 0).wait()

    def tiny_there() -> None:
        transport.dispatch(tiny, out_fields, 0).wait()

    def tiny_and_back() -> None:
        tiny_there()
        transport.give_back(schedule, back_fields, 0).wait()

    for run in (there, tiny_and_back, there, tiny_and_back):
        run()
    begun = transport.bytes_sent
    there()
    size = transport.bytes_sent - begun
    found = {"MiB": size / 2**20, "host_us": host_us(there, repeats), "dispatch_ms": median_ms(there, repeats)}
    found["return_ms"] = median_ms(tiny_and_back, repeats) - median_ms(tiny_there, repeats)
    found["dispatch_GBps"] = size / found["dispatch_ms"] / 1e6
    if size < 8 << 20:
        return found

    # Matrix products of a linear layer (8,192 tokens), alone and beside exchanges that follow each other as long as
    # they run.
    a, b = torch.randn(8192, 4096, device=device).bfloat16(), torch.randn(4096, 14336, device=device).bfloat16()
    if zeros:
        a, b = torch.zeros_like(a), torch.zeros_like(b)
    one_ms = median_ms(lambda: torch.mm(a, b), repeats)
    chain = max(3, int(4 * one_ms / found["dispatch_ms"]))
    count = max(2, int(found["dispatch_ms"] * chain * 0.95 / one_ms))
    queue_us = (chain + 1) * found["host_us"] + 20 * count
    under_way: list[Dispatched] = []

    def product() -> None:
        for _ in range(count):
            torch.mm(a, b)

    def beside() -> None:
        under_way.extend(transport.dispatch(schedule, out_fields, 0) for _ in range(chain))
        product()

    def finish() -> None:
        while under_way:
            under_way.pop(0).wait()

    product()
    found["product_ms"] = median_ms(product, repeats, queue_us)
    found["product_beside_ms"] = median_ms(beside, repeats, queue_us, finish)
    found["slower_percent"] = 100 * (found["product_beside_ms"] / found["product_ms"] - 1)
    return found


def machine(commit: str | None) -> dict[str, str]:
    """What the numbers belong to; `commit` where the checkout does not say it."""
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "commit": commit or asked.stdout.strip() or "unknown",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", default=",".join(NAMES), help="comma-separated")
    parser.add_argument("--hosts", help="the host of every rank for the mixed transport, comma-separated")
    parser.add_argument("--tokens", default="64,2048,16384,32768", help="rows of one rank, comma-separated")
    parser.add_argument("--slices", type=int, default=4, help="slices per head group")
    parser.add_argument("--zeros", action="store_true", help="multiply zeros, which takes less power")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--commit", help="what to write beside the numbers, where there is no git checkout")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    hosts = [int(one) for one in options.hosts.split(",")] if options.hosts else None
    rows = []
    for name in options.transports.split(","):
        try:
            host = hosts[rank] if hosts is not None and name == "mixed" else None
            transport = choose_transport(name, dist.group.WORLD, device, host=host)
        except CADUnsupportedError as error:
            rows.append({"transport": name, "refused": str(error)})
            continue
        for tokens in map(int, options.tokens.split(",")):
            schedule = share_groups(ranks, rank, tokens, options.slices)
            found = measure(transport, schedule, tokens, options.repeats, options.zeros)
            rows.append({"transport": name, "tokens": tokens, "slices": len(schedule.sends), **found})
        dist.barrier()
        transport.close()
    if rank == 0:
        sys.stdout.write(table(rows))
        if options.output:
            write({"machine": {**machine(options.commit), "ranks": ranks}, "rows": rows}, options.output)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
