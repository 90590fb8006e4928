"""Rows, elements and bytes beyond 32 bits, in tables that need no memory: documents here are numbers only."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_exchange_tables import calls  # noqa: F401

from deepspeed_cad.attention.serve import keys_by_group
from deepspeed_cad.errors import CADError
from deepspeed_cad.exchange.copies import address_fields, dispatch_pushes, list_messages, plan_landing, return_pushes
from deepspeed_cad.exchange.native_calls import CudaCalls
from deepspeed_cad.exchange.placement import Placement, place, take
from deepspeed_cad.layout import Layout
from deepspeed_cad.schedule import KEY, QUERY, ROWS, SERVER_ROW, build_slices, schedule_rank

LONG = 3 << 29
"""Rows of a document: three quarters of what 32 bits with a sign count. Rows × head groups are beyond that, and so are
the elements of one head group's Q, its bytes, and the rows that two such documents have on a server."""
GROUPS, ROW_BYTES = 4, 1024
TICK = Layout.from_rank_lengths([[LONG, 64], [8, LONG]]).tick()
TASKS = np.array([(0, 64, LONG, 0, 3, 1), (0, 64, LONG, 3, 4, 0), (0, 0, 64, 0, 4, 0), (1, 0, 64, 0, 4, 0),
                  (2, 0, 8, 0, 4, 1), (3, 0, LONG, 0, 4, 1)])  # fmt: skip


def test_keys_of_rows_in_place_lie_beyond_2_to_the_31() -> None:
    """The second rank's own rows of a document read the keys of all head groups, side by side where they landed."""
    half = LONG // 2
    tick = Layout.from_stream([LONG], 2, half).tick()
    slices = build_slices(tick, np.array([(0, 0, half, 0, GROUPS, 0), (0, half, LONG, 0, GROUPS, 1)]))
    assert slices.half_local.tolist() == [[1, 0, GROUPS, 0, half, 0, LONG, LONG]]
    assert slices.served_rows[1].tolist() == [0, GROUPS * LONG] and GROUPS * LONG > 2**32
    (batch,) = schedule_rank(tick, slices, 1, GROUPS).half_local
    # Memory that is reserved and never touched but for the last row.
    landed = torch.empty(GROUPS * LONG, 1, 1, dtype=torch.uint8)
    landed[-1] = 9
    keys = keys_by_group(landed, batch)
    assert keys.shape == (LONG, GROUPS, 1) and keys[-1, -1].tolist() == [9]


def test_tables_of_an_exchange() -> None:
    slices = build_slices(TICK, TASKS)
    assert slices.served_rows[1].tolist() == [3 * (LONG - 64), 3 * LONG]
    assert slices.table[:, SERVER_ROW].max() > 2**31 and slices.table[:, ROWS].max() < 2**31
    home = schedule_rank(TICK, slices, 0, GROUPS)
    out, back = dispatch_pushes(home), return_pushes(schedule_rank(TICK, slices, 1, GROUPS))
    assert out.slices[:, 3].max() == 2 * LONG and out.rows_sent.tolist() == [3 * (LONG - 64), 3 * LONG]
    assert back.slices[:, 4].tolist() == [3 * (LONG - 64), 3 * LONG], "of head groups behind each other: one copy"
    begins, totals = plan_landing(home.served_rows, [QUERY, KEY], [ROW_BYTES, ROW_BYTES // 2])
    assert totals[1] == 3 * (LONG - 64) * ROW_BYTES + 3 * LONG * ROW_BYTES // 2
    fields = address_fields(
        [(QUERY, 1 << 45, GROUPS * ROW_BYTES, ROW_BYTES, ROW_BYTES)] * 2, np.array([0, 1 << 46]) + begins
    )
    assert fields[1, 6] == (1 << 46) + 3 * (LONG - 64) * ROW_BYTES
    far = SimpleNamespace(data_ptr=lambda: 1 << 44, shape=(0, ROW_BYTES), element_size=lambda: 1)
    sizes = list_messages([(np.array([[1, 2 * LONG, LONG]]), np.zeros((0, 3), int))], [far], [far])
    assert sizes.tolist() == [[1, 1, (1 << 44) + 2 * LONG * ROW_BYTES, LONG * ROW_BYTES]]


def batches(rows: list[list[int]], tasks: list[tuple[int, ...]]) -> list:
    tick = Layout.from_rank_lengths(rows).tick()
    schedule = schedule_rank(tick, build_slices(tick, np.array(tasks)), 0, GROUPS)
    return [(batch.q_row, batch.cu_q.tolist(), batch.k_row, batch.cu_k.tolist()) for batch in schedule.local]


def test_a_document_of_more_rows_is_refused() -> None:
    with pytest.raises(CADError, match="has 2147483648 rows on one rank, and kernels count them in 32 bits"):
        batches([[2**31], [8]], [(0, 0, 2**31, 0, GROUPS, 0), (1, 0, 8, 0, GROUPS, 1)])


def test_copies_take_strides_and_rows_in_64_bits(calls: CudaCalls) -> None:  # noqa: F811
    """A row whose offset is beyond 4 GiB: the source begins so far before the memory that is there."""
    source, target = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    flag = np.zeros(1, np.int64)
    row, stride = 3 << 30, 3
    fields = np.array([[QUERY, source.data_ptr() - row * stride, stride, 0, 3, target.data_ptr() - (row + 5) * 3]])
    slices = np.array([[QUERY, row, 0, row + 5, 4]])
    calls.push(0, np.zeros(1, np.int64), np.array([0, 1]), slices, fields, np.array([flag.ctypes.data]), 7)
    assert target[:12].tolist() == list(range(12)) and not target[12:].any()
    assert ctypes.c_uint32.from_address(flag.ctypes.data).value == 7


def test_rows_are_packed_and_placed_beyond_2_to_the_31() -> None:
    """Strides are far apart in memory that is reserved and never touched but for a few rows."""
    rows, groups, width, stride = 5, 1, 4, 1 << 29
    storage = torch.empty((rows - 1) * stride + width, dtype=torch.uint8)
    home = storage.as_strided((rows, groups, width), (stride, width, 1))
    placement = Placement.of(np.array([[4, 0, 1, 0]]), torch.device("cpu"))
    landed = torch.full((1, width), 9, dtype=torch.uint8)
    place(placement, landed, landed[:0], home, False)
    assert storage[-width:].tolist() == [9] * width
    assert take(home, torch.tensor([4])).tolist() == [[9] * width]


def test_batches_end_where_kernels_can_count_no_further() -> None:
    rows = [LONG, 7, LONG, 9]
    tasks = [*((number, 0, count, 0, GROUPS, 0) for number, count in enumerate(rows)), (4, 0, 8, 0, GROUPS, 1)]
    first, second = [0, LONG, LONG + 7], [0, LONG, LONG + 9]
    assert batches([rows, [8]], tasks) == [(0, first, 0, first), (LONG + 7, second, LONG + 7, second)]
