"""Attention whose backward has another plan than its forward: outputs and gradients against each document alone."""

from __future__ import annotations

from typing import Any

import cases
import numpy as np
import pytest
import torch
import torch.distributed as dist
from attention_ranks import DIM, GROUPS, HEADS, VALUE, LseTransposed, check_fields, expected_of, rows_of, worst_error
from pool import WorkerPool

from deepspeed_cad.attention.call import Released
from deepspeed_cad.attention.device_schedule import upload_schedule
from deepspeed_cad.attention.layer import LayerKind
from deepspeed_cad.attention.parking import Parking
from deepspeed_cad.attention.setup import CallCounts, CallSetup, Modes
from deepspeed_cad.exchange.failure.watchdog import Alarm
from deepspeed_cad.exchange.packed import ComparedFirst, PackedTransport
from deepspeed_cad.exchange.transport import Outgoing, Returning
from deepspeed_cad.kernels.interface import MaskRule
from deepspeed_cad.layout import Layout, LocalSegments, assemble
from deepspeed_cad.pipeline.phase import Phase, ProgramTick
from deepspeed_cad.pipeline.tick_call import TickCall
from deepspeed_cad.planner.plan import HeadShape
from deepspeed_cad.schedule import Schedule
from deepspeed_cad.schedule.waves import WHOLE, Cut, schedule_waves


class StrictTransport(PackedTransport):
    """Refuses the layouts that transports of GPUs refuse."""

    def dispatch(self, schedule: Schedule, fields: list[Outgoing], *rest: Any) -> Any:
        check_fields(schedule, fields)
        return super().dispatch(schedule, fields, *rest)

    def give_back(self, schedule: Schedule, fields: list[Returning], *rest: Any) -> Any:
        check_fields(schedule, fields)
        return super().give_back(schedule, fields, *rest)


def _layout(name: str, idle: int | None) -> Layout:
    """A layout, with a rank at its end that has no rows and only serves."""
    found = cases.layouts()[name]
    if idle is None:
        return found
    segments = found.segments
    local = [
        LocalSegments(*(column[segments.rank == r] for column in (segments.begin, segments.end, segments.offset)), n)
        for r, n in enumerate(found.tokens.tolist())
    ]
    return assemble([*local, LocalSegments.none(0)])


def _run(
    rank: int, world: int, name: str, seed: int, window: int | None, sinks: bool, checkpointed: bool,
    dtype: torch.dtype = torch.float64, parked: bool = False, cut: Cut = WHOLE,
) -> float:  # fmt: skip
    lot = Parking(torch.device("cpu"), 1024) if parked else None
    layout = _layout(name, world - 1)
    rule = MaskRule(DIM**-0.5, window, 3.0 if seed % 2 else None)
    sink = torch.linspace(-1, 2, HEADS, dtype=dtype).requires_grad_() if sinks else None
    transport = StrictTransport(
        ComparedFirst(dist.group.WORLD, Alarm(dist.get_rank(), None, 300.0)), torch.device("cpu")
    )
    counts = CallCounts()
    rng = np.random.default_rng(seed)
    tick = layout.tick()
    kind = LayerKind(HeadShape(HEADS, GROUPS, DIM, VALUE, dtype.itemsize), rule, dtype)
    program = [ProgramTick(kind, (0,))]

    def phase(backward: bool) -> Phase:
        tasks = cases.random_tasks(tick, GROUPS, rng)
        schedule = upload_schedule(schedule_waves(tick, tasks, rank, GROUPS, window, cut), torch.device("cpu"))
        setup = CallSetup(schedule, LseTransposed(), transport, rule, Modes(bool(seed % 2), parking=lot), counts)
        return Phase(program, [0] if layout.tokens[rank] else [], lambda tick, label: setup, backward)

    forward, backward = phase(False), phase(True)
    if not layout.tokens[rank]:
        for one in (forward, backward):
            one.finish()
        assert transport.exchanges == 4 * cut.waves
        if sinks:
            dist.all_reduce(torch.zeros(HEADS, dtype=torch.float64))
        return 0.0
    mine = rows_of(layout, rank, dtype)
    leaves = {n: mine[n].clone().requires_grad_() for n in "qkv"}
    call = TickCall(forward.enter(0, "layer"), lambda: backward.enter(0, "layer"))
    forward.finish()
    if checkpointed:
        with torch.no_grad():
            call(leaves["q"], leaves["k"], leaves["v"], sink)
        if lot is not None:
            lot.settle()
            assert call.parked is not None and call.state is call.parked and call.parked.is_away
    o = call(leaves["q"], leaves["k"], leaves["v"], sink)
    o.backward(mine["do"])
    backward.finish()
    assert (
        transport.exchanges == 4 * cut.waves
        and counts.replays == int(checkpointed)
        and isinstance(call.state, Released)
    )
    return worst_error(rank, expected_of(layout, rule, sink, dtype), o, leaves, sink)


@pytest.mark.parametrize(
    "window, sinks, checkpointed", [(None, False, False), (None, True, True), (19, True, False), (5, False, True)]
)
@pytest.mark.parametrize("name", ["odd", "a tail of padding"])
def test_two_plans_are_exact(
    workers: WorkerPool, name: str, window: int | None, sinks: bool, checkpointed: bool
) -> None:
    """Rows whose backward runs on another rank than their forward, and a rank without rows that only serves."""
    world = cases.layouts()[name].ranks + 1
    assert max(workers.run(_run, world, name, int(sinks) + 2, window, sinks, checkpointed)) < 1e-10


@pytest.mark.parametrize(
    ("name", "window", "cut"),
    [("odd", None, Cut(3)), ("one", 19, Cut(5, 4, 2)), ("a tail of padding", None, Cut(8, 2, 2))],
    ids=str,
)
def test_in_waves(workers: WorkerPool, name: str, window: int | None, cut: Cut) -> None:
    """By head groups, and by blocks of their rows: each wave serves and returns on its own."""
    world = cases.layouts()[name].ranks + 1
    args = (name, 2, window, True, True, torch.float64, False, cut)
    assert max(workers.run(_run, world, *args)) < 1e-10


def test_bf16(workers: WorkerPool) -> None:
    assert max(workers.run(_run, 4, "odd", 2, None, True, False, torch.bfloat16)) < 2**-5


def test_what_a_stage_keeps_is_parked(workers: WorkerPool) -> None:
    """Only where activations are checkpointed: else the layer behind attention holds O anyway."""
    assert max(workers.run(_run, 4, "odd", 2, None, True, True, torch.float64, True)) < 1e-10
    assert max(workers.run(_run, 4, "odd", 2, None, True, False, torch.float64, True)) < 1e-10
