"""Data, arguments and reference losses for tests that train through the Hugging Face Trainer or Accelerate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import training
from torch.utils.data import Dataset

LENGTHS = [[200], [24, 30, 40, 50, 56], [100] * 2, [1, 9, 190], [20] * 10, [150, 50], [200], [40] * 5]
"""Documents of each packed row; all rows have 200 tokens, as packing gives."""


class PackedRows(Dataset):
    """Packed rows: input_ids, position_ids and labels, the same on every rank."""

    def __init__(self, rows: int, seed: int = 0) -> None:
        self.rows = [training.pack(training.documents(LENGTHS[i % len(LENGTHS)], seed + i)) for i in range(rows)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: value[0] for name, value in self.rows[index].items()}


@dataclass(frozen=True)
class Case:
    """One way to train: a DeepSpeed JSON or none, and arguments of the Trainer that differ from the tests' own."""

    name: str
    deepspeed: dict[str, Any] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Rows stacked to [rows, tokens]."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def losses_of(log_history: list[dict[str, Any]]) -> list[float]:
    """Training losses in the order of steps."""
    return [entry["loss"] for entry in log_history if "loss" in entry]


def assert_same(with_cad: list[float], without: list[float], tolerance: float = 1e-5) -> None:
    """Losses of both runs agree, and training moved them."""
    assert len(with_cad) == len(without) > 1
    for ours, theirs in zip(with_cad, without, strict=True):
        assert abs(ours - theirs) <= tolerance * max(1.0, abs(theirs)), (with_cad, without)
    assert len(set(without)) > 1
