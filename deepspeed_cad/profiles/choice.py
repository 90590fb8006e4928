"""Which profile the planner uses on this machine.

In: the config key "cost", the device, the configured kernel. Out: a profile; the same on ranks with the same hardware
and files, which they compare before the first step.
"""

from __future__ import annotations

import logging
import platform
from pathlib import Path

import torch

from deepspeed_cad.kernels.interface import KernelNeed
from deepspeed_cad.planner.plan import HeadShape
from deepspeed_cad.profiles.profile import Profile, ShapeCost

logger = logging.getLogger("deepspeed_cad")

USUAL_SHAPE = HeadShape(32, 8, 128, 128, 2)
"""Of an 8B Llama: what is measured unless one asks for another."""

PAIRS = Profile("pairs", "any", (ShapeCost(USUAL_SHAPE, pair=1.0),), unit="pairs")
"""One per query-key pair, whatever the heads."""

GENERIC_GPU = Profile("any GPU", "any", (ShapeCost(USUAL_SHAPE, pair=1.0, row=490.0, key=250.0),), unit="pairs")
"""Ratios measured on an H200 with FlashAttention-4: a query row costs as much as 490 pairs and a KV row that a task
reads as much as 250. Other kernels and GPUs lie near them, because both come from tiles and memory traffic that all of
them have."""

SHIPPED = Path(__file__).parent


def user_path() -> Path:
    """Where `deepspeed-cad profile` writes and "auto" looks first."""
    return Path.home() / ".cache" / "deepspeed_cad" / "profile.json"


def machine_name(device: torch.device) -> str:
    """What profiles of this machine are filed under."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU {platform.processor() or platform.machine()}"


def expected_kernel(configured: str, device: torch.device) -> str:
    """The kernel that layers with ordinary heads will run on: the configured one, or the first that does not refuse."""
    from deepspeed_cad.kernels.registry import KERNELS

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    need = KernelNeed(
        device, dtype, USUAL_SHAPE.head_dim, USUAL_SHAPE.value_dim, USUAL_SHAPE.heads_per_group
    )  # fmt: skip
    found = [kernel.name for kernel in KERNELS if configured in ("auto", kernel.name)]
    willing = [kernel.name for kernel in KERNELS if kernel.name in found and kernel.refuse(need) is None]
    return (willing or found or [configured])[0]


def choose_profile(configured: str, device: torch.device, kernel: str = "auto") -> Profile:
    """The profile for "auto", "pairs" or a file.

    "auto": the user's own if it is of this machine and kernel, else the one that ships for them, else on a GPU the
    ratios of another, else counted pairs. Raises CADConfigError for a file that cannot be read.
    """
    if configured == "pairs":
        return PAIRS
    if configured != "auto":
        return Profile.load(configured)
    wanted = (machine_name(device), expected_kernel(kernel, device))
    paths = [user_path(), *sorted(SHIPPED.glob("*.json"))]
    for path in paths:
        if path.is_file():
            profile = Profile.load(path)
            if (profile.machine, profile.kernel) == wanted:
                logger.info("attention costs what %s says (%s)", path, profile.name)
                return profile
    return GENERIC_GPU if device.type == "cuda" else PAIRS
