"""One attention call, timed at the start: how fast trainers and reserved servers attend, and ratios made into seconds.

Out: a speed for every rank, the same on all of them, by which the planner divides costs; or the profile in seconds, so
that plans can weigh attention against transfers. Only attention is meant, and in place no rank is timed here: trainers
learn that and what all else takes while they train (feedback/layer_times.py).
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from deepspeed_cad.cost import CostModel
from deepspeed_cad.errors import CADConfigError
from deepspeed_cad.kernels.registry import KERNELS
from deepspeed_cad.planner.plan import Floats
from deepspeed_cad.profiles.measure import Call, time_call
from deepspeed_cad.profiles.profile import USUAL_SHAPE, Profile, ShapeCost, expected_kernel, machine_name

logger = logging.getLogger("deepspeed_cad")

TOKENS = {"cuda": 65536, "cpu": 512}
"""Of the document that is timed for speeds: on a GPU longer than the slices of time in which another process has it.
Beside matrix products 4 ms took 1.86 times as long as alone, the 0.8 s of a layer 2.2 times (two H200, a67af12)."""
REPEATS, BUDGET = {"cuda": 60, "cpu": 5}, {"cuda": 0.4, "cpu": 0.2}
"""On a GPU long enough for its clock to settle: in all about a second."""
FEW_TOKENS = {"cuda": 8192, "cpu": 512}
"""Of the document that is timed for ratios: far below a second in all."""


def find_speeds(
    wanted: str | None, device: torch.device, kernel: str, gather: Callable[[int], Sequence[int]], deterministic: bool
) -> Floats | None:
    """[ranks] speeds beside rank 0: 0.5 takes twice as long. None: all are equal, or taken for it. Collective.

    `wanted` and `kernel` are the keys "speeds" and "kernel"; `gather` gives one whole number of every rank, in their
    order; `deterministic`: whether plans of this rank must depend on no measured time."""
    if wanted is None:
        return None
    if any(gather(int(deterministic))):
        logger.warning(
            '"speeds" is "measure" and does nothing: torch\'s deterministic algorithms are on, on some rank, and plans '
            "must not depend on measured times"
        )
        return None
    # All at once: GPUs of one host share power and cooling, and they do so while training.
    mine, kind = 0, device.type
    try:
        mine = round(_time(device, kernel, TOKENS[kind], REPEATS[kind], BUDGET[kind]) * 1e9)
    except Exception as error:  # whatever a kernel raises: the other ranks wait for this one's number
        logger.warning("attention was not timed: %s", error)
    took = np.array(gather(mine), np.float64) / 1e9
    if len(failed := np.flatnonzero(took == 0.0)):
        logger.warning('"speeds": attention did not run at the start on ranks %s: all count as equal', failed.tolist())
        return None
    return took[0] / took


def in_words(speeds: Floats | None) -> str:
    """For the log; empty where all are taken for equal."""
    return "" if speeds is None or (speeds == 1.0).all() else f"speeds {' '.join(f'{speed:.3g}' for speed in speeds)}, "


def in_seconds(ratios: Profile, device: torch.device, kernel: str) -> Profile:
    """The profile in seconds of this machine; unchanged, with a line in the log, where its kernel does not run.

    It is rough: a profile that `deepspeed-cad profile` wrote knows rows, keys and short tasks too."""
    entry, tokens = ratios.entries[0], FEW_TOKENS[device.type]
    try:
        seconds = _time(device, kernel, tokens, repeats=3, budget=0.1)
    except (RuntimeError, ValueError, TypeError, ImportError, CADConfigError) as error:
        logger.warning("attention was not timed, so its costs stay ratios: %s", error)
        return ratios
    scale = seconds / float(CostModel("", "pairs", entry.pair, entry.row, entry.key, entry.task).of(0, tokens))
    return Profile(
        machine_name(device),
        f"{expected_kernel(kernel, device)}, timed at start",
        tuple(
            ShapeCost(one.shape, *(scale * cost for cost in (one.pair, one.row, one.key, one.task)))
            for one in ratios.entries
        ),
        source=f"{ratios.machine}: ratios; {seconds * 1e3:.3g} ms for {tokens} tokens of one head group",
    )


def _time(device: torch.device, kernel: str, tokens: int, repeats: int, budget: float) -> float:
    """Seconds of a document, forward and backward."""
    name = expected_kernel(kernel, device)
    if (backend := next((one for one in KERNELS if one.name == name), None)) is None:
        raise CADConfigError(f"there is no kernel {name}")
    call = Call("at the start", np.array([0]), np.array([tokens]), 1)
    # One head group: some hundred MB on a GPU beside a model that is there already.
    size = 4 if device.type == "cpu" else USUAL_SHAPE.bytes_per_element
    shape = replace(USUAL_SHAPE, query_heads=USUAL_SHAPE.heads_per_group, groups=1, bytes_per_element=size)
    return time_call(backend, device, shape, call, repeats, budget).seconds
