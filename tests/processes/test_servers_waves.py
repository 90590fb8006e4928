"""Waves beside reserved servers, in real processes: exact, in as little memory as was asked for, and one error on all
where there is too little."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import training
from jobs import BLOCK, Job
from landing import counted
from model_cases import tiny_model
from pool import WorkerPool
from ports import free_port
from served import BLOCK as USUAL
from served import Served, play

import deepspeed_cad

LENGTHS = [[420, 3, 39], [60, 1, 230, 37], []]
KIB = 2**-20
"""In GiB."""


class Counted(NamedTuple):
    """What a process gives."""

    result: Any
    most: int
    """Bytes that were landing at once."""
    waves: tuple[int, int]
    """Fewest and most of any pass."""
    tried: int


def _play(rank: int, world: int, has: float, *args: Any) -> Counted:
    with counted(has) as landing:
        result = play(rank, world, *args)
    assert landing.now == 0
    return Counted(result, landing.most, landing.span, landing.tried)


def _run(
    workers: WorkerPool, trainers: int, servers: int, train: Any, *args: Any, has: float = float("inf"), **block: Any
) -> list[Counted]:
    given = {**USUAL, "servers": {"reserved": servers}, **block}
    found = workers.run(_play, trainers + servers, has, free_port(), given, train, *args, joined=False)
    for one in found[trainers:]:
        served: Served = one.result
        assert served.code == 0 and served.held == 0 and served.opened <= 2, served
        assert (served.micro_batches > 0) == (one.waves[0] > 0)
    return found


def _train(rank: int, trainers: int, block: dict[str, Any], checkpoint: bool) -> dict[str, Any]:
    """The worst error of outputs and gradients against each document alone, relative."""
    changes = {"sliding_window": 12, "max_position_embeddings": 512, "num_key_value_heads": 4, "num_attention_heads": 8}
    model, reference = (tiny_model("gpt_oss", torch.float64, **changes).train() for _ in range(2))
    deepspeed_cad.apply(model, block)
    if checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    worst = 0.0
    for step in range(2):
        docs = training.documents(LENGTHS[(rank + step) % 3], seed=rank)
        model.zero_grad()
        reference.zero_grad()
        ids, positions, _ = training.pack(docs).values()
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
        logits.square().sum().backward()
        for doc, part in zip(docs, logits.detach().split([len(doc) for doc in docs])):
            alone = reference(input_ids=doc[None], position_ids=torch.arange(len(doc))[None], use_cache=False).logits[0]
            alone.square().sum().backward()
            worst = max(worst, float((part - alone).abs().max() / alone.abs().max()))
        for ours, theirs in zip(model.parameters(), reference.parameters()) if docs else ():
            if theirs.grad is not None:
                scale = theirs.grad.abs().max().clamp(min=1e-3)
                worst = max(worst, float((ours.grad - theirs.grad).abs().max() / scale))
    session = deepspeed_cad.current_session()
    assert session is not None
    return {"worst": worst, "landing": session.statistics.landing_bytes}


def _check(found: list[Counted], trainers: int, limit: float) -> None:
    """Exact, in as many waves on every process, and within the limit (bytes)."""
    assert all(one.result["worst"] < 1e-10 for one in found[:trainers]), found
    assert all(0 < one.most <= limit for one in found), found
    assert len({(one.waves, one.tried) for one in found}) == 1 and found[0].waves[1] >= 3, found


@pytest.mark.parametrize(
    ("trainers", "servers", "kib", "checkpoint", "block"),
    [
        (2, 1, 510, False, {"overlap": "interleave"}),
        (1, 2, 260, False, {"overlap": "local_first"}),
        pytest.param(1, 2, 620, True, {"overlap": "interleave"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_exact_within_the_limit(
    workers: WorkerPool, trainers: int, servers: int, kib: int, checkpoint: bool, block: dict[str, Any]
) -> None:
    """Sinks, a window in every second layer; head groups in waves of their own, and blocks of their rows."""
    found = _run(workers, trainers, servers, _train, checkpoint, memory=kib * KIB, **block)
    _check(found, trainers, kib * 1024)
    assert all(0 < one.result["landing"] <= kib * 1024 for one in found[:trainers])


def test_waves_become_smaller_where_a_rank_lacks_memory(workers: WorkerPool) -> None:
    """Nothing is asked for, and not all is there: trainers cut again, servers hear of it and cut alike."""
    has = 450 * 1024
    found = _run(workers, 2, 1, _train, False, has=has, overlap="local_first")
    _check(found, 2, has)
    assert found[0].tried > 4, "more often than there are plans"


@pytest.mark.slow
def test_too_little_is_one_error_on_every_process(job: Job) -> None:
    job.launch_all(3, "well", "9", block={**BLOCK, "memory": 1e-6})
    codes = job.ends("rank0")
    assert 0 not in codes.values(), codes
    for name in codes:
        assert "does not fit: cut into the smallest waves, what lands at rank" in job.said(name), job.said(name)
        assert '"memory" to at least' in job.said(name)
    assert "micro-batches served" not in job.said("rank2") or "is done: 0 micro" in job.said("rank2")
