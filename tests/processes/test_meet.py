"""Who is here: ranks that turn CAD on name those that do not, within seconds."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
import torch.distributed as dist
from pool import WorkerPool

import deepspeed_cad
from deepspeed_cad import meet
from deepspeed_cad.errors import CADPeerError


def _together(rank: int, world: int, without: list[int]) -> str:
    meet.PATIENCE_S = 0.3
    if rank in without:
        dist.barrier()
        time.sleep(1.0)  # rank 0 holds the store
        return ""
    try:
        with meet.together():
            dist.barrier()
    except CADPeerError as error:
        return str(error)
    finally:
        time.sleep(0.7)
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


def _fails_inside(rank: int, world: int) -> str:
    try:
        with meet.together():
            raise ValueError("of the call itself")
    except ValueError as error:
        return str(error)


def test_an_error_of_the_call_itself_goes_through(workers: WorkerPool) -> None:
    assert workers.run(_fails_inside, 2) == ["of the call itself"] * 2


def _meet(rank: int, world: int, late: int, seconds: float, timeout_s: float) -> tuple[str, str, float]:
    meet.PATIENCE_S = 0.2
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    meet.logger.addHandler(handler)
    error, begin = "", time.monotonic()
    try:
        if rank == late:
            time.sleep(seconds)
        meet.meet(None, timeout_s)
        meet.meet(None, timeout_s)  # a second session of the same processes
    except CADPeerError as raised:
        error = str(raised)
    finally:
        meet.logger.removeHandler(handler)
        took = time.monotonic() - begin
        time.sleep(1.0 if error else 0.0)  # rank 0 holds the store
    return " ".join(said), error, took


def test_a_late_rank_is_awaited_and_named_in_a_warning(workers: WorkerPool) -> None:
    for rank, (said, error, _) in enumerate(workers.run(_meet, 3, 1, 0.6, 20.0)):
        assert not error
        assert ("for rank 1 to turn CAD on" in said) == (rank != 1), said


def test_nobody_is_named_where_all_come(workers: WorkerPool) -> None:
    assert all(found[:2] == ("", "") for found in workers.run(_meet, 3, -1, 0.0, 20.0))


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named(workers: WorkerPool) -> None:
    for rank, (_, error, took) in enumerate(workers.run(_meet, 3, 2, 1.5, 0.5)):
        if rank != 2:
            assert f"rank {rank} waited 0 s for rank 2 to turn CAD on" in error and "AUTOLOAD=0" in error
            assert 0.5 <= took < 1.4


def _deepspeed(rank: int, world: int) -> tuple[str, float]:
    """Rank 1 has the JSON without the block; it goes on alone, as where the package is not installed."""
    import deepspeed
    import training

    meet.PATIENCE_S = 0.5
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed_cad.install()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    }
    model = training.tiny_llama()
    begin = time.monotonic()
    try:
        block = {} if rank == 1 else {"cad": {}}
        deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config | block)
    except CADPeerError as error:
        return str(error), time.monotonic() - begin
    time.sleep(3.0)
    return "", 0.0


@pytest.mark.slow
def test_deepspeed_on_a_rank_without_the_package(fresh_workers: WorkerPool) -> None:
    pytest.importorskip("deepspeed")
    for rank, (error, took) in enumerate(fresh_workers.run(_deepspeed, 3)):
        assert (f"CAD is on on rank {rank} and not on rank 1" in error and took < 20.0) or rank == 1


def test_a_session_meets_before_it_opens_groups(workers: WorkerPool) -> None:
    for error in workers.run(_session, 2):
        assert "rank 0 waited 1 s for rank 1 to turn CAD on" in error or error == "absent"


def _session(rank: int, world: int) -> str:
    import training

    meet.PATIENCE_S = 0.2
    if rank == 1:
        time.sleep(1.6)
        return "absent"
    try:
        deepspeed_cad.apply(training.tiny_llama(), {"timeout_s": 1.0})
    except CADPeerError as error:
        return str(error)
    return "went on"
