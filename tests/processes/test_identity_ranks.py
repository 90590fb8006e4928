"""A rank that leaves a part out and goes on: its next exchange meets another one, and every rank says which."""

from __future__ import annotations

from dataclasses import replace

import cases
import numpy as np
import pytest
import torch
import torch.distributed as dist
from pool import WorkerPool

from deepspeed_cad.exchange.failure.board import open_board
from deepspeed_cad.exchange.failure.identity import Moment
from deepspeed_cad.exchange.failure.watchdog import Alarm
from deepspeed_cad.exchange.packed import PackedTransport, c10d_transport
from deepspeed_cad.exchange.transport import Outgoing, Returning
from deepspeed_cad.layout import Layout
from deepspeed_cad.schedule import KEY, QUERY, Schedule, build_slices, schedule_rank

GROUPS, CPU = 2, torch.device("cpu")


def _schedule(rank: int, lengths: list[list[int]], seed: int) -> Schedule:
    tick = Layout.from_rank_lengths(lengths).tick()
    tasks = cases.random_tasks(tick, GROUPS, np.random.default_rng(seed))
    tasks[:, 5] = (tasks[:, 5] + 1) % len(lengths)
    return schedule_rank(tick, build_slices(tick, tasks), rank, GROUPS)


def _fields(schedule: Schedule) -> list[Outgoing]:
    query, key = torch.ones(schedule.query_tokens, GROUPS, 4), torch.ones(schedule.key_tokens, GROUPS, 3)
    return [Outgoing(QUERY, query), Outgoing(KEY, key)]


def _run(transport: PackedTransport, schedule: Schedule, moment: Moment) -> None:
    arrived = transport.dispatch(schedule, _fields(schedule), 0, moment).wait()
    home = torch.zeros(schedule.query_tokens, GROUPS, 4)
    transport.give_back(schedule, [Returning(QUERY, arrived[0], home)], 0, moment).wait()


def _leaves_out(rank: int, world: int, lengths: list[list[int]], seed: int, what: str) -> None:
    board = open_board(dist.group.WORLD, rank, world)
    transport = c10d_transport(dist.group.WORLD, CPU, Alarm(rank, board, 30.0))
    schedule, after = _schedule(rank, [[24, 8], [8, 24], [16]], 0), _schedule(rank, lengths, seed)
    forward = Moment(turn=17, layer=3)
    _run(transport, schedule, forward)
    if rank == 1 and what == "waiting":
        transport.dispatch(schedule, _fields(schedule), 0, replace(forward, backward=True))  # nobody waits for it
    elif rank != 1 or what == "nothing":
        _run(transport, schedule, replace(forward, backward=True))
    _run(transport, after, Moment(turn=18))
    _run(transport, after, Moment(turn=18, layer=1))


@pytest.mark.parametrize(
    ("lengths", "seed"),
    [([[24, 8], [8, 24], [16]], 0), ([[64], [8, 30], [12]], 1)],
    ids=["same sizes", "other sizes"],
)
@pytest.mark.parametrize("what", ["backward", "waiting"])
def test_exchanges_of_different_moments_are_not_taken_for_each_other(
    workers: WorkerPool, lengths: list[list[int]], seed: int, what: str
) -> None:
    errors, _ = workers.try_run(_leaves_out, 3, lengths, seed, what)
    for rank, error in enumerate(errors):
        assert error is not None and error[0] == "CADPeerError", (rank, error)
        assert f"rank {rank} stopped: ranks meet in different exchanges" in error[1], error[1]
        assert "rank 1 is in the dispatch in the forward of micro-batch 18, layer 0" in error[1], error[1]
        way = "dispatch" if what == "backward" else "return"
        assert f"ranks 0, 2 are in the {way} in the backward of micro-batch 17, layer 3" in error[1], error[1]


def test_what_nobody_waits_for_on_any_rank_harms_nothing(workers: WorkerPool) -> None:
    workers.run(_abandons_everywhere, 2)


def _abandons_everywhere(rank: int, world: int) -> None:
    transport = c10d_transport(dist.group.WORLD, CPU, Alarm(rank, None, 300.0))
    schedule = _schedule(rank, [[24, 8], [40]], 0)
    for turn in range(40):
        transport.dispatch(schedule, _fields(schedule), 0, Moment(turn))
        _run(transport, schedule, Moment(turn))
