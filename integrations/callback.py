"""A callback for the Hugging Face Trainer: `Trainer(callbacks=[CADCallback()])` says at the end what CAD saved.

In: the statistics of the session. Out: a line in the log of this package with every logged step, and in the Trainer's
final figures (`train_runtime` and so on, and with them in WandB and others) three estimates in seconds:

    cad/saved_s             shorter by so much is the run, at most: attention of the slowest rank without CAD, less with
    cad/would_have_waited_s how long a rank would have waited for the slowest one without CAD, mean over ranks
    cad/still_waits_s       the same with CAD, from the plans

They are planned loads times seconds: those of the machine's profile, or, where the planner counts pairs, of one
attention call that is timed when training ends. Exchanges that were not hidden are not in them, see `cad/waited_s`.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from deepspeed_cad.integrations.structure import decoder_layers
from transformers import TrainerCallback

from deepspeed_cad.attention.layer import LayerKind, kernel_need
from deepspeed_cad.attention.microbatch import PlanKey
from deepspeed_cad.kernels.interface import Kernel, MaskRule, Sequences
from deepspeed_cad.session import find_binding

if TYPE_CHECKING:
    from deepspeed_cad.integrations.transformers import Binding

logger = logging.getLogger("deepspeed_cad")

_ROWS = {"cuda": 16384, "cpu": 512}
"""Length of the document whose attention is timed."""


class CADCallback(TrainerCallback):
    """Logs what CAD does, and at the end of training what it saved. Harmless where CAD is off."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, model: Any = None, **kwargs: Any) -> None:
        """One line per logged step, at level INFO."""
        binding = None if model is None else find_binding(model)
        if binding is None or "loss" not in (logs or {}) or not state.is_world_process_zero:
            return
        figures = binding.session.take_statistics("callback")
        logger.info(
            "step %d: attention of the slowest rank over the mean %.3f, without CAD %.3f; %.1f MiB sent, %.1f ms to "
            "plan a micro-batch, %.3f s waited for exchanges",
            state.global_step, figures.imbalance, figures.imbalance_before, figures.bytes_sent / 2**20,
            figures.planning_s * 1e3 / max(figures.micro_batches, 1), figures.waited_s,
        )  # fmt: skip

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """The summary as a sentence, at level INFO; its figures are in the Trainer's log."""
        last = state.log_history[-1] if state.log_history else {}
        if state.is_world_process_zero and "cad/saved_s" in last:
            logger.info(
                "CAD saved up to %.1f s: without it each rank would have waited %.1f s for the slowest one's "
                "attention, with it %.1f s",
                last["cad/saved_s"], last["cad/would_have_waited_s"], last["cad/still_waits_s"],
            )  # fmt: skip


@dataclass(frozen=True)
class Savings:
    """Seconds over a whole run, estimated; see the head of this file."""

    saved_s: float
    would_have_waited_s: float
    still_waits_s: float

    def as_events(self) -> dict[str, float]:
        """By the names of the log."""
        return {
            "cad/saved_s": self.saved_s,
            "cad/would_have_waited_s": self.would_have_waited_s,
            "cad/still_waits_s": self.still_waits_s,
        }


def estimate_savings(binding: Binding) -> Savings | None:
    """What CAD saved since the session opened; None before anything was trained."""
    session, keys = binding.session, binding.feed.keys
    statistics = session.statistics
    decoder = binding.decoder()
    if not keys or not statistics.micro_batches or decoder is None:
        return None
    # Loads are summed over kinds of layers, one layer of each.
    layers = len(decoder_layers(decoder) or keys) / len(keys)
    seconds = layers * (1.0 if session.cost.unit == "seconds" else _seconds_per_unit(binding, next(iter(keys))))
    return Savings(
        (statistics.slowest_before - statistics.slowest) * seconds,
        (statistics.slowest_before - statistics.mean) * seconds,
        (statistics.slowest - statistics.mean) * seconds,
    )


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
    q, k, v = (
        torch.randn(rows, many, size, device=device, dtype=dtype)
        for many, size in (
            (shape.query_heads, shape.head_dim),
            (shape.groups, shape.head_dim),
            (shape.groups, shape.value_dim),
        )
    )
    cumulative = np.array([0, rows], np.int32)
    on_device = torch.from_numpy(cumulative).to(device)
    sequences = Sequences(cumulative, cumulative, on_device, on_device, rows, rows)
    _time(kernel, q, k, v, sequences, rule)
    seconds = min(_time(kernel, q, k, v, sequences, rule) for _ in range(3))
    units = float(session.cost.cost_for(shape).of(0, rows, key.window)) * shape.groups
    return seconds / units


def _time(
    kernel: Kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences, rule: MaskRule
) -> float:
    if q.device.type == "cuda":
        torch.cuda.synchronize(q.device)
    begin = time.perf_counter()
    o, lse = kernel.forward(q, k, v, sequences, rule)
    kernel.backward(torch.ones_like(o), q, k, v, o, lse, sequences, rule)
    if q.device.type == "cuda":
        torch.cuda.synchronize(q.device)
    return time.perf_counter() - begin
