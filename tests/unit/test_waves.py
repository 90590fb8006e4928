"""Waves: how tasks are cut into them, that attention in waves is exact, and in what order its exchanges start."""

from __future__ import annotations

from typing import Any

import cases
import numpy as np
import pytest
import torch
from attention_ranks import DIM, GROUPS, HEADS, Ranks

from deepspeed_cad.attention.setup import Modes
from deepspeed_cad.exchange.failure.identity import Moment
from deepspeed_cad.kernels.interface import MaskRule
from deepspeed_cad.layout import Layout
from deepspeed_cad.schedule import GROUP, HOME, HOME_ROW, KEY, KIND, QUERY, ROWS, build_slices
from deepspeed_cad.schedule.waves import Cut, _join, split_tasks

SINKS = torch.linspace(-1, 2, HEADS)
EXACT = ("two", "odd", "hundreds", "a rank with no tokens", "documents over borders", "a tail of padding")


def cells(tasks: np.ndarray) -> set[tuple[int, ...]]:
    """(document, row, head group, server) of every row that tasks compute; none twice."""
    found = [
        (int(d), row, group, int(server)) for d, begin, end, first, last, server in tasks for row in range(begin, end)
        for group in range(first, last)
    ]  # fmt: skip
    assert len(found) == len(set(found))
    return set(found)


@pytest.mark.parametrize("window", [None, 19])
@pytest.mark.parametrize("name", list(cases.layouts()))
@pytest.mark.parametrize("waves", [2, 3, 8])
def test_waves_are_the_plan_in_parts(name: str, waves: int, window: int | None) -> None:
    tick = cases.layouts()[name].tick()
    tasks = cases.random_tasks(tick, GROUPS, np.random.default_rng(waves))
    parts = split_tasks(tick, tasks, window, Cut(waves))
    assert len(parts) == waves and all(part.shape[1] == 6 for part in parts)
    each = [cells(part) for part in parts]
    assert set.union(*each) == cells(tasks) and sum(map(len, each)) == len(cells(tasks))
    slices = [build_slices(tick, part, window) for part in parts]
    assert all(not len(one.local) for one in slices[1:]), "what waits for nobody is in the first"
    # Gradients of a home's keys come back in one wave, whoever serves them; and no key travels twice.
    wave_of: dict[tuple[int, ...], int] = {}
    for wave, one in enumerate(slices):
        for row in one.table[one.table[:, KIND] == KEY]:
            for at in range(row[HOME_ROW], row[HOME_ROW] + row[ROWS]):
                assert wave_of.setdefault((row[HOME], at, row[GROUP]), wave) == wave
    whole = build_slices(tick, tasks, window)
    for kind in (QUERY, KEY):
        assert sum(one.served_rows[:, kind].sum() for one in slices) == whole.served_rows[:, kind].sum()


