"""Reserved servers attend one part while trainers run linear layers of the other: exact, and shares that fit both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import training
from pool import WorkerPool
from served import run

import deepspeed_cad
from deepspeed_cad.planner.plan import HeadShape
from deepspeed_cad.profiles.profile import Profile, ShapeCost

LENGTHS = [[400], [40, 130, 9, 1, 120]]
"""A document of one trainer is the whole micro-batch: the cut lies inside."""
STEPS = 5


def _profile(folder: Path, pair: float) -> str:
    """Costs by which a pair takes so many seconds."""
    path = folder / "costs.json"
    Profile("test", "any", (ShapeCost(HeadShape(8, 4, 8, 8, 8), pair=pair),), unit="seconds").save(path)
    return str(path)


def _train(rank: int, trainers: int, block: dict[str, Any]) -> dict[str, Any]:
    reference, model = training.tiny_llama(num_hidden_layers=3), training.tiny_llama(num_hidden_layers=3)
    deepspeed_cad.apply(model, block).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    session = deepspeed_cad.current_session()
    assert session is not None and session.config.overlap_used == "interleave"
    loads = []
    for step in range(STEPS):
        own = training.documents(LENGTHS[rank], seed=100 * step + rank)
        training.step_as_alone(model, reference, own)
        loads.append(session.take_statistics("test").load)
    known = session.learned.non_attention
    linear = None if known is None else known.seconds(0)
    return {
        "loads": np.stack(loads).tolist(),
        "linear": None if linear is None else linear.tolist(),
        "reason": session.find_binding(model).in_turn,
        "idle": session.statistics.servers_idle,
        # Forward and backward of both parts of every layer.
        "parts": session.counts.forwards == session.counts.backwards == 2 * 3 * STEPS,
    }


def test_same_as_each_document_alone(workers: WorkerPool, tmp_path: Path) -> None:
    """Linear layers take far longer than what is called attention here: once that is known, trainers attend nothing."""
    results, _ = run(workers, 2, 1, _train, cost=_profile(tmp_path, 1e-12))
    # Servers tell trainer 0 how long they attended.
    assert 0 < results[0]["idle"] < 1 and all(one["idle"] == 0 for one in results[1:])
    for result in results:
        assert result["reason"] == "" and result["parts"]
        assert result["linear"] == results[0]["linear"] and min(result["linear"]) > 0
        last = result["loads"][-1]
        assert sum(last[:2]) < 1e-3 * sum(last)
