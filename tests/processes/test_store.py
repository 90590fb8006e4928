"""The job's store belongs to the job: CAD meets on it and leaves its time-out alone."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from pool import WorkerPool

BLOCK = {"granularity": 16, "timeout_s": 50.0, "links": {"inside": 100, "between": 10}}


def _train_on_a_tcp_store(rank: int, world: int, port: int) -> float:
    """The store's time-out once CAD has all its groups."""
    import training

    import deepspeed_cad

    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    model = training.tiny_llama()
    deepspeed_cad.apply(model, BLOCK)
    training.loss_sum(model, training.pack(training.documents([60, 20] if rank else [33], seed=rank))).backward()
    return store.timeout.total_seconds()


def test_the_time_out_of_the_job_stays(workers: WorkerPool) -> None:
    job = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert workers.run(_train_on_a_tcp_store, 2, job.port) == [60.0] * 2


def _with_a_launcher_of_its_own(rank: int, world: int) -> list[int]:
    """As on two hosts, of which one has three ranks that do not follow each other."""
    import os
    from unittest import mock

    import training

    import deepspeed_cad

    os.environ["LOCAL_WORLD_SIZE"] = "1" if rank == 1 else "3"
    model = training.tiny_llama()
    with mock.patch("deepspeed_cad.exchange.probe.host_number", lambda: 5 if rank == 1 else 9):
        deepspeed_cad.apply(model, {"granularity": 16, "timeout_s": 60.0})
    training.loss_sum(model, training.pack(training.documents([60, 20] if rank else [33], seed=rank))).backward()
    return deepspeed_cad.current_session().plans.crew.hosts.tolist()


def test_ranks_whose_launchers_count_differently_plan_alike(workers: WorkerPool) -> None:
    assert workers.run(_with_a_launcher_of_its_own, 4) == [[9, 5, 9, 9]] * 4
