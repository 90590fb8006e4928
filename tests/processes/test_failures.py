"""Bad input ends in one clear error on every rank, before anything wrong is trained."""

from __future__ import annotations

import gc
import os
import re
import weakref
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
import training
from pool import WorkerPool

import deepspeed_cad
from deepspeed_cad.errors import CADUnsupportedError

BLOCK = {"granularity": 16, "timeout_s": 60.0, "links": training.LINKS}


def _step(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> float:
    loss = training.loss_sum(model, batch)
    loss.backward()
    return float(loss.detach())


def _batch(rank: int) -> dict[str, torch.Tensor]:
    return training.pack(training.documents([60, 20] if rank == 0 else [33], seed=rank))


def _other_config(rank: int, world: int) -> None:
    model = training.tiny_llama()
    deepspeed_cad.apply(model, {**BLOCK, "tolerance": 0.05 if rank else 0.1})
    _step(model, _batch(rank))


def _other_model(rank: int, world: int) -> None:
    model = training.tiny_llama(num_hidden_layers=2 + (rank == 1))
    deepspeed_cad.apply(model, BLOCK)
    _step(model, _batch(rank))


def _other_version(rank: int, world: int) -> None:
    from deepspeed_cad.ahead import gather

    before, gather.__version__ = gather.__version__, "0.0.1" if rank == 1 else gather.__version__
    try:
        model = training.tiny_llama()
        deepspeed_cad.apply(model, BLOCK)
        _step(model, _batch(rank))
    finally:
        gather.__version__ = before


def _other_plan(rank: int, world: int) -> None:
    from deepspeed_cad.ahead import plan as room

    plan = room.make_plan

    def swapped(problem: Any) -> Any:
        made = plan(problem)
        if rank == 1:
            object.__setattr__(made, "tasks", made.tasks[::-1].copy())
        return made

    room.make_plan = swapped
    try:
        model = training.tiny_llama()
        deepspeed_cad.apply(model, BLOCK)
        _step(model, _batch(rank))
    finally:
        room.make_plan = plan


def _nan_positions(rank: int, world: int) -> None:
    model = training.tiny_llama()
    deepspeed_cad.apply(model, BLOCK)
    batch = _batch(rank)
    if rank == 1:
        batch["position_ids"] = batch["position_ids"].double()
        batch["position_ids"][0, 3] = float("nan")
    _step(model, batch)


def _jumping_positions(rank: int, world: int) -> None:
    model = training.tiny_llama()
    deepspeed_cad.apply(model, BLOCK)
    batch = _batch(rank)
    if rank == 1:
        batch["position_ids"][0, 5:] += 2
    _step(model, batch)


def _contradicting_neighbours(rank: int, world: int) -> None:
    model = training.tiny_llama()
    deepspeed_cad.apply(model, BLOCK)
    batch = _batch(rank)
    if rank == 1:
        batch["position_ids"] = batch["position_ids"] + 7
    _step(model, batch)


def _no_host_memory(rank: int, world: int) -> None:
    from deepspeed_cad.attention import parking

    model = training.tiny_llama()
    deepspeed_cad.apply(model, {**BLOCK, "keep": "host"})
    before = parking.available_host_memory
    if rank == 1:
        parking.available_host_memory = lambda: parking.RESERVE + (5 << 20)
    try:
        _step(model, _batch(rank))
    finally:
        parking.available_host_memory = before


def _announced_another(rank: int, world: int) -> None:
    from deepspeed_cad.ahead.step import announce
    from deepspeed_cad.session import find_binding

    model = training.tiny_llama()
    deepspeed_cad.apply(model, BLOCK)
    announce(find_binding(model).feed, _batch(rank))
    _step(model, _batch(rank if rank == 0 else 0))


@pytest.mark.parametrize(
    ("function", "kind", "words"),
    [
        (_other_config, "CADPeerError", ['another "cad" block', "give every rank the same"]),
        (_other_model, "CADPeerError", ["another model", "load the same model"]),
        (_other_version, "CADPeerError", ["another version of deepspeed_cad", "install the same version"]),
        (_other_plan, "CADPeerError", ["another plan"]),
        (_nan_positions, "CADDataError", ["position_ids[0, 3] is nan"]),
        (_jumping_positions, "CADDataError", ["rank 1: at row 5 position_ids jump to 7", "rows from 5 to 7"]),
        (_contradicting_neighbours, "CADDataError", ["rank 1", "starts at position 7", "ended at 20"]),
        (_announced_another, "CADDataError", ["is not the one that the loader announced", "look_ahead"]),
    ],
)
def test_every_rank_says_why(workers: WorkerPool, function: Any, kind: str, words: list[str]) -> None:
    errors, _ = workers.try_run(function, 2)
    for rank, error in enumerate(errors):
        assert error is not None, rank
        assert error[0] in (kind, "CADPeerError"), error
        for word in words:
            assert word in error[1], (rank, error[1])


def test_host_memory_that_runs_out_ends_all(workers: WorkerPool) -> None:
    """The rank that has none says how much it wanted, holds and has; the others name it."""
    (other, own), _ = workers.try_run(_no_host_memory, 2)
    assert own is not None and own[0] == "CADError", own
    assert (
        '"keep": "host" needs 64 MiB more host memory beside the 0 MiB' in own[1] and "1029 MiB is available" in own[1]
    )
    assert other is not None and other[0] == "CADPeerError" and "rank 1" in other[1], other


def _dies(rank: int, world: int, when: str) -> None:
    model = training.tiny_llama()
    deepspeed_cad.apply(model, {**BLOCK, "timeout_s": 10.0 if when == "hangs" else 60.0})
    store = dist.distributed_c10d._get_default_store()
    for step in range(3):
        if rank == 1 and step == 1 and when == "before the lengths":
            os._exit(7)
        if rank == 1 and step == 1 and when == "in the exchange":
            transport = deepspeed_cad.current_session().transport
            transport.dispatch = lambda *_: os._exit(7)
        if rank == 1 and step == 1 and when == "hangs":
            store.wait(["failed/0", "failed/2"])
            return
        try:
            _step(model, _batch((rank + step) % 2))
        except deepspeed_cad.CADPeerError:
            store.set(f"failed/{rank}", "")
            raise


def _refuses_in_a_layer(rank: int, world: int) -> None:
    from torch._C._autograd import _top_saved_tensors_default_hooks

    model = training.tiny_llama().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    deepspeed_cad.apply(model, {**BLOCK, "kernel": "flash_attn_2"})
    held: list[weakref.ref[BaseException]] = []
    gc.collect()
    gc.disable()
    try:
        with suppress(CADUnsupportedError):
            try:
                _step(model, _batch(rank))
            except CADUnsupportedError as error:
                held.append(weakref.ref(error))
                raise
        assert held and held[0]() is None
        assert _top_saved_tensors_default_hooks(True) is None
    finally:
        gc.enable()


def test_an_error_that_was_caught_is_let_go_with_the_layer_it_came_from(workers: WorkerPool) -> None:
    # Otherwise the hooks of its activation checkpointing stay for whatever is trained next, where torch is below 2.13.
    workers.run(_refuses_in_a_layer, 2, timeout=60.0)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before the lengths", "in the exchange", "hangs"])
def test_a_peer_that_dies_is_named(workers: WorkerPool, when: str) -> None:
    errors, _ = workers.try_run(_dies, 3, when, grace=60.0)
    for rank in (0, 2):
        assert errors[rank] is not None and errors[rank][0] == "CADPeerError", errors[rank]
        assert re.search("rank 1 (died or hangs|did not come: it was last seen at)", errors[rank][1]), errors[rank][1]
        wanted = "exchange" if when == "in the exchange" else "document lengths"
        assert wanted in errors[rank][1], errors[rank][1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"is_causal": False}, "causal"),
    ],
)
def test_refused_at_start(changes: dict[str, Any], words: str) -> None:
    from deepspeed_cad.session import close_session

    model = training.tiny_llama(**changes)
    with pytest.raises(deepspeed_cad.CADUnsupportedError, match=words):
        deepspeed_cad.apply(model, BLOCK)
    close_session()
