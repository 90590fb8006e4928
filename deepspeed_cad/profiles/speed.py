"""How fast each rank runs attention: one fixed call that all ranks time at once at the start.

In: the key "speeds". Out: a speed for every rank, the same on all of them, by which the planner divides costs: at 0.5 a
rank takes twice the seconds that they say. Only attention is meant: how long a trainer takes for all else is measured
while it trains (feedback/non_attention.py), in seconds of that trainer, so nothing counts twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from deepspeed_cad.kernels.registry import KERNELS
from deepspeed_cad.planner.plan import Floats, HeadShape
from deepspeed_cad.profiles.choice import USUAL_SHAPE, expected_kernel
from deepspeed_cad.profiles.measure import Call, Sizes, time_call
from deepspeed_cad.profiles.profile import Profile

logger = logging.getLogger("deepspeed_cad")

TOKENS = {"cuda": 65536, "cpu": 512}
"""Of the document that is timed: long enough that kernels run at their speed, and on a GPU longer than the slices of
time in which another process has it. Beside matrix products 16384 tokens (4 ms) took 1.86 times as long as alone, and
the attention of a layer, 0.8 s, took 2.2 times (two H200, commit a67af12)."""
GROUPS = {"cuda": 1, "cpu": 1}
"""Head groups: some hundred MB on a GPU, beside a model that is there already."""
_SIZES = {
    "cuda": Sizes(0, (), (), (), 0, repeats=60, budget=0.4, mixes=0),
    "cpu": Sizes(0, (), (), (), 0, repeats=5, budget=0.2, mixes=0),
}
"""On a GPU long enough for its clock to settle: in all about a second."""
FAILED = 0
"""In place of nanoseconds, where the kernel does not run."""
Gather = Callable[[int], Sequence[int]]
"""One whole number of every rank, in rank order; all ranks leave it together."""


def find_speeds(
    wanted: str | None,
    device: torch.device,
    kernel: str,
    gather: Gather,
    deterministic: bool,
    cost: Profile | None = None,
) -> Floats | None:
    """[ranks] speeds, 1 where a task takes what the costs say; None: ranks are equal, or taken for it.

    Collective, for "measure".

    Args:
        wanted: the key "speeds".
        device: where this rank attends.
        kernel: the key "kernel".
        gather: tells numbers among the ranks.
        deterministic: whether plans of this rank must depend on no measured time.
        cost: of the trainers' plans; None on a server, which makes none.
    """
    if wanted is None:
        return None
    if any(gather(int(deterministic))):
        logger.warning(
            '"speeds" is "measure" and does nothing: torch\'s deterministic algorithms are on, on some rank, and plans '
            "must not depend on measured times"
        )
        return None
    # All at once: GPUs of one host share power and cooling, and they do so while training.
    took = np.array(gather(_time(device, kernel)), np.float64) / 1e9
    failed = np.flatnonzero(took <= FAILED)
    if len(failed):
        logger.warning(
            '"speeds": attention did not run at the start on ranks %s, so all ranks are taken for equally fast',
            ", ".join(map(str, failed)),
        )
        return None
    # Costs in seconds say how long the call takes, so a rank 0 that is slow itself is seen too. Others only compare
    # tasks with each other.
    expected = float(took[0])
    if cost is not None and cost.unit == "seconds":
        one = cost.cost_for(call_shape(device)).of([0], [TOKENS[device.type]])
        expected = float(one.sum()) * GROUPS[device.type]
    return expected / took


def in_words(speeds: Floats | None) -> str:
    """For the log; empty where speeds are not used."""
    return "" if speeds is None else f"speeds {' '.join(f'{speed:.3g}' for speed in speeds)}, "


def call_shape(device: torch.device) -> HeadShape:
    """Heads of the call that is timed."""
    groups = GROUPS[device.type]
    shape = replace(USUAL_SHAPE, query_heads=USUAL_SHAPE.heads_per_group * groups, groups=groups)
    return replace(shape, bytes_per_element=4) if device.type == "cpu" else shape


def _time(device: torch.device, kernel: str) -> int:
    """Nanoseconds of the call, forward and backward; FAILED where it does not run."""
    name = expected_kernel(kernel, device)
    call = Call("at the start", np.array([0]), np.array([TOKENS[device.type]]), GROUPS[device.type])
    try:
        backend = next((one for one in KERNELS if one.name == name), None)
        if backend is None:
            raise RuntimeError(f"there is no kernel {name}")
        return round(time_call(backend, device, call_shape(device), call, _SIZES[device.type]).seconds * 1e9)
    except Exception as error:  # whatever a kernel raises: the other ranks wait for this one's number
        logger.warning("attention was not timed: %s", error)
        return FAILED
