"""Links: bytes per second that ranks exchange inside a host and between hosts, timed before training starts.

In: the transport that will carry the data, and the host of every rank. Out: `Links`, the same on every rank. All ranks
of a CAD group send and receive at once, as they do in training, so what they share is shared here too. Where ranks
divide heads there are several groups, whose trials overlap in part.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deepspeed_cad.exchange.transport import Outgoing, Transport
from deepspeed_cad.layout import Ints, Layout
from deepspeed_cad.schedule import KEY, KIND, QUERY, ROWS, Schedule, build_slices, schedule_rank

Gather = Callable[[int], list[int]]
"""One whole number of every rank, in rank order. All ranks leave it together."""

WIDTHS = ((QUERY, 4096), (KEY, 1024), (KEY, 1024))
"""Elements of a row of Q, K and V: those of an 8B Llama, as one head group, because many small copies take longer to
start than to move. With eight groups and 50 MB this trial found 74 to 98 GB/s on four H200 (93bab69)."""
ELEMENT = torch.bfloat16
FIRST_ROWS = 8
"""Rows that a rank sends first, about 100 KB: on a link of 1 Mbit/s that takes a second, and no more is tried there."""
MORE = 10
"""Times the rows of the trial before. Few steps, because buffers of some transports grow with each."""
MOST_ROWS = {"cuda": 8000, "cpu": 800}
"""100 MB on GPUs: this trial finds 209 to 263 GB/s on four H200 and 306 to 315 on two. Exchanges of 144 MiB in eight
groups reach 255 on four, of 288 MiB 315 (benchmarks/exchange.py). 10 MB on CPUs."""
IN_ONE_GO = {"cuda": 16, "cpu": 1}
"""Most exchanges between two looks at the clock: on GPUs starting one hides behind the one before."""
ONE_GO_S = 0.02
"""No more exchanges in one go than this should take."""
ROUNDS = 3
LONG_ENOUGH_S = (0.005, 0.02)
"""Of one exchange, inside a host and between hosts: a longer one would say the same. Networks may let a burst pass."""
BUDGET_S = 0.7
"""For one kind of link, connecting not included; two kinds and what lies between stay below two seconds."""


@dataclass(frozen=True)
class Links:
    """Bytes per second of one rank's share of the links, all ranks at once; None where there is no such pair of ranks,
    or nothing is known."""

    inside: float | None
    between: float | None
    source: str = "measured"
    """Where the figures come from: "measured", "given", or words that say why they are not known."""

    def __str__(self) -> str:
        pairs = (("inside a host", self.inside), ("between hosts", self.between))
        known = [f"{where} {speed / 1e9:.3g} GB/s" for where, speed in pairs if speed]
        return f"links {', '.join(known)} ({self.source})" if known else f"links {self.source}"


def measure_links(transport: Transport, device: torch.device, rank: int, hosts: Sequence[int], gather: Gather) -> Links:
    """Time dispatches of Q, K and V, first inside hosts and then between them. Collective: every rank calls it. The
    figures are those of the slowest rank of each kind, because a plan ends when its slowest rank does. Nothing is under
    way on the transport."""
    sent = transport.bytes_sent
    speeds: dict[bool, float | None] = {}
    for same in (True, False):
        peers = [
            [other for other, host in enumerate(hosts) if other != one and (host == mine) == same]
            for one, mine in enumerate(hosts)
        ]
        enough = LONG_ENOUGH_S[0 if same else 1]
        speeds[same] = _time_pairs(transport, device, rank, peers, gather, enough) if any(peers) else None
    transport.bytes_sent = sent  # statistics speak of training
    return Links(speeds[True], speeds[False])


def peer_schedule(peers: list[list[int]], rank: int, groups: int, tokens: int) -> Schedule:
    """Every rank has one document for each of its peers, served there; a rank without peers serves its own."""
    lengths = [[max(1, tokens // max(1, len(own)))] * max(1, len(own)) for own in peers]
    tick = Layout.from_rank_lengths(lengths).tick()
    servers = [server for home, own in enumerate(peers) for server in (own or [home])]
    sizes = [length for own in lengths for length in own]
    tasks = [(document, 0, size, 0, groups, server) for document, (size, server) in enumerate(zip(sizes, servers))]
    return schedule_rank(tick, build_slices(tick, np.array(tasks, np.int64)), rank, groups)


def _time_pairs(
    transport: Transport, device: torch.device, rank: int, peers: list[list[int]], gather: Gather, enough_s: float
) -> float:
    dispatches = 0

    def prepare(rows: int) -> tuple[Schedule, Callable[[int], list[int]]]:
        # One schedule for all rounds of a size: transports make tables for each that they see first.
        schedule = peer_schedule(peers, rank, 1, rows)
        fields = [
            Outgoing(kind, torch.zeros(schedule.query_tokens, 1, width, device=device, dtype=ELEMENT))
            for kind, width in WIDTHS
        ]

        def nanoseconds(times: int) -> list[int]:
            nonlocal dispatches
            dispatches += times
            gather(0)  # all ranks begin together
            begun = time.perf_counter()
            for _ in range(times):
                transport.dispatch(schedule, fields, 0).wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return gather(round((time.perf_counter() - begun) / times * 1e9))

        if device.type == "cuda":
            nanoseconds(2)  # makes buffers and tables; of some transports there are two of each, taken in turn
        return schedule, nanoseconds

    prepare(1)[1](1)  # connects
    times, rows, spent = 1, FIRST_ROWS, 0.0
    while True:
        schedule, nanoseconds = prepare(rows)
        rounds: list[list[int]] = []
        # Everything that decides whether to go on was gathered, so all ranks decide the same.
        while len(rounds) < ROUNDS and spent <= BUDGET_S:
            rounds.append(nanoseconds(times))
            spent += max(rounds[-1]) / 1e9 * times
        seconds = np.median(rounds, axis=0) / 1e9
        one = float(seconds.max())
        # The first size only tells how long the next may take: a burst, or a busy CPU, decides its own.
        over = one >= enough_s and rows > FIRST_ROWS
        times = max(1, min(IN_ONE_GO[device.type], int(ONE_GO_S / (one * MORE))))
        if over or rows * MORE > MOST_ROWS[device.type] or spent + one * MORE * ROUNDS * times > BUDGET_S:
            if dispatches % 2:
                # What two buffers take in turn where nothing goes back begins with the first again: training, where
                # everything does, must not need the second.
                nanoseconds(1)
            # Bytes that leave or reach each rank, whichever are more; those that have none are not slow.
            moved = gather(max(_bytes(schedule.sends), _bytes(schedule.receives)))
            return min(size / max(s, 1e-9) for size, s in zip(moved, seconds.tolist(), strict=True) if size)
        rows *= MORE


def _bytes(slices: Ints) -> int:
    return sum(int(slices[slices[:, KIND] == kind, ROWS].sum()) * width * ELEMENT.itemsize for kind, width in WIDTHS)
