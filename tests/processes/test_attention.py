"""Outputs and gradients of disaggregated attention against each document alone, in fp64, over real processes."""

from __future__ import annotations

from typing import Any

import cases
import numpy as np
import pytest
import torch
import torch.distributed as dist
from pool import WorkerPool

from deepspeed_cad.attention.call import AttentionCall
from deepspeed_cad.attention.device_schedule import upload_schedule
from deepspeed_cad.attention.setup import CallCounts, CallSetup, Modes
from deepspeed_cad.exchange.c10d import C10dTransport
from deepspeed_cad.exchange.transport import Outgoing, Returning
from deepspeed_cad.kernels.interface import MaskRule, Sequences
from deepspeed_cad.kernels.torch_math import TorchMath
from deepspeed_cad.layout import Layout
from deepspeed_cad.schedule import Schedule, build_slices, schedule_rank

HEADS, GROUPS, DIM, VALUE = 6, 3, 8, 5


class StrictTransport(C10dTransport):
    """Refuses the layouts that transports of GPUs refuse; c10d by itself takes any."""

    def dispatch(self, schedule: Schedule, fields: list[Outgoing], slot: int) -> Any:
        for field in fields:
            assert field.home.shape[1] == schedule.groups and field.home.stride(2) == 1
        return super().dispatch(schedule, fields, slot)

    def give_back(self, schedule: Schedule, fields: list[Returning], slot: int) -> Any:
        for field in fields:
            assert field.served.shape[0] == schedule.served_rows[schedule.rank, field.kind]
            assert field.served.is_contiguous(), f"strides {field.served.stride()} cannot be returned"
            assert field.home.shape[1] == schedule.groups and field.home.stride(2) == 1
        return super().give_back(schedule, fields, slot)


class LseTransposed(TorchMath):
    """Gives and takes LSE as the FlashAttention libraries do: a transposed view of [H, Q]."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences, rule: MaskRule, out: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse = super().forward(q, k, v, sequences, rule, out)
        return o, lse.t().contiguous().t()


def _rows(layout: Layout, rank: int) -> dict[str, torch.Tensor]:
    """Q, K, V and dO of the rank, the same whatever the world: drawn per document."""
    count = int(layout.tokens[rank])
    shapes = {"q": (HEADS, DIM), "k": (GROUPS, DIM), "v": (GROUPS, VALUE), "do": (HEADS, VALUE)}
    made = {name: torch.full((count, *shape), 7.0, dtype=torch.float64) for name, shape in shapes.items()}
    seg = layout.segments
    for document, begin, end, _, offset in seg.select(seg.rank == rank).to_array():
        whole = _document(layout, int(document))
        for name in made:
            made[name][offset : offset + end - begin] = whole[name][begin:end]
    return made


def _document(layout: Layout, document: int) -> dict[str, torch.Tensor]:
    length = int(layout.segments.end[layout.segments.document == document].max())
    gen = torch.Generator().manual_seed(document)
    shapes = {"q": (HEADS, DIM), "k": (GROUPS, DIM), "v": (GROUPS, VALUE), "do": (HEADS, VALUE)}
    return {name: torch.randn(length, *shape, generator=gen, dtype=torch.float64) for name, shape in shapes.items()}


def _expected(layout: Layout, rank: int, rule: MaskRule, sinks: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """O, dQ, dK, dV of the rank's rows from each document alone; dsinks over the rank's own rows is not included."""
    mine = _rows(layout, rank)
    result = {"o": torch.zeros_like(mine["do"]), **{f"d{n}": torch.zeros_like(mine[n]) for n in "qkv"}}
    seg = layout.segments
    for document, begin, end, _, offset in seg.select(seg.rank == rank).to_array():
        whole = _document(layout, int(document))
        q, k, v = (whole[n].requires_grad_() for n in "qkv")
        o = cases.document_attention(q, k, v, rule.scale, rule.window, rule.softcap, sinks)
        o.backward(whole["do"])
        here = slice(offset, offset + end - begin)
        result["o"][here] = o.detach()[begin:end]
        for n, x in zip("qkv", (q, k, v), strict=True):
            result[f"d{n}"][here] = x.grad[begin:end]
    return result


def _run(rank: int, world: int, name: str, seed: int, window: int | None, keep: bool, sinks: bool, cut: bool) -> float:
    layout = cases.layouts()[name]
    rule = MaskRule(DIM**-0.5, window, 3.0 if seed % 2 else None)
    sink = torch.linspace(-1, 2, HEADS, dtype=torch.float64).requires_grad_() if sinks else None
    transport = StrictTransport(dist.group.WORLD, torch.device("cpu"))
    counts = CallCounts()
    rng = np.random.default_rng(seed)
    mine = _rows(layout, rank)
    leaves = {n: mine[n].clone().requires_grad_() for n in "qkv"}
    at = layout.tokens // 2
    ticks = layout.cut(at) if cut and layout.can_cut(at) else (layout.tick(),)
    outputs = []
    for slot, tick in enumerate(ticks):
        tasks = cases.random_tasks(tick, GROUPS, rng)
        schedule = schedule_rank(tick, build_slices(tick, tasks, window), rank, GROUPS, window)
        setup = CallSetup(
            upload_schedule(schedule, torch.device("cpu")), LseTransposed(), transport, rule,
            Modes(local_first=bool(seed % 2), keep_received=keep), counts, slot,
        )  # fmt: skip
        q0, k0 = int(tick.query_base[rank]), int(tick.key_base[rank])
        rows = slice(q0, q0 + int(tick.query_tokens[rank]))
        keys = slice(k0, k0 + int(tick.key_tokens[rank]))
        outputs.append(AttentionCall(setup)(leaves["q"][rows], leaves["k"][keys], leaves["v"][keys], sink))
    o = torch.cat(outputs)
    o.backward(mine["do"])
    expected = _expected(layout, rank, rule, sink.detach() if sinks else None)
    padded = torch.ones(len(o), dtype=torch.bool)
    seg = layout.segments.select(layout.segments.rank == rank)
    for offset, length in zip(seg.offset, seg.end - seg.begin, strict=True):
        padded[offset : offset + length] = False
    assert (o[padded] == 0).all()
    got = {"o": o.detach(), **{f"d{n}": leaves[n].grad for n in "qkv"}}
    assert transport.exchanges == 4 * len(ticks)
    if sinks:
        dsinks = torch.zeros(HEADS, dtype=torch.float64)
        for document in range(layout.documents):
            whole = _document(layout, document)
            s = sink.detach().clone().requires_grad_()
            out = cases.document_attention(*(whole[n] for n in "qkv"), rule.scale, rule.window, rule.softcap, s)
            out.backward(whole["do"])
            dsinks += s.grad
        total = sink.grad.clone()
        dist.all_reduce(total)
        assert torch.allclose(total, dsinks, atol=1e-10), (total, dsinks)
    return max([float((got[n] - expected[n]).abs().max()) for n in got if got[n].numel()] or [0.0])


@pytest.mark.parametrize("name", list(cases.layouts()))
def test_random_plans_are_exact(workers: WorkerPool, name: str) -> None:
    """Any plan that covers the tick gives the outputs and gradients of each document alone."""
    world = cases.layouts()[name].ranks
    for seed, (window, keep, sinks, cut) in enumerate(
        [(None, False, False, False), (None, True, True, True), (19, False, True, False), (5, True, False, True)]
    ):
        assert max(workers.run(_run, world, name, seed, window, keep, sinks, cut)) < 1e-10
