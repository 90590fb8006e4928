"""Exchanges of real ranks: which belong together, transfers that correct links, the job's store and its hosts."""

import os
from datetime import timedelta
from typing import Any
from unittest import mock

import cases
import numpy as np
import pytest
import torch
import torch.distributed as dist
import training
from pool import WorkerPool

import deepspeed_cad
from deepspeed_cad.config import CADConfig
from deepspeed_cad.exchange.failure.board import open_board
from deepspeed_cad.exchange.failure.identity import Moment
from deepspeed_cad.exchange.failure.watchdog import Alarm
from deepspeed_cad.exchange.group import numbers_of
from deepspeed_cad.exchange.links import Links
from deepspeed_cad.exchange.packed import PackedTransport, c10d_transport
from deepspeed_cad.exchange.transport import Outgoing, Returning
from deepspeed_cad.exchange.waits import Transfers
from deepspeed_cad.groups import open_groups
from deepspeed_cad.layout import Layout
from deepspeed_cad.schedule import KEY, QUERY, Schedule, build_slices, schedule_rank
from deepspeed_cad.shares import Replica

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


def _leaves_out(rank: int, world: int, same_sizes: bool, waits: bool) -> None:
    transport = c10d_transport(dist.group.WORLD, CPU, Alarm(rank, open_board(dist.group.WORLD, rank, world), 30.0))
    schedule = _schedule(rank, [[24, 8], [8, 24], [16]], 0)
    after = schedule if same_sizes else _schedule(rank, [[64], [8, 30], [12]], 1)
    for turn in range(20):  # what nobody waits for on any rank harms nothing
        transport.dispatch(schedule, _fields(schedule), 0, Moment(turn))
        _run(transport, schedule, Moment(turn))
    backward = Moment(turn=17, layer=3, backward=True)
    if rank == 1 and not waits:
        transport.dispatch(schedule, _fields(schedule), 0, backward)  # only here
    elif rank != 1:
        _run(transport, schedule, backward)
    _run(transport, after, Moment(turn=18))
    _run(transport, after, Moment(turn=18, layer=1))


@pytest.mark.parametrize("same_sizes", [True, False])
@pytest.mark.parametrize("waits", [True, False])
def test_exchanges_of_different_moments_are_told_apart(workers: WorkerPool, same_sizes: bool, waits: bool) -> None:
    for rank, error in enumerate(workers.try_run(_leaves_out, 3, same_sizes, waits)[0]):
        assert error is not None and error[0] == "CADPeerError", (rank, error)
        assert f"rank {rank} stopped: ranks meet in different exchanges" in error[1], error[1]
        assert "rank 1 is in the dispatch in the forward of micro-batch 18, layer 0" in error[1], error[1]
        way = "dispatch" if waits else "return"
        assert f"ranks 0, 2 are in the {way} in the backward of micro-batch 17, layer 3" in error[1], error[1]


def _train(rank: int, steps: int, block: dict[str, Any]) -> Any:
    model = deepspeed_cad.apply(training.tiny_llama(), {"granularity": 16, "timeout_s": 50.0, **block})
    session = deepspeed_cad.current_session()
    if not block:  # every transfer counts, however small
        hosts = session.plans.crew.hosts.tolist()
        session.transport.transfers = session.learned.links._transfers = Transfers(rank, hosts, 1.0, 1.0)
    for _ in range(steps):
        training.loss_sum(model, training.pack(training.documents([300] if rank else [40, 30], seed=rank))).backward()
    return session


def _correct(rank: int, world: int) -> tuple[str, Any]:
    with mock.patch("deepspeed_cad.exchange.probe.measure_links", lambda *given: Links(1e12, None)):
        learned = _train(rank, 7, {}).learned.links
    return learned.links.source, learned.now


def test_transfers_correct_the_links_of_all_ranks(workers: WorkerPool) -> None:
    (source, now), second = workers.run(_correct, 2)
    assert (source, now) == second == ("measured, corrected", now) and 0 < now.inside < 1e12, "small ones are slow"


def _train_on_a_tcp_store(rank: int, world: int, port: int) -> float:
    """The store's time-out once CAD has all its groups."""
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    _train(rank, 1, {"links": {"inside": 100, "between": 10}})
    return store.timeout.total_seconds()


def test_the_time_out_of_the_job_stays(workers: WorkerPool) -> None:
    job = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert workers.run(_train_on_a_tcp_store, 2, job.port) == [60.0] * 2


def _with_a_launcher_of_its_own(rank: int, world: int) -> list[int]:
    """As on two hosts, of which one has three ranks that do not follow each other."""
    os.environ["LOCAL_WORLD_SIZE"] = "1" if rank == 1 else "3"
    with mock.patch("deepspeed_cad.exchange.probe.host_number", lambda: 5 if rank == 1 else 9):
        return _train(rank, 1, {"recompute_attention": True}).plans.crew.hosts.tolist()


def test_ranks_whose_launchers_count_differently_plan_alike(workers: WorkerPool) -> None:
    assert workers.run(_with_a_launcher_of_its_own, 4) == [[9, 5, 9, 9]] * 4


def _open(rank: int, world: int, shares: int) -> dict[str, Any]:
    """What a rank has opened where so many divide heads, and which of it is left once it is closed."""
    first, torchs = rank // shares * shares, dist.distributed_c10d._world.pg_map
    before = set(torchs)
    opened = open_groups(CADConfig(timeout_s=50.0), CPU, Replica((*range(first, first + shares),)), rank, world)
    asked, board = list[int](), opened.liveness
    agree = opened.agree(lambda value: asked.append(value) or numbers_of(opened.cpu, board, value))
    facts = {"agreed": agree(10 + rank), "asked": asked, "watched": board.watched, "beside": board.beside}
    facts["limits"] = {one._get_backend(CPU).options._timeout for one in set(torchs) - before}
    facts["over"] = [one and dist.get_process_group_ranks(one) for one in (opened.cpu, opened.exchange, opened.share)]
    facts |= {"hosts": len(opened.hosts), "trainers": opened.servers.members.trainers}
    opened.close()
    return facts | {"left": len(set(torchs) - before)}


@pytest.mark.parametrize("shares", [1, 2, 4])
def test_ranks_with_one_share_of_heads_are_a_group(workers: WorkerPool, shares: int) -> None:
    """They ask each other alone where heads are divided, after all have compared configurations."""
    for rank, found in enumerate(workers.run(_open, 4, shares)):
        group = [*range(rank % shares, 4, shares)]
        over = [[0, 1, 2, 3], group if shares < 4 else None, group if shares == 2 else None]
        assert found == {
            "agreed": [10 + one for one in group], "asked": [10 + rank if shares == 1 else 0], "watched": group,
            "beside": [one for one in range(4) if one not in group], "limits": {timedelta(seconds=50)}, "over": over,
            "hosts": len(group), "trainers": len(group), "left": 0,
        }  # fmt: skip
