"""Every transport against rows moved by index, over random plans on two interleaved nano-batches with growing buffers;
and what a rank says when another one leaves an exchange out.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from cases import random_tasks
from lines import Found, Lines, Place
from loops import TIME_OUT
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from deepspeed_cad.errors import CADPeerError
from deepspeed_cad.exchange import probe
from deepspeed_cad.exchange.failure.identity import Moment
from deepspeed_cad.exchange.links import measure_links
from deepspeed_cad.exchange.transport import Dispatched, Outgoing, Returning, Transport
from deepspeed_cad.exchange.waits import Transfers
from deepspeed_cad.groups import open_exchange
from deepspeed_cad.layout import Layout
from deepspeed_cad.schedule import KEY, KIND, QUERY, ROWS, SERVER, Schedule, build_slices, schedule_rank

GROUPS = 4
LANES = ((0, 0), (1, 0), (0, 1), (1, 1))
"""Nano-batches and waves of exchanges that are under way at once."""

ATTENDED = 49152
"""Tokens of a document whose attention takes some 50 ms on an H200."""
PASSED_AFTER = 0.5
"""Share of that time. An exchange alone takes a few ms; what waits behind attention comes after all of it."""

Agree = Callable[[int], "list[int]"]


def run(place: Place, lines: Lines, case: str) -> None:
    """All transports of one host, or with pretended hosts what carries exchanges between those. `case`: a transport and
    how an exchange is left out, in processes of their own: what it leaves on a GPU may hold up whatever runs there
    later."""
    device, ranks = place.device, place.ranks
    group = open_exchange(None, timedelta(seconds=300), device)
    talk = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))

    def agree(value: int) -> list[int]:
        found: list[int] = [0] * ranks
        dist.all_gather_object(found, value, group=talk)
        return found

    def opened(check: Callable[[Transport], Found], name: str) -> Found:
        transport = probe.choose_transport(name, group, device, agree)
        found = check(transport)
        agree(0)
        transport.close()
        return found

    checks = {
        "exchanges": partial(check_transport, place=place),
        "links": partial(check_links, place=place, agree=agree),
    }
    if place.own_gpu:
        checks["passes attention"] = partial(check_passes, place=place)

    names = ["c10d"] if not place.on_gpu else ["mixed"] if place.hosts else ["nvlink", "nccl", "c10d"]
    where = f", hosts {','.join(map(str, place.hosts))}" if place.hosts else ""
    if case:
        name, _, what = case.partition(": ")
        left_out = partial(check_timeout, name, what == TIME_OUT, group, place, agree)
        lines.check(f"transport {name}", f"{what}{where}", left_out)
        return
    choice = partial(opened, lambda transport: (transport.name == expected_choice(place), transport.name), "auto")
    lines.check("transport auto", f"choice{where}", choice)
    for name in names:
        for what, check in checks.items():
            lines.check(f"transport {name}", f"{what}{where}", partial(opened, check, name))


def expected_choice(place: Place) -> str:
    if not place.on_gpu:
        return "c10d"
    apart = len(set(place.hosts or (0,)))
    return "nvlink" if apart == 1 else "nccl" if apart == place.ranks else "mixed"


def make_schedules(ranks: int, seed: int, longest: int) -> list[Schedule]:
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
    FIELDS = ((QUERY, 256, torch.bfloat16), (KEY, 64, torch.bfloat16), (KEY, 32, torch.bfloat16))

    def __init__(self, schedules: list, rank: int, seed: int, nano_batch: int, device: object, wave: int = 0) -> None:
        self.schedules, self.rank, self.seed, self.nano_batch, self.device = schedules, rank, seed, nano_batch, device
        self.moment = Moment(wave=wave)
        self.own = schedules[rank]
        self.homes = [[home_tensor(s, *field, seed, device) for field in self.FIELDS] for s in schedules]

    def start(self, transport: Transport) -> None:
        fields = [Outgoing(kind, home) for (kind, _, _), home in zip(self.FIELDS, self.homes[self.rank])]
        self.out: Dispatched = transport.dispatch(self.own, fields, self.nano_batch, self.moment)

    def serve(self, transport: Transport) -> None:
        """Check what arrived; what goes back is what arrived times a number of this rank."""
        arrived = self.out.wait()
        self.wrong = self.differences(arrived)
        self.given = [(x.float() * self.factor(self.rank)).to(x.dtype) for x in arrived]
        self.target = [torch.full_like(home, 0.5) for home in self.homes[self.rank]]
        self.lse_target = torch.zeros(self.homes[self.rank][0].shape[:2], device=self.device).unsqueeze(2)
        served = int(self.own.served_rows[self.rank, QUERY])
        self.lse = torch.full((served, 1), float(self.rank + 1), device=self.device)
        columns = zip(self.FIELDS, self.given, self.target)
        back = [Returning(kind, x, home, add=kind == KEY) for (kind, *_), x, home in columns]
        fields = [*back, Returning(QUERY, self.lse, self.lse_target)]
        self.back = transport.give_back(self.own, fields, self.nano_batch, self.moment)

    def differences(self, arrived: list[torch.Tensor]) -> list[torch.Tensor]:
        wrong = []
        for f, (kind, _width, _dtype) in enumerate(self.FIELDS):
            expected = torch.empty_like(arrived[f])
            for s in self.schedules:
                for table in (s.own,) if s.rank == self.rank else (s.sends[s.sends[:, SERVER] == self.rank],):
                    index = torch.from_numpy(s.home_index(table, kind)).to(self.device)
                    rows = torch.from_numpy(s.server_index(table, kind)).to(self.device)
                    expected[rows] = self.homes[s.rank][f][index // GROUPS, index % GROUPS]
            wrong.append((arrived[f] != expected).sum())
        return wrong

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

    def run(self, transport: Transport) -> list[torch.Tensor]:
        """There and back; how many values of each field are wrong."""
        self.start(transport)
        self.serve(transport)
        self.collect()
        return self.wrong

    @staticmethod
    def factor(rank: int) -> float:
        return 1 + rank / 4


def check_transport(transport: Transport, place: Place) -> Found:
    """Rounds on two nano-batches and two waves of each, all overlapping, sizes up and down; sources are freed and their
    memory reused at once."""
    rank, ranks, device = place.rank, place.ranks, place.device
    wrong: list[torch.Tensor] = []
    kept: dict[int, list[Schedule]] = {}
    rounds, begun = 24, time.perf_counter()
    # In a rehearsal one of each size.
    for step in range(rounds) if place.on_gpu else (0, 5, 6, 14):
        seed = step % 9
        longest = 200 if step < 6 else 3000 if step < 14 else 900
        plans = kept.setdefault(seed * 10000 + longest, make_schedules(ranks, seed, longest))
        several = [Round(plans, rank, seed + 100 * at, lane[0], device, lane[1]) for at, lane in enumerate(LANES)]
        for one in several:
            one.start(transport)
        for one in several:
            one.serve(transport)
            torch.full((1 << 22,), 7.0, device=device)  # takes freed memory: a copy that still reads it would show
        for one in several:
            one.collect()
            wrong += one.wrong
    count = int(torch.stack(wrong).sum())
    seconds = time.perf_counter() - begun
    detail = f"{transport.exchanges} exchanges, {transport.bytes_sent >> 20} MiB sent, {seconds:.1f} s"
    return count == 0, detail if count == 0 else f"{count} values are wrong; {detail}"


def check_links(transport: Transport, place: Place, agree: Agree) -> Found:
    """Links are measured in time, alike on all ranks, and what travels by messages is timed while training."""
    hosts = list(place.hosts or [0] * place.ranks)
    begun = time.perf_counter()
    found = measure_links(transport, place.device, place.rank, hosts, agree)
    seconds = time.perf_counter() - begun
    several = [hosts.count(host) > 1 for host in hosts]
    known = (found.inside is not None) == any(several) and (found.between is not None) == (len(set(hosts)) > 1)
    transport.transfers = transfers = Transfers(place.rank, hosts, 1.0, 1.0)  # every transfer counts
    plans = make_schedules(place.ranks, 2, 900)
    for seed in range(3):
        Round(plans, place.rank, seed, 0, place.device).run(transport)
    place.synchronize()
    noted = np.sum([place.gather(transfers.take().tolist())], axis=(0, 1))
    # Peer copies, and torch's collectives on GPUs, are not timed.
    timed = transport.name in ("nccl", "mixed") or not place.on_gpu
    right = known and place.gather(found) == [found] * place.ranks
    right = right and (seconds < 8 or not place.on_gpu) and bool(noted[0] + noted[2] > 0) == timed
    return right, f"{found}, {seconds:.2f} s; noted {noted.tolist()}"


def check_passes(transport: Transport, place: Place) -> Found:
    """An exchange that starts when attention already has more blocks than the GPU can hold is over long before that
    attention: else nothing would be hidden behind it."""
    plans = make_schedules(place.ranks, 1, 3000)
    aside = torch.cuda.Stream(place.device, priority=-1)
    begun, moved, attended = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    heads_BHTD = torch.randn(1, 32, ATTENDED, 128, device=place.device, dtype=torch.bfloat16)
    shares, wrong = [], []
    for seed in range(6):
        one = Round(plans, place.rank, seed, 0, place.device)
        place.synchronize()
        place.gather(None)
        begun.record()
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            scaled_dot_product_attention(heads_BHTD, heads_BHTD, heads_BHTD, is_causal=True)
        attended.record()
        with torch.cuda.stream(aside):
            one.start(transport)
            arrived = one.out.wait()
            moved.record()
        place.synchronize()
        # The first one opens connections and makes room.
        shares.append(begun.elapsed_time(moved) / begun.elapsed_time(attended))
        one.out = SimpleNamespace(wait=partial(list, arrived))
        one.serve(transport)
        one.collect()
        wrong += one.wrong
    # One that waits for attention never passes it; a host that is busy with other checks may be late for most of them.
    worst, took = max(place.gather(min(shares[1:]))), begun.elapsed_time(attended)
    text = f"arrived after {worst:.2f} of {took:.0f} ms of attention, {int(torch.stack(wrong).sum())} values wrong"
    return worst < PASSED_AFTER and not torch.stack(wrong).any(), text


def check_timeout(name: str, warm: bool, group: dist.ProcessGroup, place: Place, agree: Agree) -> Found:
    """The last rank leaves one exchange out: the others get an error in time, and their GPU goes on. `warm`: all
    buffers are there already; else the exchange left out is one that makes a buffer."""
    rank, ranks, device = place.rank, place.ranks, place.device
    transport = probe.choose_transport(name, group, device, agree, timeout_s=6.0)  # NCCL connects in up to 3 s
    plans = make_schedules(ranks, 1, 300)
    for seed in range(3 if warm else 1):
        Round(plans, rank, seed, 0, device).run(transport)
    place.synchronize()
    agree(0)
    begun, verdict = time.perf_counter(), (True, "left the exchange out")
    if rank != ranks - 1:
        try:
            two = Round(plans, rank, 2, 0, device)
            two.start(transport)
            two.out.wait()
            place.synchronize()  # hangs unless the watchdog lets the GPU go on
            two.start(transport)
            verdict = (False, "no error")
        except CADPeerError as error:
            seconds = time.perf_counter() - begun
            verdict = (seconds < 20, f"after {seconds:.1f} s: {str(error)[:100]}")
    agree(0)
    transport.close()
    return verdict
