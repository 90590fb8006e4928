"""`Trainer(callbacks=[CADCallback()])` says at the end what CAD saved: three estimates in the Trainer's final figures.

    cad/saved_s             shorter by so much is the run, at most: attention of the slowest rank without CAD, less with
    cad/would_have_waited_s how long a rank would have waited for the slowest one without CAD, mean over ranks
    cad/still_waits_s       the same with CAD, from the plans

They are planned loads times seconds: those of the machine's profile, or, where the planner counts pairs, of one
attention call that is timed when training ends. Exchanges that were not hidden are not in them, see `cad/waited_s`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from deepspeed_cad.integrations.structure import decoder_layers
from torch.utils.benchmark import Timer
from transformers import TrainerCallback

from deepspeed_cad.attention.layer import LayerKind, kernel_need
from deepspeed_cad.attention.microbatch import PlanKey
from deepspeed_cad.kernels.interface import MaskRule, Sequences

if TYPE_CHECKING:
    from deepspeed_cad.integrations.transformers import Binding

logger = logging.getLogger("deepspeed_cad")

_ROWS = {"cuda": 16384, "cpu": 512}
"""Length of the document whose attention is timed."""


class CADCallback(TrainerCallback):
    """Has the Trainer's final figures say what CAD saved, and says it at level INFO. Harmless where CAD is off."""

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """The figures as a sentence."""
        last = state.log_history[-1] if state.log_history else {}
        if state.is_world_process_zero and "cad/saved_s" in last:
            logger.info(
                "CAD saved up to %.1f s: without it each rank would have waited %.1f s for the slowest one's "
                "attention, with it %.1f s",
                last["cad/saved_s"], last["cad/would_have_waited_s"], last["cad/still_waits_s"],
            )  # fmt: skip


def estimate_savings(binding: Binding) -> dict[str, float]:
    """What CAD saved since the session opened, in seconds, by the names of the log; nothing before training."""
    session, keys = binding.session, binding.feed.keys
    statistics = session.statistics
    decoder = binding.decoder()
    if not keys or not statistics.micro_batches or decoder is None:
        return {}
    # Loads are summed over kinds of layers, one layer of each.
    layers = len(decoder_layers(decoder) or keys) / len(keys)
    seconds = layers * (1.0 if session.cost.unit == "seconds" else _seconds_per_unit(binding, next(iter(keys))))
    return {
        "cad/saved_s": (statistics.slowest_before - statistics.slowest) * seconds,
        "cad/would_have_waited_s": (statistics.slowest_before - statistics.mean) * seconds,
        "cad/still_waits_s": (statistics.slowest - statistics.mean) * seconds,
    }


def _seconds_per_unit(binding: Binding, key: PlanKey) -> float:
    """Seconds that one unit of the cost model takes, forward and backward: one document is timed."""
    session, shape = binding.session, key.shape
    device = session.device
    model = binding.model()
    dtype = torch.bfloat16 if model is None else next(model.parameters()).dtype
    if dtype.itemsize != shape.bytes_per_element:  # autocast
        dtype = {2: torch.bfloat16, 4: torch.float32}[shape.bytes_per_element]
    rule = MaskRule(shape.head_dim**-0.5, key.window)
    kernel = session.kernel(kernel_need(LayerKind(shape, rule, dtype), device))
    rows = _ROWS.get(device.type, 512)
    sizes = (shape.query_heads, shape.head_dim), (shape.groups, shape.head_dim), (shape.groups, shape.value_dim)
    q, k, v = (torch.randn(rows, *size, device=device, dtype=dtype) for size in sizes)
    cumulative = np.array([0, rows], np.int32)
    on_device = torch.from_numpy(cumulative).to(device)
    sequences = Sequences(cumulative, cumulative, on_device, on_device, rows, rows)

    def run() -> None:
        o, lse = kernel.forward(q, k, v, sequences, rule)
        kernel.backward(torch.ones_like(o), q, k, v, o, lse, sequences, rule)

    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())  # warms up, waits for the GPU
    return min(timer.timeit(1).mean for _ in range(3)) / (
        float(session.cost.cost_for(shape).of(0, rows, key.window)) * shape.groups
    )
