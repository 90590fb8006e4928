"""Bad input is one clear error on every rank, before anything wrong is trained; ranks that are slow are waited for."""

import gc
import os
import re
import time
import weakref
from contextlib import nullcontext, suppress
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import training
from pool import WorkerPool
from told import loss_and_gradients, padded
from torch._C._autograd import _top_saved_tensors_default_hooks

import deepspeed_cad
from deepspeed_cad.ahead import gather, plan, worker
from deepspeed_cad.errors import CADUnsupportedError
from deepspeed_cad.exchange.failure import patience
from deepspeed_cad.session import find_binding

BLOCK = {"granularity": 16, "timeout_s": 60.0, "links": training.LINKS}


def _batch(rank: int) -> dict[str, torch.Tensor]:
    return training.pack(training.documents([60, 20] if rank == 0 else [33], seed=rank))


def _wrong(rank: int, world: int, what: str) -> None:
    """A step in which rank 1 differs in one thing, or has bad positions, or labels that count padding."""
    differs = rank == 1
    model = training.tiny_llama(num_hidden_layers=3 if differs and what == "model" else 2)
    batch, given, make = _batch(rank), _batch(rank), plan.make_plan
    if differs and what == "nan":
        given["position_ids"] = given["position_ids"].double()
        given["position_ids"][0, 3] = float("nan")
    elif differs and what == "neighbours":
        given["position_ids"] += 7
    elif what == "padding":
        given = padded([90], "right", "copied" if differs else "masked", width=128)

    def swapped(problem: Any) -> Any:
        made = make(problem)
        object.__setattr__(made, "tasks", made.tasks[::-1].copy())
        return made

    patches = {"version": (gather, "__version__", "0.0.1"), "plan": (plan, "make_plan", swapped)}
    with mock.patch.object(*patches[what]) if differs and what in patches else nullcontext():
        deepspeed_cad.apply(model, {**BLOCK, "tolerance": 0.05 if differs and what == "config" else 0.1})
        if what == "announced":
            feed = find_binding(model).feed
            feed.announce(feed.read(batch))
            given = _batch(0)
        (loss_and_gradients if what == "padding" else training.forward_backward)(model, given)


@pytest.mark.parametrize("what, kind, words", [
    ("config", "CADPeerError", ['another "cad" block', "give every rank the same"]),
    ("model", "CADPeerError", ["another model", "load the same model"]),
    ("version", "CADPeerError", ["another version of deepspeed_cad", "install the same version"]),
    ("plan", "CADPeerError", ["another plan"]),
    ("nan", "CADDataError", ["position_ids[0, 3] is nan"]),
    ("neighbours", "CADDataError", ["rank 1", "starts at position 7", "ended at 20"]),
    ("padding", "CADDataError", ["rank 1: 38 tokens from row 90 on are hidden by attention_mask", "-100"]),
    ("announced", "CADDataError", ["is not the one that the loader announced", "look_ahead"]),
])  # fmt: skip
def test_every_rank_says_why(workers: WorkerPool, what: str, kind: str, words: list[str]) -> None:
    for error in workers.try_run(_wrong, 2, what)[0]:
        assert error is not None and error[0] in (kind, "CADPeerError"), error
        assert all(word in error[1] for word in words), error[1]


def _dies(rank: int, world: int, when: str) -> None:
    model = training.tiny_llama()
    deepspeed_cad.apply(model, {**BLOCK, "timeout_s": 10.0 if when == "hangs" else 60.0})
    store = dist.distributed_c10d._get_default_store()
    for step in range(3):
        if rank == 1 and step == 1:
            if when == "in the exchange":
                deepspeed_cad.current_session().transport.dispatch = lambda *_: os._exit(7)
            if when == "hangs":
                store.wait(["failed/0", "failed/2"])
                return
        try:
            training.forward_backward(model, _batch((rank + step) % 2))
        except deepspeed_cad.CADPeerError:
            store.set(f"failed/{rank}", "")
            raise


