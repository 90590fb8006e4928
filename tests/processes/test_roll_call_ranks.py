"""Who is here: ranks that turn CAD on name those that do not, within seconds."""

from __future__ import annotations

import os
from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist
import training
from engines import engine_config, import_deepspeed
from pool import WorkerPool

import deepspeed_cad
from deepspeed_cad.errors import CADPeerError
from deepspeed_cad.exchange.failure import patience, roll_call


def _tell(rank: int) -> None:
    dist.distributed_c10d._get_default_store().set(f"told/{rank}", "1")


def _wait_until_told(ranks: list[int]) -> None:
    """However long the others take."""
    dist.distributed_c10d._get_default_store().wait([f"told/{rank}" for rank in ranks])


def _together(rank: int, world: int, without: list[int]) -> str:
    patience.LATE_S = roll_call.LATE_S = 0.3
    if rank in without:
        dist.barrier()
        return ""
    try:
        with roll_call.together():
            dist.barrier()
    except CADPeerError as error:
        return str(error)
    return "here"


@pytest.mark.parametrize(("without", "named"), [([2], "not on rank 2:"), ([0, 2], "not on ranks 0, 2:"), ([], "")])
def test_after_a_common_call_absent_ranks_are_named(workers: WorkerPool, without: list[int], named: str) -> None:
    for rank, said in enumerate(workers.run(_together, 3, without)):
        if rank in without:
            assert said == ""
        elif without:
            assert f"CAD is on on rank {rank} and {named}" in said and "not installed there" in said
        else:
            assert said == "here"


def _deepspeed(rank: int, world: int) -> str:
    """Rank 1 has the JSON without the block; it goes on alone, as where the package is not installed."""
    deepspeed = import_deepspeed()
    patience.LATE_S = roll_call.LATE_S = 0.5
    config = engine_config(1)
    model = training.tiny_llama()
    try:
        block = {} if rank == 1 else {"cad": {}}
        deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config | block)
    except CADPeerError as error:
        _tell(rank)
        return str(error)
    _wait_until_told([0, 2])
    return ""


@pytest.mark.slow
def test_deepspeed_on_a_rank_without_the_package(fresh_workers: WorkerPool) -> None:
    pytest.importorskip("deepspeed")
    for rank, error in enumerate(fresh_workers.run(_deepspeed, 3)):
        assert f"CAD is on on rank {rank} and not on rank 1" in error or rank == 1


def test_a_session_meets_before_it_opens_groups(workers: WorkerPool) -> None:
    for error in workers.run(_session, 2):
        assert "rank 0 waited 1 s for rank 1 to turn CAD on" in error or error == "absent"


def _session(rank: int, world: int) -> str:
    patience.LATE_S = roll_call.LATE_S = 0.2
    if rank == 1:
        _wait_until_told([0])
        return "absent"
    try:
        deepspeed_cad.apply(training.tiny_llama(), {"timeout_s": 1.0})
    except CADPeerError as error:
        _tell(rank)
        return str(error)
    return "went on"


# The job's store belongs to the job: CAD meets on it and leaves its time-out alone


def _train_on_a_tcp_store(rank: int, world: int, port: int) -> float:
    """The store's time-out once CAD has all its groups."""
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    model = training.tiny_llama()
    deepspeed_cad.apply(model, {"granularity": 16, "timeout_s": 50.0, "links": training.LINKS})
    training.loss_sum(model, training.pack(training.documents([60, 20] if rank else [33], seed=rank))).backward()
    return store.timeout.total_seconds()


def test_the_time_out_of_the_job_stays(workers: WorkerPool) -> None:
    job = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert workers.run(_train_on_a_tcp_store, 2, job.port) == [60.0] * 2


def _with_a_launcher_of_its_own(rank: int, world: int) -> list[int]:
    """As on two hosts, of which one has three ranks that do not follow each other."""

    os.environ["LOCAL_WORLD_SIZE"] = "1" if rank == 1 else "3"
    model = training.tiny_llama()
    with mock.patch("deepspeed_cad.exchange.probe.host_number", lambda: 5 if rank == 1 else 9):
        deepspeed_cad.apply(model, {"granularity": 16, "timeout_s": 60.0})
    training.loss_sum(model, training.pack(training.documents([60, 20] if rank else [33], seed=rank))).backward()
    return deepspeed_cad.current_session().plans.crew.hosts.tolist()


def test_ranks_whose_launchers_count_differently_plan_alike(workers: WorkerPool) -> None:
    assert workers.run(_with_a_launcher_of_its_own, 4) == [[9, 5, 9, 9]] * 4
