"""Which cost model the planner uses on this machine."""

from __future__ import annotations

import torch

from deepspeed_cad.cost import PAIRS, CostModel

HOPPER = CostModel(name="hopper", unit="pairs", pair=1.0, key=250.0)
"""Measured on an H200 with FlashAttention-4, forward and backward: reading a KV row costs as much as 250 pairs."""


def choose_cost(configured: str, device: torch.device) -> CostModel:
    """The cost model for "auto", "pairs" or a profile file."""
    if configured == "pairs":
        return PAIRS
    if configured != "auto":
        return CostModel.load(configured)
    return HOPPER if device.type == "cuda" else PAIRS
