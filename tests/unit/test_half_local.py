"""Rows that stay in place while keys of other ranks come to them: what moves, what is run, and that nothing changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_ranks import CPU, DIM, GROUPS, HEADS, Ranks

from deepspeed_cad.attention.device_schedule import share_out, upload_schedule
from deepspeed_cad.attention.forward import Kept
from deepspeed_cad.attention.setup import Modes
from deepspeed_cad.kernels.interface import MaskRule
from deepspeed_cad.layout import Layout
from deepspeed_cad.planner.constants import IN_PLACE
from deepspeed_cad.schedule import HOME, KEY, KIND, QUERY, SERVER, build_slices, schedule_rank

LONG = Layout.from_stream([300], 3, 100)
"""One document over three ranks."""
TASKS = np.array([(0, 0, 100, 0, 3, 0), (0, 100, 200, 0, 3, 1), (0, 200, 300, 2, 3, 1), (0, 200, 300, 0, 2, 2)])
"""Rank 1 runs its own rows of all head groups; and of one those of rank 2."""
SINKS = torch.linspace(-1, 2, HEADS, dtype=torch.float64)


def test_own_rows_stay_and_only_keys_come() -> None:
    slices = build_slices(LONG.tick(), TASKS)
    # Of queries only those of rank 2's head group 2 move, of keys all that is read.
    assert slices.served_rows.tolist() == [[0, 0], [100, 2 * 200 + 300], [0, 2 * 300]]
    assert slices.table[slices.table[:, KIND] == QUERY][:, [HOME, SERVER]].tolist() == [[2, 1]]
    # Keys that rows of others read come first: those of head group 2, which rank 1's own rows read in part.
    assert slices.half_local.tolist() == [
        [1, 0, 2, 0, 100, 300, 200, 200], [1, 2, 3, 0, 100, 0, 200, 300], [2, 0, 2, 0, 100, 0, 300, 300],
    ]  # fmt: skip
    schedule = schedule_rank(LONG.tick(), slices, 1, 3)
    assert [(b.q_row, b.k_row, b.q_rows, b.k_rows, b.k_step) for b in schedule.half_local] == [
        (0, 300, 100, 200, 200), (0, 0, 100, 200, 300),
    ]  # fmt: skip
    first, second = (upload_schedule(one, CPU) for one in (schedule, schedule_rank(LONG.tick(), slices, 2, 3)))
    assert first.waves[0].keys_overlap and not second.waves[0].keys_overlap, "head group 2 is read twice"
    assert not first.lands_apart and not second.lands_apart, "in one wave no keys return twice"
    keys = slices.table[(slices.table[:, KIND] == KEY) & (slices.table[:, SERVER] == 2)]
    assert set(keys[:, HOME]) == {0, 1, 2}, "its own keys lie beside the others"


@pytest.mark.parametrize(("rows", "stay"), [(32, True), (31, False)])
def test_few_rows_run_with_those_of_others(rows: int, stay: bool) -> None:
    """A kernel call of their own would cost more than copying them."""
    own = 32 * IN_PLACE
    layout = Layout.from_stream([2 * own], 2, own)
    tasks = np.array([(0, 0, own, 0, 3, 0), (0, own, own + rows, 0, 3, 1), (0, own + rows, 2 * own, 0, 3, 0)])
    slices = build_slices(layout.tick(), tasks)
    assert len(slices.half_local) == stay and slices.served_rows[1, QUERY] == (0 if stay else 3 * rows)


def test_two_streams_run_every_batch() -> None:
    tick = Layout.from_rank_lengths([[8], [4]]).tick()
    tasks = [
        (0, *rows, g, g + 1, at) for g, end in enumerate((7, 6, 4, 2)) for at, rows in enumerate(((0, end), (end, 8)))
    ]
    schedule = schedule_rank(tick, build_slices(tick, np.array([*tasks, (1, 0, 4, 0, 4, 1)])), 0, 4)
    assert len(upload_schedule(schedule, CPU, True).all_local) == len(schedule.local) == 4


def test_shares_of_local_batches_have_equal_work() -> None:
    """A hundred documents of one token have 100 pairs in each of 12 head groups, one of 13 tokens has 91 in each."""
    tick = Layout.from_rank_lengths([[13, *[1] * 100], [1]]).tick()
    rest = [(d, 0, 1, *part) for d in range(1, 101) for part in ((0, 12, 0), (12, 13, 1))]
    tasks = np.array([(0, 0, 13, 0, 1, 1), (0, 0, 13, 1, 13, 0), *rest, (101, 0, 1, 0, 13, 1)])
    batches = schedule_rank(tick, build_slices(tick, tasks), 0, 13).local
    for expected in (
        [[(100, 0, 11)], [(100, 11, 12), (13, 1, 13)]], [[(100, 0, 8)], [(100, 8, 12), (13, 1, 5)], [(13, 5, 13)]],
    ):  # fmt: skip
        found = share_out(batches, len(expected))
        assert [[(b.q_rows, b.group_begin, b.group_end) for b in part] for part in found] == expected


@pytest.mark.parametrize("waves", [1, 2])
@pytest.mark.parametrize("window", [None, 130])
def test_own_rows_in_place_are_exact_and_kept_once(waves: int, window: int | None) -> None:
    ranks = Ranks(LONG, MaskRule(DIM**-0.5, window), Modes(), SINKS, tasks=[TASKS], waves=waves)
    assert any(wave.half_local for call in ranks.calls[0] for wave in call.setup.schedule.waves)
    outputs = ranks.forward()
    kept = [call.expect(Kept) for call in ranks.calls[0]]
    assert [sum(len(served.o_RGV) for served in one.served) for one in kept] == [0, 100, 0]
    ranks.backward(outputs)
    assert max(ranks.errors(outputs).values()) < 1e-12


@pytest.mark.parametrize("tasks, one, two", [
    # Whole: one batch that writes every row of O needs no copy, so it is not cut.
    ([(0, 0, 8, 0, 3, 0), (1, 0, 4, 0, 3, 1)], ([(8, 0, 3)], []), ([(8, 0, 3)], [])),
    # One head group runs elsewhere: cut on one stream, dealt out on two.
    ([(0, 0, 8, 0, 2, 0), (0, 0, 8, 2, 3, 1), (1, 0, 4, 0, 3, 1)], ([(8, 0, 1)], [(8, 1, 2)]), ([(8, 0, 2)], [])),
    (
        [(0, 0, 8, 0, 1, 0), (0, 0, 8, 1, 2, 0), (0, 0, 8, 2, 3, 1), (1, 0, 4, 0, 3, 1)],
        ([(8, 0, 1)], [(8, 1, 2)]),
        ([(8, 0, 1)], [(8, 1, 2)]),
    ),
    # Both read keys 0 to 3 of the same head groups: on two streams they would add to the same dK at once.
    (
        [(0, 0, 4, 0, 3, 0), (0, 4, 8, 0, 2, 0), (0, 4, 8, 2, 3, 1), (1, 0, 4, 0, 3, 1)],
        ([(4, 0, 2)], [(4, 0, 3)]),
        ([(4, 0, 2), (4, 0, 3)], []),
    ),
])  # fmt: skip
def test_early_and_late(tasks: list[tuple[int, ...]], one: tuple, two: tuple) -> None:
    tick = Layout.from_rank_lengths([[8], [4]]).tick()
    schedule = schedule_rank(tick, build_slices(tick, np.array(tasks)), 0, GROUPS)
    for two_streams, expected in ((False, one), (True, two)):
        early, late = upload_schedule(schedule, CPU, two_streams).local
        assert tuple([(b.q_rows, b.group_begin, b.group_end) for b, _ in part] for part in (early, late)) == expected
