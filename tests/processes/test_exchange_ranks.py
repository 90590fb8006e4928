"""Exchanges of real ranks: transfers that correct links, the job's store and its hosts, and who exchanges with whom."""

from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import training
from pool import WorkerPool

import deepspeed_cad
from deepspeed_cad.config import CADConfig
from deepspeed_cad.exchange.group import numbers_of
from deepspeed_cad.exchange.links import Links
from deepspeed_cad.exchange.waits import Transfers
from deepspeed_cad.groups import open_groups
from deepspeed_cad.server.meeting import Members
from deepspeed_cad.shares import Replica

CPU = torch.device("cpu")


@mock.patch("deepspeed_cad.exchange.probe.measure_links", lambda *given: Links(1e12, None))
def _correct(rank: int, world: int) -> tuple[str, Any]:
    limit = (store := dist.distributed_c10d._get_default_store()).timeout
    model = deepspeed_cad.apply(training.tiny_llama(), {"granularity": 16, "timeout_s": 50.0})
    session = deepspeed_cad.current_session()
    hosts, learned = session.plans.crew.hosts.tolist(), session.learned.links
    session.transport.transfers = learned._transfers = Transfers(rank, hosts, 1.0, 1.0)  # all count, however small
    for _ in range(7):
        training.loss_sum(model, training.pack(training.documents([300] if rank else [40, 30], seed=rank))).backward()
    assert store.timeout == limit, "the time-out of the job stays"
    return learned.links.source, learned.now


def test_transfers_correct_the_links_of_all_ranks(workers: WorkerPool) -> None:
    (source, now), second = workers.run(_correct, 2)
    assert (source, now) == second == ("measured, corrected", now) and 0 < now.inside < 1e12, "small ones are slow"


def _open(rank: int, world: int, shares: int) -> tuple[Any, ...]:
    """What a rank has opened where so many divide heads, and how much of it is left once it is closed."""
    first, torchs = rank // shares * shares, dist.distributed_c10d._world.pg_map
    before = set(torchs)
    opened = open_groups(CADConfig(timeout_s=50.0), CPU, Replica((*range(first, first + shares),)), rank, world)
    asked, board = list[int](), opened.liveness
    agreed = opened.agree(lambda value: asked.append(value) or numbers_of(opened.cpu, board, value))(10 + board.rank)
    limits = {one._get_backend(CPU).options._timeout for one in set(torchs) - before}
    over = [one and dist.get_process_group_ranks(one) for one in (opened.cpu, opened.exchange, opened.share)]
    opened.close()
    left = len(set(torchs) - before)
    return agreed, asked, over, board.watched, board.beside, limits, len(opened.hosts), opened.servers.members, left


@pytest.mark.parametrize("shares", [1, 2, 4])
def test_ranks_with_one_share_of_heads_are_a_group(workers: WorkerPool, shares: int) -> None:
    """They ask each other alone where heads are divided, after all have compared configurations."""
    for rank, (agreed, asked, over, watched, beside, *rest) in enumerate(workers.run(_open, 4, shares)):
        group = [*range(rank % shares, 4, shares)]
        assert (agreed, asked) == ([10 + one for one in group], [10 + rank if shares == 1 else 0])
        assert over == [[0, 1, 2, 3], group if shares < 4 else None, group if shares == 2 else None]
        assert watched == group and sorted(watched + beside) == [0, 1, 2, 3]
        assert rest == [{timedelta(seconds=50)}, len(group), Members(0, len(group), ()), 0]