@pytest.mark.slow
@pytest.mark.parametrize("when", ["in the exchange", "hangs"])
def test_a_peer_that_dies_is_named(workers: WorkerPool, when: str) -> None:
    errors, _ = workers.try_run(_dies, 3, when, grace=60.0)
    wanted = "exchange" if when == "in the exchange" else "document lengths"
    for error in (errors[0], errors[2]):
        assert error is not None and error[0] == "CADPeerError" and wanted in error[1], error
        assert re.search("rank 1 (died or hangs|did not come: it was last seen at)", error[1]), error[1]


def _refuses_in_a_layer(rank: int, world: int) -> None:
    model = training.checkpointed(training.tiny_llama().train(), "non-reentrant")
    deepspeed_cad.apply(model, {**BLOCK, "kernel": "flash_attn_2"})
    held: list[weakref.ref[BaseException]] = []
    gc.collect()
    gc.disable()
    try:
        with suppress(CADUnsupportedError):
            try:
                training.forward_backward(model, _batch(rank))
            except CADUnsupportedError as error:
                held.append(weakref.ref(error))
                raise
        assert held and held[0]() is None and _top_saved_tensors_default_hooks(True) is None
    finally:
        gc.enable()


def test_an_error_that_was_caught_is_let_go_with_the_layer_it_came_from(workers: WorkerPool) -> None:
    # Otherwise the hooks of its activation checkpointing stay for whatever is trained next, where torch is below 2.13.
    workers.run(_refuses_in_a_layer, 2, timeout=60.0)


LENGTHS = [[120], [20, 30, 7], [64, 40], [90, 5, 31]]


def _documents(rank: int, index: int) -> list[torch.Tensor]:
    return training.documents(LENGTHS[(rank + index) % 4], seed=10 * index + rank)


def _take_turns_to_be_slow(rank: int, world: int) -> tuple[int, int]:
    """Each rank in its turn plans, computes and reads until the other one has looked at the board some times.

    Gives how often this rank told that it is blocked, and how often it asked from an exchange whether others are.
    """
    model, reference = training.tiny_llama().train(), training.tiny_llama()
    deepspeed_cad.apply(model, {**BLOCK, "timeout_s": 300.0})
    session = deepspeed_cad.current_session()
    board, store = session.liveness, dist.distributed_c10d._get_default_store()
    block, standstill, plan_tick = board.block, board._standstill, session.plans.plan_tick

    def is_slow(*ways: str) -> None:
        """Until the other one has looked."""

        def looks() -> int:
            return sum(store.add(f"{way}/{1 - rank}", 0) for way in ways)

        enough = looks() + 6
        while looks() < enough:
            time.sleep(0.01)

    def batches() -> Any:
        for index in range(10):
            if index == 8 + rank:
                is_slow("told", "asked")
            yield training.pack(_documents(rank, index))

    def slow_plan(*given: Any, **named: Any) -> Any:
        if session.plans.turn == 3 + rank:
            is_slow("told")
        return plan_tick(*given, **named)

    board.block = lambda *given: (store.add(f"told/{rank}", 1), block(*given))
    board._standstill = lambda exchange: (exchange and store.add(f"asked/{rank}", 1), standstill(exchange))[1]
    tell, look = mock.patch.object(worker, "TELL_S", 0.02), mock.patch.object(patience, "LOOK_S", 0.03)
    with tell, look, mock.patch.object(session.plans, "plan_tick", slow_plan):
        for i, batch in enumerate(session.look_ahead(batches(), model)):
            if i == 8:
                with torch.no_grad():
                    training.loss_sum(model, training.pack(_documents(rank, 9)))
            loss = training.loss_sum(model, batch)
            if i == 5 + rank:
                is_slow("asked")
            loss.backward()
            assert abs(float(loss.detach()) - training.alone(reference, _documents(rank, i))[0]) < 1e-8, (rank, i)
    return store.add(f"told/{rank}", 0), store.add(f"asked/{rank}", 0)


def test_ranks_that_are_only_slow_are_waited_for(workers: WorkerPool) -> None:
    ranks = workers.run(_take_turns_to_be_slow, 2)
    assert all(told > 5 for told, _ in ranks) and all(asked > 5 for _, asked in ranks), ranks
