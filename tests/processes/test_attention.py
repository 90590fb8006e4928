"""Outputs and gradients of disaggregated attention against each document alone, over real processes."""

from __future__ import annotations

from typing import Any

import cases
import numpy as np
import pytest
import torch
import torch.distributed as dist
from attention_ranks import DIM, GROUPS, HEADS, VALUE, LseTransposed, check_fields, expected_of, rows_of, worst_error
from pool import WorkerPool

from deepspeed_cad.attention.call import AttentionCall
from deepspeed_cad.attention.device_schedule import upload_schedule
from deepspeed_cad.attention.setup import CallCounts, CallSetup, Modes
from deepspeed_cad.cost import PAIRS
from deepspeed_cad.exchange.c10d import C10dTransport
from deepspeed_cad.exchange.transport import Outgoing, Returning
from deepspeed_cad.kernels.interface import MaskRule
from deepspeed_cad.layout import Layout, Tick
from deepspeed_cad.planner import HeadShape, PlanInput
from deepspeed_cad.planner.core import Aim, solve
from deepspeed_cad.planner.own_rows import split_own_rows
from deepspeed_cad.schedule import Schedule
from deepspeed_cad.schedule.waves import Cut, schedule_waves

ON_MANY = {
    "two": Layout.from_stream([200], 2, 100),
    "three": Layout.from_stream([300], 3, 100),
    "four": Layout.from_stream([400], 4, 100),
    "three of four": Layout.from_stream([270, 33, 97], 4, 100),
    "two documents": Layout.from_stream([170, 230], 4, 100),
    "zigzag": Layout.from_stream([350], 4, 96, zigzag=True),
}
"""By where a document lies."""
LAYOUTS = cases.layouts() | ON_MANY


class StrictTransport(C10dTransport):
    """Refuses the layouts that transports of GPUs refuse."""

    def dispatch(self, schedule: Schedule, fields: list[Outgoing], *rest: Any) -> Any:
        check_fields(schedule, fields)
        return super().dispatch(schedule, fields, *rest)

    def give_back(self, schedule: Schedule, fields: list[Returning], *rest: Any) -> Any:
        check_fields(schedule, fields)
        return super().give_back(schedule, fields, *rest)


def planned_tasks(tick: Tick, window: int | None, kept: int) -> np.ndarray:
    """As the planner makes them from one of its starts; −1: home."""
    shape = HeadShape(HEADS, GROUPS, DIM, VALUE, 8)
    problem = PlanInput(tick, shape, PAIRS, window, granularity=16)
    return split_own_rows(tick, solve(problem, Aim(0.05, kept=kept)).tasks, window, 16)


def _run(
    rank: int, world: int, name: str, seed: int, window: int | None, sinks: bool, cut: bool,
    dtype: torch.dtype = torch.float64, waves: int = 1, kept: int | None = None,
) -> float:  # fmt: skip
    layout = LAYOUTS[name]
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
        tasks = cases.random_tasks(tick, GROUPS, rng) if kept is None else planned_tasks(tick, window, kept)
        schedules = schedule_waves(tick, tasks, rank, GROUPS, window, Cut(waves))
        setup = CallSetup(
            upload_schedule(schedules, torch.device("cpu")), LseTransposed(), transport, rule,
            Modes(local_first=bool(seed % 2)), counts, nano_batch,
        )  # fmt: skip
        q0, k0 = int(tick.query_base[rank]), int(tick.key_base[rank])
        rows = slice(q0, q0 + int(tick.query_tokens[rank]))
        keys = slice(k0, k0 + int(tick.key_tokens[rank]))
        outputs.append(AttentionCall(setup)(leaves["q"][rows], leaves["k"][keys], leaves["v"][keys], sink))
    o = torch.cat(outputs)
    o.backward(mine["do"])
    assert transport.exchanges == 4 * len(ticks) * waves
    return worst_error(rank, expected_of(layout, rule, sink, dtype), o, leaves, sink)


@pytest.mark.parametrize(
    "window, sinks, cut, seed",
    [(None, False, False, 0), (None, True, True, 3), (19, True, False, 1), (5, False, True, 2)],
)
@pytest.mark.parametrize("name", ["odd", "a rank with no tokens", "documents over borders"])
def test_random_plans_are_exact(
    workers: WorkerPool, name: str, window: int | None, sinks: bool, cut: bool, seed: int
) -> None:
    """Any plan that covers the tick gives the outputs and gradients of each document alone. All layouts, masks and
    modes in one process: tests/unit/test_attention_ranks.py."""
    assert max(workers.run(_run, cases.layouts()[name].ranks, name, seed, window, sinks, cut)) < 1e-10


@pytest.mark.parametrize("waves, window, cut", [(2, None, True), (7, 19, False)])
@pytest.mark.parametrize("name", ["odd", "a rank with no tokens"])
def test_waves(workers: WorkerPool, name: str, waves: int, window: int | None, cut: bool) -> None:
    """Several exchanges of one tick are under way at once, more than gloo moves at a time."""
    args = (name, 1, window, True, cut, torch.float64, waves)
    assert max(workers.run(_run, cases.layouts()[name].ranks, *args)) < 1e-10


@pytest.mark.parametrize(
    "name, window, sinks, waves, kept",
    [
        ("two", 19, True, 1, -1),
        ("three", None, True, 1, 0),
        ("four", 19, False, 2, -1),
        ("three of four", None, True, 2, 0),
        ("two documents", None, True, 1, 1),
        ("zigzag", None, True, 1, 0),
    ],
)
def test_plans_of_documents_on_many_ranks(
    workers: WorkerPool, name: str, window: int | None, sinks: bool, waves: int, kept: int
) -> None:
    """Dealt out by head groups, or begun at home with own rows split off where a window allows it."""
    layout = ON_MANY[name]
    tasks = planned_tasks(layout.tick(), window, kept)
    if kept == 0 and name in ("three", "four", "zigzag"):
        assert (tasks[tasks[:, 5] == 0, 4] <= GROUPS - 1).all(), "not dealt out"
    args = (name, 1, window, sinks, False, torch.float64, waves, kept)
    assert max(workers.run(_run, layout.ranks, *args)) < 1e-10


def test_bf16(workers: WorkerPool) -> None:
    """Bounds by the kernel's own error: test_attention_ranks.py. Values here are about 1, sums of gradients about 4."""
    assert max(workers.run(_run, 3, "odd", 2, None, True, False, torch.bfloat16)) < 2**-5
