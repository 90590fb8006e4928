"""FSDP2 (`fully_shard`) and FSDP1 in plain torch loops: `deepspeed_cad.apply` before sharding, gloo on CPU."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.fsdp._fully_shard._fsdp_param_group as home
import trainers
import training
from pool import WorkerPool
from torch._dynamo.utils import counters
from wrapped import LATE, MICRO, WAYS, train

import deepspeed_cad

WORLD = 2
STEPS = trainers.STEPS * MICRO
INTERLEAVED = ["FSDP2, checkpointing", "FSDP2, root"]
"""Ways that are tried with nano-batches, too: where layers are wrapped they alternate inside them, and a wrapper around
the whole model is none."""


def _train(cad: bool, rank: int, world: int, way: str, late: bool = False, block: Any = training.BLOCK) -> tuple:
    """An entry of every micro-batch, how often parameters were gathered, and how many operations were compiled."""
    counters.clear()
    rows = trainers.PackedRows(64)
    batches = [trainers.collate([rows[i * world + rank]]) for i in range(STEPS)]
    with mock.patch.object(home, "foreach_all_gather", wraps=home.foreach_all_gather) as gather:
        found = train(way, batches, trainers.step_entry, block if cad else None, torch.device("cpu"), late)
    for binding in deepspeed_cad.current_session().bindings.values() if cad and block != training.BLOCK else ():
        assert ("FSDP wraps its layers" in binding.in_turn) == (way != "FSDP2, root"), binding.in_turn
    return found, gather.call_count, counters["stats"]["calls_captured"]


def _compare(rank: int, world: int, half: int) -> dict[str, Any]:
    late, interleaved = ([], INTERLEAVED) if half else (LATE, [])
    found = {way: trainers.without_and_with(_train, rank, world, way) for way in list(WAYS)[half::2]}
    for way in late:
        found[f"late {way}"] = found[way][0], _train(True, rank, world, way, late=True)
        trainers.start_anew()
    for way in interleaved:
        block = {**training.BLOCK, "overlap": "interleave"}
        found[f"interleaved {way}"] = trainers.without_and_with(_train, rank, world, way, block=block)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.long)])
def test_same_losses_gathers_and_balance(workers: WorkerPool, half: int) -> None:
    for found in workers.run(_compare, WORLD, half, timeout=200.0):
        for way, (plain, cad) in found.items():
            trainers.assert_same_and_balanced(way, plain[0], cad[0], losses=STEPS)
            assert [entry[trainers.BEFORE] for entry in cad[0]] == pytest.approx(trainers.unbalanced(STEPS, WORLD)), way
            assert cad[1] == plain[1], (way, "parameters are gathered as often as without CAD")
            assert (plain[1] > 0) == ("FSDP2" in way)
            assert (cad[2] > 0) == (plain[2] > 0) == ("compiled" in way)