@pytest.mark.parametrize("window, sinks, travel, cut, recompute", [
    (None, None, False, False, False), (19, SINKS, True, False, False), (5, None, False, True, True),
    (None, SINKS, False, False, True),
])  # fmt: skip
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("waves, blocks", [(2, 0), (8, 0), (6, 4)])
def test_attention_in_waves_is_exact(
    name: str, waves: int, blocks: int, window: int | None, sinks: Any, travel: bool, cut: bool, recompute: bool
) -> None:
    """Values have another size than keys; head groups are fewer than 4 waves; some ranks have no tokens."""
    layout = cases.layouts()[name]
    modes = Modes(local_first=bool(waves % 2), recompute=recompute, sinks_travel=travel)
    cut = cut and layout.can_cut(layout.tokens // 2)
    ranks = Ranks(layout, MaskRule(DIM**-0.5, window), modes, sinks, cut, seed=3, waves=waves, blocks=blocks)
    often = any(call.setup.schedule.keys_return_often for call in ranks.calls[0])
    assert often or not blocks or name not in ("two", "documents over borders", "a rank with no tokens")
    assert max(ranks.run().values()) < 1e-10
    for transport in ranks.network.transports:
        assert transport.exchanges == 4 * waves * len(ranks.ticks)


def test_head_groups_that_follow_each_other_are_joined_inside_a_document() -> None:
    tasks = np.array([[1, 0, 9, 2, 4, 3], [0, 0, 9, 0, 1, 2], [1, 0, 9, 1, 2, 3]])
    assert _join(tasks).tolist() == [[0, 0, 9, 0, 1, 2], [1, 0, 9, 1, 4, 3]], "in the order of plans"


def test_one_head_group_of_one_document_is_cut_by_rows() -> None:
    tick = Layout.from_rank_lengths([[1000], [8]]).tick()
    tasks = np.array([(0, 100, 1000, 0, 1, 1), (0, 0, 100, 0, 1, 0), (1, 0, 8, 0, 1, 1)])
    rows = [
        [build_slices(tick, part).served_rows[1].tolist() for part in split_tasks(tick, tasks, None, cut)]
        for cut in (Cut(4), Cut(4, 4), Cut(4, 4, 200))
    ]
    assert sorted(rows[0]) == [[0, 0], [0, 0], [0, 0], [900, 1000]]
    assert rows[1] == [[256, 356], [256, 612], [256, 868], [132, 1000]], "in multiples of 128 from 100 on"
    assert rows[2] == [[400, 500], [0, 0], [400, 900], [100, 1000]], "and of 200: fewer blocks than waves"
    # With a window a later block reads no more keys than the first.
    parts = split_tasks(tick, tasks[:1], 100, Cut(3, 4, 16))
    assert [part[:, 1:3].tolist() for part in parts] == [[[100, 340]], [[340, 580], [580, 820]], [[820, 1000]]]


def test_who_works_most_on_a_head_group_decides_its_wave() -> None:
    """Of the second document: a server that has the first one before it, not one that has the last behind it."""
    tasks = np.array([(0, 0, 1000, 0, 1, 1), (1, 0, 300, 0, 1, 2), (1, 300, 1000, 0, 1, 1), (2, 0, 1000, 0, 1, 2)])
    parts = split_tasks(Layout.from_rank_lengths([[1000] * 3, [], []]).tick(), tasks, None, Cut(2))
    assert [part.tolist() for part in parts] == [tasks[:1].tolist(), tasks[1:].tolist()]


def test_waves_change_no_bit() -> None:
    """Head groups are whole in a wave, so bf16 sums of dK and dV are those of one wave, and outputs of many waves too.

    What comes back early is summed apart, and rounded once more.
    """
    found = []
    for waves in (1, 2, 3, 4):
        ranks = Ranks(
            cases.layouts()["documents over borders"], MaskRule(DIM**-0.5), Modes(),
            SINKS, seed=2, dtype=torch.bfloat16, waves=waves,
        )  # fmt: skip
        outputs = ranks.forward()
        ranks.backward(outputs)
        found.append([*outputs, *(x.grad for leaf in ranks.leaves for x in leaf.values())])
    for other in found[1:3]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))
    close = [torch.equal(one, two) for one, two in zip(found[0], found[3], strict=True)]
    assert all(close[: len(outputs)]) and not all(close)
    for one, two in zip(found[0], found[3], strict=True):
        torch.testing.assert_close(one, two, atol=2**-8 * float(one.detach().abs().max()), rtol=2**-7)


def test_all_ranks_start_the_same_exchanges_in_the_same_order() -> None:
    """Two go out at once, the next when the first is on its way back."""
    for waves, order in ((2, [0, 1, 0, 1]), (3, [0, 1, 0, 2, 1, 2]), (5, [0, 1, 0, 2, 1, 3, 2, 4, 3, 4])):
        ranks = Ranks(cases.layouts()["a rank with no tokens"], MaskRule(DIM**-0.5), waves=waves)
        ranks.run()
        expected = [Moment(0, 0, backward, wave) for backward in (False, True) for wave in order]
        for transport in ranks.network.transports:
            assert transport.moments == expected


def test_gradients_that_come_back_often_are_rounded_once() -> None:
    """In bf16 the sum over many waves errs no more than that of one: it is in fp32 until it is complete."""
    layout = cases.layouts()["documents over borders"]
    one, many = (
        Ranks(layout, MaskRule(DIM**-0.5), seed=5, waves=waves, blocks=blocks, dtype=torch.bfloat16).run()["dv"]
        for waves, blocks in ((1, 0), (8, 8))
    )
    assert many < 1.04 * one  # added up in bf16: 1.09
