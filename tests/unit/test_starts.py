"""When ranks begin to attend: whole layers end together, by a clock that knows when keys and queries arrive."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_cad.cost import CostModel
from deepspeed_cad.layout import Layout
from deepspeed_cad.planner import HeadShape, PlanInput, make_plan
from deepspeed_cad.planner.finish import begin_in_place
from deepspeed_cad.planner.plan import Plan

SHAPE = HeadShape(8, 2, 64, 64, 2)
COST = CostModel("a nanosecond per pair", "seconds", pair=1e-9)


def planned(layout: Layout, seconds: np.ndarray, knows: bool = True) -> Plan:
    tick = layout.tick()
    base = begin_in_place(seconds, tick, COST, SHAPE.groups, None) if knows else None
    return make_plan(PlanInput(tick, SHAPE, COST, tolerance=0.01, granularity=16, base_load=base))


def ends(layout: Layout, plan: Plan, seconds: np.ndarray) -> np.ndarray:
    """[ranks] when attention ends: own tasks at once, those of others when all of their homes have come to it."""
    before = seconds * layout.tokens
    documents = {int(document): int(rank) for document, rank in zip(layout.segments.document, layout.segments.rank)}
    end = before.copy()
    tasks = sorted(plan.tasks.tolist(), key=lambda task: before[documents[task[0]]] * (documents[task[0]] != task[5]))
    for document, begin, stop, first, last, server in tasks:
        work = float(COST.of(np.array([begin]), np.array([stop])).sum()) * (last - first)
        end[server] = max(end[server], before[documents[document]]) + work
    return end


def attention(layout: Layout) -> np.ndarray:
    work = COST.of(layout.segments.begin, layout.segments.end) * SHAPE.groups
    return np.bincount(layout.segments.rank, work, layout.ranks)


@pytest.mark.parametrize(
    "lengths",
    [
        [[4096] * 4, [4096, 4096, 1600]],  # rows 100 % and 60 % full
        [[4096] * 4, [9792]],
        [[8192] * 2, [2048] * 4, [4096] * 3, []],
    ],
)
def test_whole_layers_end_together_where_attention_fills_the_difference(lengths: list[list[int]]) -> None:
    layout = Layout.from_rank_lengths(lengths)
    work, tokens = attention(layout), layout.tokens
    # Outside attention a layer takes as long as half of the mean attention of the fullest rank.
    seconds = np.full(layout.ranks, 0.5 * work.mean() / tokens.max())
    even = (seconds * tokens + work.mean()).mean()
    end = ends(layout, planned(layout, seconds), seconds)
    early = seconds[0] * (tokens.max() - tokens)
    assert end.max() < 1.03 * even or (early > work).any(), (end, even)
    assert end.max() <= 1.001 * ends(layout, planned(layout, seconds, knows=False), seconds).max()


def test_what_fills_no_time() -> None:
    """A rank with nothing of its own before others arrive, and rows that read keys of a late rank."""
    assert begin_in_place(np.full(2, 1e-4), Layout.from_rank_lengths([[8192], []]).tick(), COST, 2, None) is None
    tick = Layout.from_stream([16384], 2, 8192).tick()
    assert begin_in_place(np.array([2e-6, 1e-6]), tick, COST, SHAPE.groups, None) is None
    starts = begin_in_place(np.array([1e-6, 2e-6]), tick, COST, SHAPE.groups, None)
    assert starts is not None and starts == pytest.approx([0.0, 8192e-6]), "earlier rows read no later ones"


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(1024, 12000), max_size=5), min_size=2, max_size=5),
    share=st.floats(0.05, 4.0),
    slow=st.floats(1.0, 1.5),
)
def test_it_never_ends_later_than_without(lengths: list[list[int]], share: float, slow: float) -> None:
    layout = Layout.from_rank_lengths(lengths)
    if not layout.tokens.any():
        return
    seconds = np.full(layout.ranks, share * attention(layout).mean() / layout.tokens.max())
    seconds[0] *= slow
    clock = partial(ends, layout, seconds=seconds)
    knows, without = clock(plan=planned(layout, seconds)).max(), clock(plan=planned(layout, seconds, False)).max()
    longest = max(length for own in lengths for length in own)
    block = float(COST.of(np.array([longest - 32]), np.array([longest])).sum())
    assert knows <= 1.03 * without + block
