"""Tensor parallelism of host frameworks beside CAD: what they train without it, they train with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import training
from engines import engine_config, import_deepspeed, train_engine
from pool import WorkerPool
from trainers import BLOCK, STEPS, assert_same_and_balanced, step_entry

WORLD, SHARES = 4, 2
LENGTHS = [[300, 20], [40, 30, 9, 1, 50], [100, 100]]


def _rows(rank: int, count: int) -> Iterator[list[torch.Tensor]]:
    """Of this rank's replica."""
    replica = rank // SHARES
    for step in range(count):
        yield training.documents(LENGTHS[(replica + step) % len(LENGTHS)], seed=100 * step + replica)


AUTOTP: list[tuple[str, dict[str, Any], str | None]] = [
    ("ZeRO-0, reentrant", engine_config(0), "reentrant"),
    ("ZeRO-1, accumulation", engine_config(1, gradient_accumulation_steps=2), None),
    ("ZeRO-2, non-reentrant", engine_config(2), "non-reentrant"),
    ("ZeRO-3", engine_config(3), None),
]


def _autotp(rank: int, world: int) -> dict[str, Any]:
    from deepspeed_cad.session import close_session, current_session

    import_deepspeed()
    found = {}
    for name, config, checkpoint in AUTOTP:
        config = {**config, "tensor_parallel": {"autotp_size": SHARES}}
        count = STEPS * config["gradient_accumulation_steps"]
        plain = train_engine(config, checkpoint, _rows(rank, count), step_entry)
        cad = train_engine({**config, "cad": BLOCK}, checkpoint, _rows(rank, count), step_entry)
        session = current_session()
        assert session is not None
        found[name] = (plain, cad, session.describe())
        close_session()
    return found


@pytest.mark.slow
def test_autotp(fresh_workers: WorkerPool) -> None:
    for found in fresh_workers.run(_autotp, WORLD, timeout=240.0):
        for name, (plain, cad, line) in found.items():
            assert_same_and_balanced(name, plain, cad, losses=STEPS * (2 if "accumulation" in name else 1))
            assert "2 replicas of 2 by tensor parallelism" in line
