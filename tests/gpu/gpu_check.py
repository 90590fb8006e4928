"""Kernels and transports on GPUs, in one go: `torchrun --nproc-per-node 2 tests/gpu/gpu_check.py [--output FILE]`.

Every kernel that works here against plain torch in fp64, and every transport against rows moved by index, over random
plans on two interleaved slots with growing buffers. For the `mixed` transport the ranks pretend to be on two hosts,
or on those of `--hosts 0,0,1,1`. Prints one table; the exit code is 0 where every line is right.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from cases import random_tasks  # noqa: E402

from deepspeed_cad.errors import CADPeerError  # noqa: E402
from deepspeed_cad.exchange.probe import NAMES, choose_transport  # noqa: E402
from deepspeed_cad.exchange.transport import Outgoing, Returning, Transport  # noqa: E402
from deepspeed_cad.kernels.interface import Kernel, KernelNeed, MaskRule, Sequences  # noqa: E402
from deepspeed_cad.kernels.registry import KERNELS  # noqa: E402
from deepspeed_cad.kernels.torch_math import TorchMath  # noqa: E402
from deepspeed_cad.layout import Layout  # noqa: E402
from deepspeed_cad.schedule import KEY, KIND, QUERY, ROWS, SERVER, Schedule, build_slices, schedule_rank  # noqa: E402

Line = dict[str, object]
GROUPS = 4
LENGTHS = ((1, 1), (200, 900), (64, 64), (333, 333), (128, 1500), (7, 1031))
"""Query and key rows of the sequences that kernels are checked on."""
SHAPES = {
    "32/8 × 128": {"heads": 32, "groups": 8, "head": 128, "value": 128},
    "4/1 × 128": {"heads": 4, "groups": 1, "head": 128, "value": 128},
    "view 4/1 of 32/8 × 128": {"heads": 32, "groups": 8, "head": 128, "value": 128, "view": True},
    "6/2 × 64, window 100": {"heads": 6, "groups": 2, "head": 64, "value": 64, "window": 100},
    "8/8 × 96": {"heads": 8, "groups": 8, "head": 96, "value": 96},
    "16/1 × 256": {"heads": 16, "groups": 1, "head": 256, "value": 256},
    "4/2 × 128, soft-cap": {"heads": 4, "groups": 2, "head": 128, "value": 128, "softcap": 20.0},
    "4/4 × 192, values 128": {"heads": 4, "groups": 4, "head": 192, "value": 128},
}


def check_kernel(kernel: Kernel, shape: dict, device: torch.device) -> tuple[bool, str]:
    """O, LSE and gradients in bf16 against fp64 on the same inputs; twice, to see whether they are the same bits."""
    need = KernelNeed(
        device, torch.bfloat16, shape["head"], shape["value"], shape["heads"] // shape["groups"],
        "window" in shape, "softcap" in shape, torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    reason = kernel.refuse(need)
    if reason is not None:
        return True, f"refused: {reason}"
    torch.manual_seed(0)
    host_q, host_k = (np.cumsum([0, *(pair[i] for pair in LENGTHS)]).astype(np.int32) for i in (0, 1))
    cu_q, cu_k = (torch.from_numpy(x).to(device) for x in (host_q, host_k))
    sequences = Sequences(host_q, host_k, cu_q, cu_k, 333, 1500)
    q, k, v, do = (
        torch.randn(int(rows), heads, size, device=device).bfloat16()
        for rows, heads, size in (
            (host_q[-1], shape["heads"], shape["head"]),
            (host_k[-1], shape["groups"], shape["head"]),
            (host_k[-1], shape["groups"], shape["value"]),
            (host_q[-1], shape["heads"], shape["value"]),
        )
    )
    if shape.get("view"):
        q, k, v, do = q[:, 8:12], k[:, 2:3], v[:, 2:3], do[:, 8:12]
    rule = MaskRule(shape["head"] ** -0.5, shape.get("window"), shape.get("softcap"))

    def run() -> list[torch.Tensor]:
        o, lse = kernel.forward(q, k, v, sequences, rule)
        return [o, lse, *kernel.backward(do, q, k, v, o, lse, sequences, rule)]

    found, again = run(), run()
    same = all(torch.equal(one, other) for one, other in zip(found, again))
    math, wide = TorchMath(), [x.double() for x in (q, k, v, do)]
    o, lse = math.forward(*wide[:3], sequences, rule)
    expected = [o, lse, *math.backward(wide[3], *wide[:3], o, lse, sequences, rule)]
    errors = [float((one.double() - other).norm() / other.norm()) for one, other in zip(found, expected)]
    # bf16 has 8 bits: rounding the exact result alone gives a relative error of about 0.0017.
    ok = max(errors) < 0.012 and errors[1] < 1e-3
    if torch.are_deterministic_algorithms_enabled():
        ok = ok and same
    named = ", ".join(f"{n} {e:.4f}" for n, e in zip(("O", "LSE", "dQ", "dK", "dV"), errors))
    return ok, f"{named}{'' if same else '; bits differ between runs'}"


def kernel_lines(rank: int, ranks: int, device: torch.device) -> Iterator[Line]:
    """Shapes are shared out over the ranks; rank 0 also checks determinism."""
    for kernel in KERNELS[:-1]:
        for i, (label, shape) in enumerate(SHAPES.items()):
            if i % ranks == rank:
                yield report(f"kernel {kernel.name}", label, lambda k=kernel, s=shape: check_kernel(k, s, device))
    if rank == ranks - 1:
        torch.use_deterministic_algorithms(True)
        for kernel in KERNELS[:-1]:
            case, shape = "deterministic", SHAPES["4/1 × 128"]
            yield report(f"kernel {kernel.name}", case, lambda k=kernel, s=shape: check_kernel(k, s, device))
        torch.use_deterministic_algorithms(False)


def make_schedules(ranks: int, seed: int, longest: int) -> list[Schedule]:
    """A random plan for all ranks."""
    rng = np.random.default_rng(seed)
    lengths = [[int(n) for n in rng.integers(1, longest, rng.integers(1, 5))] for _ in range(ranks)]
    tick = Layout.from_rank_lengths(lengths).tick()
    tasks = random_tasks(tick, GROUPS, rng, granularity=64)
    if seed % 5 == 0:
        tasks[:, 5] = seed % ranks  # everything on one rank: others serve nothing
    slices = build_slices(tick, tasks)
    return [schedule_rank(tick, slices, rank, GROUPS) for rank in range(ranks)]


def home_tensor(schedule: Schedule, kind: int, width: int, dtype: torch.dtype, seed: int, device: torch.device):
    """Equal on every rank that makes it, and strided: groups have a gap between them."""
    rows = schedule.query_tokens if kind == QUERY else schedule.key_tokens
    generator = torch.Generator(device).manual_seed(seed * 1000 + schedule.rank * 10 + kind)
    return torch.randn(rows, GROUPS, width + 8, generator=generator, device=device).to(dtype)[..., :width]


class Round:
    """One dispatch and return with known answers."""

    FIELDS = ((QUERY, 256, torch.bfloat16), (KEY, 64, torch.bfloat16), (KEY, 32, torch.bfloat16))

    def __init__(self, schedules: list[Schedule], rank: int, seed: int, slot: int, device: torch.device) -> None:
        self.schedules, self.rank, self.seed, self.slot, self.device = schedules, rank, seed, slot, device
        self.own = schedules[rank]
        self.homes = [[home_tensor(s, *field, seed, device) for field in self.FIELDS] for s in schedules]

    def start(self, transport: Transport) -> None:
        fields = [Outgoing(kind, home) for (kind, _, _), home in zip(self.FIELDS, self.homes[self.rank])]
        self.out = transport.dispatch(self.own, fields, self.slot)

    def serve(self, transport: Transport) -> None:
        """Check what arrived; what goes back is what arrived times a number of this rank."""
        arrived = self.out.wait()
        self.wrong = []
        for f, (kind, _width, _dtype) in enumerate(self.FIELDS):
            expected = torch.empty_like(arrived[f])
            for s in self.schedules:
                for table in (s.own,) if s.rank == self.rank else (s.sends[s.sends[:, SERVER] == self.rank],):
                    index = torch.from_numpy(s.home_index(table, kind)).to(self.device)
                    rows = torch.from_numpy(s.server_index(table, kind)).to(self.device)
                    expected[rows] = self.homes[s.rank][f][index // GROUPS, index % GROUPS]
            self.wrong.append((arrived[f] != expected).sum())
        given = [(x.float() * self.factor(self.rank)).to(x.dtype) for x in arrived]
        self.given = given
        self.target = [torch.full_like(home, 0.5) for home in self.homes[self.rank]]
        back = [
            Returning(kind, x, home, add=kind == KEY) for (kind, _, _), x, home in zip(self.FIELDS, given, self.target)
        ]
        lse = torch.zeros(self.homes[self.rank][0].shape[:2], device=self.device).unsqueeze(2)
        served = int(self.own.served_rows[self.rank, QUERY])
        self.lse, self.lse_target = torch.full((served, 1), float(self.rank + 1), device=self.device), lse
        self.back = transport.give_back(self.own, [*back, Returning(QUERY, self.lse, lse)], self.slot)

    def collect(self) -> None:
        self.back.wait()
        for f, (kind, _width, _dtype) in enumerate(self.FIELDS):
            home = self.homes[self.rank][f]
            expected = torch.full(home.shape, 0.5, device=self.device, dtype=torch.float64)
            for table in (self.own.sends, self.own.own):
                index = torch.from_numpy(self.own.home_index(table, kind)).to(self.device)
                chosen = table[table[:, KIND] == kind]
                server = torch.from_numpy(np.repeat(chosen[:, SERVER], chosen[:, ROWS])).to(self.device)
                factor = torch.tensor([self.factor(r) for r in range(len(self.schedules))], device=self.device)[server]
                rows = home[index // GROUPS, index % GROUPS].float() * factor.unsqueeze(1)
                rows = rows.to(home.dtype).double()
                if kind == QUERY:
                    expected[index // GROUPS, index % GROUPS] = rows
                else:
                    expected.index_put_((index // GROUPS, index % GROUPS), rows, accumulate=True)
            tolerance = 2**-8 * expected.abs() + 1e-6 if kind == KEY else 0
            self.wrong.append(((self.target[f].double() - expected).abs() > tolerance).sum())
        expected = torch.zeros(self.lse_target.shape, device=self.device)
        for table in (self.own.sends, self.own.own):
            index = torch.from_numpy(self.own.home_index(table, QUERY)).to(self.device)
            chosen = table[table[:, KIND] == QUERY]
            server = torch.from_numpy(np.repeat(chosen[:, SERVER], chosen[:, ROWS])).to(self.device)
            expected[index // GROUPS, index % GROUPS] = (server + 1.0).unsqueeze(1)
        self.wrong.append((self.lse_target != expected).sum())

    @staticmethod
    def factor(rank: int) -> float:
        return 1 + rank / 4


def check_transport(transport: Transport, rank: int, ranks: int, device: torch.device) -> tuple[bool, str]:
    """Rounds on two slots that overlap, sizes up and down; sources are freed and their memory reused at once."""
    wrong: list[torch.Tensor] = []
    kept: dict[int, list[Schedule]] = {}
    rounds, begun = 24, time.perf_counter()
    for step in range(rounds):
        seed = step % 9
        longest = 200 if step < 6 else 3000 if step < 14 else 900
        plans = kept.setdefault(seed * 10000 + longest, make_schedules(ranks, seed, longest))
        pair = [Round(plans, rank, seed + 100 * slot, slot, device) for slot in (0, 1)]
        for one in pair:
            one.start(transport)
        for one in pair:
            one.serve(transport)
            torch.full((1 << 22,), 7.0, device=device)  # takes freed memory: a copy that still reads it would show
        for one in pair:
            one.collect()
            wrong += one.wrong
    count = int(torch.stack(wrong).sum())
    seconds = time.perf_counter() - begun
    detail = f"{transport.exchanges} exchanges, {transport.bytes_sent >> 20} MiB sent, {seconds:.1f} s"
    return count == 0, detail if count == 0 else f"{count} values are wrong; {detail}"


def check_timeout(
    name: str, warm: bool, group: dist.ProcessGroup, rank: int, device: torch.device, agree: Callable, host: int | None
) -> tuple[bool, str]:
    """The last rank leaves one exchange out: the others get an error in time, and their GPU goes on.

    `warm`: all buffers are there already; else the exchange left out is one that makes a buffer.
    """
    transport = choose_transport(name, group, device, agree, timeout_s=2.0, host=host)
    ranks = dist.get_world_size(group)
    plans = make_schedules(ranks, 1, 300)
    for seed in range(3 if warm else 1):
        one = Round(plans, rank, seed, 0, device)
        one.start(transport)
        one.serve(transport)
        one.collect()
    synchronize(device)
    agree(0)
    begun, verdict = time.perf_counter(), (True, "left the exchange out")
    if rank != ranks - 1:
        try:
            two = Round(plans, rank, 2, 0, device)
            two.start(transport)
            two.out.wait()
            synchronize(device)  # hangs unless the watchdog lets the GPU go on
            two.start(transport)
            verdict = (False, "no error")
        except CADPeerError as error:
            seconds = time.perf_counter() - begun
            verdict = (seconds < 15, f"after {seconds:.1f} s: {str(error)[:100]}")
    agree(0)
    transport.close()
    return verdict


def transport_lines(rank: int, ranks: int, device: torch.device, hosts: list[int], only: str | None) -> Iterator[Line]:
    group = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo")
    talk = dist.new_group(backend="gloo", timeout=timedelta(seconds=120))

    def agree(value: int) -> list[int]:
        found: list[int] = [0] * ranks
        dist.all_gather_object(found, value, group=talk)
        return found

    def exchanges(name: str, host: int | None = None) -> tuple[bool, str]:
        transport = choose_transport(name, group, device, agree, host=host)
        found = check_transport(transport, rank, ranks, device)
        agree(0)
        transport.close()
        return found

    on_one = [name for name in NAMES if name != "mixed"] if device.type == "cuda" else ["c10d"]
    if only != "mixed":
        yield report("transport auto", "choice", lambda: (True, choose_and_close(group, device, agree)))
        for name in on_one:
            yield report(f"transport {name}", "exchanges", partial(exchanges, name))
        for name, warm in (("nvlink", True), ("nvlink", False), ("nccl", True)):
            if name in on_one:
                run = partial(check_timeout, name, warm, group, rank, device, agree, None)
                yield report(f"transport {name}", "timeout" if warm else "timeout while growing", run)
    # Last: hosts make symmetric memory at different times, and torch numbers its meetings over all groups of a
    # process, so afterwards ranks of different hosts can make none together.
    if device.type == "cuda":
        host, label = hosts[rank], ",".join(map(str, hosts))
        yield report(f"transport auto, hosts {label}", "choice", lambda: choose_for_hosts(group, device, agree, hosts))
        yield report("transport mixed", f"hosts {label}", partial(exchanges, "mixed", host))
        for warm in (True, False):
            run = partial(check_timeout, "mixed", warm, group, rank, device, agree, host)
            yield report("transport mixed", "timeout" if warm else "timeout while growing", run)


def choose_for_hosts(
    group: dist.ProcessGroup, device: torch.device, agree: Callable, hosts: list[int]
) -> tuple[bool, str]:
    """What "auto" takes on several hosts; true where that is what docs/architecture.md says."""
    found = choose_and_close(group, device, agree, hosts[dist.get_rank(group)])
    apart = len(set(hosts))
    return found == ("nvlink" if apart == 1 else "nccl" if apart == len(hosts) else "mixed"), found


def choose_and_close(group: dist.ProcessGroup, device: torch.device, agree: Callable, host: int | None = None) -> str:
    transport = choose_transport("auto", group, device, agree, host=host)
    transport.close()
    return transport.name


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def report(what: str, case: str, run: Callable[[], tuple[bool, str]]) -> Line:
    begun = time.perf_counter()
    try:
        ok, detail = run()
        synchronize(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    except Exception as error:
        ok, detail = False, f"{type(error).__name__}: {str(error)[:1500]}"
    line = {"what": what, "case": case, "ok": ok, "detail": detail, "seconds": round(time.perf_counter() - begun, 1)}
    rank = int(os.environ.get("RANK", 0))
    sys.stdout.write(f"[{rank}] {'ok  ' if ok else 'FAIL'} {what:24} {case:26} {line['seconds']:6}s  {detail}\n")
    sys.stdout.flush()
    return line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("kernels", "transports", "mixed"), help="default: kernels and transports")
    parser.add_argument("--hosts", help='the host of every rank for the mixed transport, "0,0,1,1"; default: two hosts')
    parser.add_argument("--output", type=Path, help="write all lines of all ranks as JSON")
    parser.add_argument("--stall", type=float, default=300.0, help="seconds until every thread's stack is printed")
    options = parser.parse_args()
    faulthandler.dump_traceback_later(options.stall)
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        dist.init_process_group("gloo")  # a rehearsal of this script: c10d alone can work
    lines: list[Line] = []
    hosts = [int(one) for one in options.hosts.split(",")] if options.hosts else [2 * r // ranks for r in range(ranks)]
    if len(hosts) != ranks:
        parser.error(f"--hosts has {len(hosts)} numbers for {ranks} ranks")
    if options.only != "kernels" and ranks > 1:
        lines += transport_lines(rank, ranks, device, hosts, options.only)
    if options.only not in ("transports", "mixed"):
        lines += kernel_lines(rank, ranks, device)
    everything: list[list[Line]] = [[] for _ in range(ranks)]
    dist.all_gather_object(everything, lines)
    if rank == 0 and options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(everything, indent=1))
    failed = sum(not line["ok"] for part in everything for line in part)
    if rank == 0:
        sys.stdout.write(f"{sum(map(len, everything))} checks, {failed} failed\n")
    dist.barrier()
    dist.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
