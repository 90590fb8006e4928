"""Outputs and gradients of disaggregated attention against each document alone, over real processes."""

from __future__ import annotations

from typing import Any

import cases
import numpy as np
import pytest
import torch
import torch.distributed as dist
from attention_ranks import DIM, GROUPS, HEADS, LseTransposed, check_fields, expected_of, rows_of
from pool import WorkerPool

from deepspeed_cad.attention.call import AttentionCall
from deepspeed_cad.attention.device_schedule import upload_schedule
from deepspeed_cad.attention.setup import CallCounts, CallSetup, Modes
from deepspeed_cad.exchange.c10d import C10dTransport
from deepspeed_cad.exchange.transport import Outgoing, Returning
from deepspeed_cad.kernels.interface import MaskRule
from deepspeed_cad.schedule import Schedule
from deepspeed_cad.schedule.waves import schedule_waves


class StrictTransport(C10dTransport):
    """Refuses the layouts that transports of GPUs refuse."""

    def dispatch(self, schedule: Schedule, fields: list[Outgoing], *rest: Any) -> Any:
        check_fields(schedule, fields)
        return super().dispatch(schedule, fields, *rest)

    def give_back(self, schedule: Schedule, fields: list[Returning], *rest: Any) -> Any:
        check_fields(schedule, fields)
        return super().give_back(schedule, fields, *rest)


def _run(
    rank: int, world: int, name: str, seed: int, window: int | None, keep: bool, sinks: bool, cut: bool,
    dtype: torch.dtype = torch.float64, waves: int = 1,
) -> float:  # fmt: skip
    layout = cases.layouts()[name]
    rule = MaskRule(DIM**-0.5, window, 3.0 if seed % 2 else None)
    sink = torch.linspace(-1, 2, HEADS, dtype=dtype).requires_grad_() if sinks else None
    transport = StrictTransport(dist.group.WORLD, torch.device("cpu"))
    counts = CallCounts()
    rng = np.random.default_rng(seed)
    mine = rows_of(layout, rank, dtype)
    leaves = {n: mine[n].clone().requires_grad_() for n in "qkv"}
    at = layout.tokens // 2
    ticks = layout.cut(at) if cut and layout.can_cut(at) else (layout.tick(),)
    outputs = []
    for nano_batch, tick in enumerate(ticks):
        tasks = cases.random_tasks(tick, GROUPS, rng)
        schedules = schedule_waves(tick, tasks, rank, GROUPS, window, waves)
        setup = CallSetup(
            upload_schedule(schedules, torch.device("cpu")), LseTransposed(), transport, rule,
            Modes(local_first=bool(seed % 2), keep_received=keep), counts, nano_batch,
        )  # fmt: skip
        q0, k0 = int(tick.query_base[rank]), int(tick.key_base[rank])
        rows = slice(q0, q0 + int(tick.query_tokens[rank]))
        keys = slice(k0, k0 + int(tick.key_tokens[rank]))
        outputs.append(AttentionCall(setup)(leaves["q"][rows], leaves["k"][keys], leaves["v"][keys], sink))
    o = torch.cat(outputs)
    o.backward(mine["do"])
    assert transport.exchanges == 4 * len(ticks) * waves
    right = expected_of(layout, rule, sink, dtype)
    pairs = {"o": o.detach(), **{f"d{n}": leaves[n].grad for n in "qkv"}}
    errors = [float((x.double() - right.ranks[rank][n]).abs().max()) for n, x in pairs.items() if x.numel()]
    if sink is not None and right.sinks is not None:
        total = sink.grad.double()
        dist.all_reduce(total)
        errors.append(float((total - right.sinks).abs().max() / right.sinks.abs().max()))
    return max(errors, default=0.0)


@pytest.mark.parametrize(
    "window, keep, sinks, cut",
    [(None, False, False, False), (None, True, True, True), (19, False, True, False), (5, True, False, True)],
)
@pytest.mark.parametrize("name", list(cases.layouts()))
def test_random_plans_are_exact(
    workers: WorkerPool, name: str, window: int | None, keep: bool, sinks: bool, cut: bool
) -> None:
    """Any plan that covers the tick gives the outputs and gradients of each document alone."""
    seed = 2 * int(keep) + int(sinks)
    assert max(workers.run(_run, cases.layouts()[name].ranks, name, seed, window, keep, sinks, cut)) < 1e-10


@pytest.mark.parametrize("waves, keep, cut", [(2, False, True), (3, True, False), (4, False, False)])
@pytest.mark.parametrize("name", ["odd", "a rank with no tokens", "documents over borders"])
def test_waves(workers: WorkerPool, name: str, waves: int, keep: bool, cut: bool) -> None:
    """Several exchanges of one tick are under way at once, more than gloo moves at a time."""
    args = (name, 1, 19 if keep else None, keep, True, cut, torch.float64, waves)
    assert max(workers.run(_run, cases.layouts()[name].ranks, *args)) < 1e-10


def test_bf16(workers: WorkerPool) -> None:
    """Bounds by the kernel's own error: test_attention_ranks.py. Values here are about 1, sums of gradients about 4."""
    assert max(workers.run(_run, 3, "odd", 2, None, False, True, False, torch.bfloat16)) < 2**-5
