"""Ratios made into seconds: one attention call, timed at the start, where no profile fits the machine.

In: a profile of which only ratios are known. Out: the same in seconds, so that plans can weigh attention against
transfers. It is rough: a profile that `deepspeed-cad profile` wrote knows rows, keys and short tasks too.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import torch

from deepspeed_cad.cost import CostModel
from deepspeed_cad.kernels.registry import KERNELS
from deepspeed_cad.profiles.choice import expected_kernel, machine_name
from deepspeed_cad.profiles.measure import Call, Sizes, time_call
from deepspeed_cad.profiles.profile import Profile

logger = logging.getLogger("deepspeed_cad")

TOKENS = {"cuda": 8192, "cpu": 512}
"""Of the document that is timed: long enough that the kernel runs at its speed, far below a second in all."""
_SIZES = Sizes(0, (), (), (), 0, repeats=3, budget=0.1, mixes=0)


def in_seconds(ratios: Profile, device: torch.device, kernel: str) -> Profile:
    """The profile in seconds of this machine; unchanged, with a line in the log, where its kernel does not run."""
    name = expected_kernel(kernel, device)
    backend = next((one for one in KERNELS if one.name == name), None)
    entry = ratios.entries[0]
    # One head group: the cost model is that of one, and less is enough.
    shape = replace(entry.shape, query_heads=entry.shape.heads_per_group, groups=1)
    if device.type == "cpu":
        shape = replace(shape, bytes_per_element=4)
    tokens = TOKENS[device.type]
    try:
        if backend is None:
            raise RuntimeError(f"there is no kernel {name}")
        call = Call("at the start", np.array([0]), np.array([tokens]), 1)
        seconds = time_call(backend, device, shape, call, _SIZES).seconds
    except (RuntimeError, ValueError, TypeError, ImportError) as error:
        logger.warning("attention was not timed, so its costs stay ratios: %s", error)
        return ratios
    counted = CostModel("", "pairs", entry.pair, entry.row, entry.key, entry.task).of([0], [tokens])
    scale = seconds / float(counted.sum())
    scaled = tuple(
        replace(one, pair=one.pair * scale, row=one.row * scale, key=one.key * scale, task=one.task * scale)
        for one in ratios.entries
    )
    source = f"{ratios.machine}: ratios; {seconds * 1e3:.3g} ms for {tokens} tokens of one head group"
    return replace(
        ratios, machine=machine_name(device), kernel=f"{name}, timed at start", entries=scaled, unit="seconds",
        source=source,
    )  # fmt: skip
