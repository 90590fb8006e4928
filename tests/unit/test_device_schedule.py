"""Which batches of a schedule run when, and what of it lies on the device."""

from __future__ import annotations

import numpy as np
import pytest
from attention_ranks import CPU, GROUPS

from deepspeed_cad.attention.device_schedule import DeviceSchedule, share_out, upload_schedule
from deepspeed_cad.layout import Layout
from deepspeed_cad.schedule import (
    Batch,
    Schedule,
    build_slices,
    schedule_rank,
)


def batch(rows: int, groups: int = 1, keys: int | None = None, first_group: int = 0) -> Batch:
    cu_q, cu_k = (np.array([0, n], np.int32) for n in (rows, keys or rows))
    return Batch(0, 0, cu_q, cu_k, first_group, first_group + groups)


def shares(batches: tuple[Batch, ...]) -> list[tuple[int, int, int]]:
    return [(one.q_rows, one.group_begin, one.group_end) for one in batches]


@pytest.mark.parametrize(
    "batches, early, late",
    [
        ([], [], []),
        ([batch(8, 4)], [(8, 0, 2)], [(8, 2, 4)]),
        ([batch(8, 4, first_group=3)], [(8, 3, 5)], [(8, 5, 7)]),
        ([batch(8, 1), batch(8, 1)], [(8, 0, 1)], [(8, 0, 1)]),
        ([batch(8, 4), batch(8, 4)], [(8, 0, 4)], [(8, 0, 4)]),
        ([batch(8, 1), batch(8, 3)], [(8, 0, 1), (8, 0, 1)], [(8, 1, 3)]),
        # 36 and 136 pairs a head group: the half lies within the second.
        ([batch(8, 2), batch(16, 2)], [(8, 0, 2), (16, 0, 1)], [(16, 1, 2)]),
        # Rows that read many keys before them are more work than their number says.
        ([batch(8, 2, keys=200), batch(16, 2)], [(8, 0, 1)], [(8, 1, 2), (16, 0, 2)]),
        ([batch(0, 2), batch(8, 2)], [(0, 0, 2), (8, 0, 1)], [(8, 1, 2)]),
    ],
)
def test_halves_of_about_equal_work(
    batches: list[Batch], early: list[tuple[int, int, int]], late: list[tuple[int, int, int]]
) -> None:
    first, second = share_out(tuple(batches), 2)
    assert (shares(first), shares(second)) == (early, late)


def schedule_of(lengths: list[list[int]], tasks: list[tuple[int, ...]], rank: int = 0) -> Schedule:
    tick = Layout.from_rank_lengths(lengths).tick()
    return schedule_rank(tick, build_slices(tick, np.array(tasks)), rank, GROUPS)


def pieces(schedule: DeviceSchedule) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    early, late = schedule.local
    return shares(tuple(b for b, _ in early)), shares(tuple(b for b, _ in late))


@pytest.mark.parametrize(
    "tasks, one, two",
    [
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
    ],
)
def test_early_and_late(tasks: list[tuple[int, ...]], one: tuple, two: tuple) -> None:
    schedule = schedule_of([[8], [4]], tasks)
    for two_streams, expected in ((False, one), (True, two)):
        assert pieces(upload_schedule(schedule, CPU, two_streams)) == expected
