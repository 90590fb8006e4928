"""Timing links: bytes per second that a rank receives, from ranks of its node and from those of others.

In: a transport between the ranks of a group. Out: `Links`, the same on every rank. All ranks send and receive at once,
as they do in training, so what they share is shared here too.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from deepspeed_cad.exchange.transport import Outgoing, Transport
from deepspeed_cad.layout import Layout
from deepspeed_cad.planner.plan import HeadShape
from deepspeed_cad.schedule import KEY, QUERY, Schedule, build_slices, schedule_rank


@dataclass(frozen=True)
class Links:
    """Bytes per second into one rank; None where there is no such pair of ranks."""

    inside: float | None
    between: float | None


def measure_links(
    transport: Transport,
    cpu_group: dist.ProcessGroup,
    device: torch.device,
    shape: HeadShape,
    ranks_per_node: int,
    tokens: int,
    repeats: int = 10,
) -> Links:
    """Time dispatches of Q, K and V. Collective: every rank of `cpu_group`, which has the transport's ranks.

    `tokens`: rows that each rank sends, about.
    """
    rank, ranks = dist.get_rank(cpu_group), dist.get_world_size(cpu_group)
    node = np.arange(ranks) // ranks_per_node
    speeds: list[float | None] = []
    for same_node in (True, False):
        peers = [
            [other for other in range(ranks) if other != one and (node[other] == node[one]) == same_node]
            for one in range(ranks)
        ]
        if not any(peers):
            speeds.append(None)
            continue
        schedule = peer_schedule(peers, rank, shape.groups, tokens)
        speeds.append(_bytes_per_second(transport, schedule, cpu_group, device, shape, repeats))
    return Links(*speeds)


def peer_schedule(peers: list[list[int]], rank: int, groups: int, tokens: int) -> Schedule:
    """Every rank has one document for each of its peers, served there; a rank without peers serves its own."""
    lengths = [[max(1, tokens // max(1, len(own)))] * max(1, len(own)) for own in peers]
    tick = Layout.from_rank_lengths(lengths).tick()
    servers = [server for home, own in enumerate(peers) for server in (own or [home])]
    sizes = [length for own in lengths for length in own]
    tasks = [
        (document, 0, size, 0, groups, server)
        for document, (size, server) in enumerate(zip(sizes, servers, strict=True))
    ]
    return schedule_rank(tick, build_slices(tick, np.array(tasks, np.int64)), rank, groups)


def _bytes_per_second(
    transport: Transport,
    schedule: Schedule,
    cpu_group: dist.ProcessGroup,
    device: torch.device,
    shape: HeadShape,
    repeats: int,
) -> float:
    rows = schedule.query_tokens
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[shape.bytes_per_element]
    fields = [
        Outgoing(kind, torch.zeros(rows, shape.groups, width, device=device, dtype=dtype))
        for kind, width in (
            (QUERY, shape.heads_per_group * shape.head_dim),
            (KEY, shape.head_dim),
            (KEY, shape.value_dim),
        )
    ]

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(2):  # opens connections and makes buffers
        transport.dispatch(schedule, fields, 0).wait()
    synchronize()
    dist.barrier(cpu_group)
    sent, begun = transport.bytes_sent, time.perf_counter()
    for _ in range(repeats):
        transport.dispatch(schedule, fields, 0).wait()
    synchronize()
    elapsed = time.perf_counter() - begun
    mine = torch.tensor([float(transport.bytes_sent - sent), elapsed], dtype=torch.float64)
    everyone = [torch.zeros_like(mine) for _ in range(dist.get_world_size(cpu_group))]
    dist.all_gather(everyone, mine, group=cpu_group)
    # As many bytes arrive as leave; ranks without peers of this class do not count.
    busy = [one for one in everyone if float(one[0]) > 0]
    return float(sum(float(one[0]) for one in busy) / len(busy) / max(float(one[1]) for one in busy))
