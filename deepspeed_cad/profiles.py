"""Which cost model the planner uses on this machine."""

from __future__ import annotations

import torch

from deepspeed_cad.cost import PAIRS, CostModel

HOPPER = CostModel(name="hopper", unit="pairs", pair=1.0, row=490.0, key=250.0)
"""Measured on an H200 with FlashAttention-4, forward and backward: a KV row that a task reads costs as much as 250
pairs (benchmarks/kernels.py, short shards with long prefixes), a query row as much as 490 (whole documents of 1 to 64
thousand tokens, where rows and keys together came to 740)."""


def choose_cost(configured: str, device: torch.device) -> CostModel:
    """The cost model for "auto", "pairs" or a profile file."""
    if configured == "pairs":
        return PAIRS
    if configured != "auto":
        return CostModel.load(configured)
    return HOPPER if device.type == "cuda" else PAIRS
