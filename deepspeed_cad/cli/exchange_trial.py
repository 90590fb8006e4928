"""One exchange of a transport between two processes of this machine, there and back; each is started by the doctor.

In: `python -m deepspeed_cad.cli.exchange_trial TRANSPORT RANK STORE`. Out: exit code 0 where every slice arrived where
the schedule says and came back home, and on stdout of rank 0 the GB/s of one process while both send; else the reason
as the last line on stderr. Slices are uneven: rank 0 sends rows
of one head group, rank 1 sends nothing.
"""

import datetime
import os
import sys

import numpy as np
import torch
import torch.distributed as dist

from deepspeed_cad.exchange.links import measure_links
from deepspeed_cad.exchange.probe import choose_transport
from deepspeed_cad.exchange.transport import Outgoing, Returning, Transport
from deepspeed_cad.layout import Layout
from deepspeed_cad.schedule import KEY, QUERY, build_slices, schedule_rank

RANKS, GROUPS, WIDTH = 2, 2, 64
RANK_LENGTHS = [[40, 5], [16]]
TASKS = [  # document, query rows, head groups, server: rows 24 to 40 of group 1 of document 0 go to rank 1
    [0, 0, 24, 0, 2, 0],
    [0, 24, 40, 0, 1, 0],
    [0, 24, 40, 1, 2, 1],
    [1, 0, 5, 0, 2, 0],
    [2, 0, 16, 0, 2, 1],
]


def main(name: str, rank: int, store: str) -> None:
    on_gpus = torch.cuda.device_count() >= RANKS
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpus else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=60),
    )
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("torch.distributed made no process group")
    # "mixed" is for several hosts: there the two processes pass for one on each.
    transport = choose_transport(name, group, device, timeout_s=60, host=rank if name == "mixed" else None)
    _there_and_back(transport, rank, device)

    def gather(value: int) -> list[int]:
        found: list[int] = [0] * RANKS
        dist.all_gather_object(found, value, group=group)
        return found

    hosts = [0, 1] if name == "mixed" else [0, 0]
    links = measure_links(transport, device, rank, hosts, gather)
    if rank == 0:
        sys.stdout.write(f"{(links.inside or links.between or 0.0) / 1e9:.3g}\n")
    transport.close()
    dist.barrier()


def _there_and_back(transport: Transport, rank: int, device: torch.device) -> None:
    tick = Layout.from_rank_lengths(RANK_LENGTHS).tick()
    schedule = schedule_rank(tick, build_slices(tick, np.array(TASKS, dtype=np.int64)), rank, GROUPS)
    tokens = sum(RANK_LENGTHS[rank])
    q_TGW, k_TGW = torch.randn(2, tokens, GROUPS, WIDTH, generator=torch.Generator().manual_seed(rank)).to(device)
    arrived = transport.dispatch(schedule, [Outgoing(QUERY, q_TGW), Outgoing(KEY, k_TGW)], nano_batch=0).wait()
    if rank == 1:
        given = torch.randn(2, sum(RANK_LENGTHS[0]), GROUPS, WIDTH, generator=torch.Generator().manual_seed(0))
        _compare("queries", arrived[0], given[0, 24:40, 1])
        _compare("keys", arrived[1], given[1, :40, 1])
    home_TGW = torch.zeros_like(q_TGW)
    transport.give_back(schedule, [Returning(QUERY, arrived[0].clone(), home_TGW)], nano_batch=0).wait()
    expected = torch.zeros_like(q_TGW)
    if rank == 0:
        expected[24:40, 1] = q_TGW[24:40, 1]
    _compare("what came back", home_TGW, expected.cpu())


def _compare(what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    if not torch.equal(found.cpu(), expected):
        raise RuntimeError(f"{what} of the exchange differ from what was sent")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    sys.stdout.flush()
    os._exit(0)  # libraries of the accelerator may abort while the interpreter closes down
