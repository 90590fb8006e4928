"""Whole exchanges on the CPU: copy tables, the C++ that executes them (over a stand-in driver), placement of rows.

The reference moves row by row with numpy, straight from the slice tables.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import layouts, random_tasks

from deepspeed_cad.exchange import native_calls
from deepspeed_cad.exchange.copies import (
    address_fields,
    dispatch_pushes,
    plan_landing,
    return_pushes,
)
from deepspeed_cad.exchange.native_calls import CudaCalls
from deepspeed_cad.exchange.placement import find_placement, make_placement, place, take
from deepspeed_cad.native import NativeCallError
from deepspeed_cad.schedule import (
    GROUP,
    HOME,
    HOME_ROW,
    KEY,
    KIND,
    QUERY,
    ROWS,
    SERVER,
    SERVER_ROW,
    Slices,
    build_slices,
    schedule_rank,
)

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
GROUPS = 3
FIELDS = ((QUERY, 16, torch.bfloat16), (KEY, 8, torch.bfloat16), (KEY, 8, torch.bfloat16), (QUERY, 2, torch.float32))
"""Kind, width and type of the fields of one dispatch: widths and types differ, as Q, K, V and LSE do."""


@cache
def over_a_stand_in_driver() -> CudaCalls:
    """The C++ transport, compiled once for all files of tests."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        library, driver = f"{folder}/transport.so", f"{folder}/driver.so"
        flags = "-std=c++17 -O1 -Wall -Wextra -Werror -fPIC -shared -fvisibility=hidden".split()
        names = ("last_error.cpp", "cuda_driver.cpp", "nvlink.cpp", "nccl_api.cpp", "nccl.cpp")
        sources = [str(ROOT / "csrc" / name) for name in names]
        subprocess.run(["g++", *flags, *sources, "-o", library, "-ldl", "-lpthread"], check=True)
        fake = str(Path(__file__).with_name("fake_driver.cpp"))
        subprocess.run(["g++", "-std=c++17", "-O1", "-fPIC", "-shared", fake, "-o", driver], check=True)
        patch.setattr(native_calls.native, "load", lambda: ctypes.CDLL(library))
        return CudaCalls(driver)


@pytest.fixture
def calls() -> CudaCalls:
    """Where there is a compiler."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    return over_a_stand_in_driver()


class Cluster:
    """All ranks of one exchange in this process: schedules, tensors at home, landing areas, flags."""

    def __init__(self, name: str, seed: int, calls: CudaCalls, window: int | None = None) -> None:
        rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        layout = layouts()[name]
        tick = layout.tick()
        self.ranks, self.calls = tick.ranks, calls
        tasks = random_tasks(tick, GROUPS, rng)
        self.slices: Slices = build_slices(tick, tasks, window)
        self.schedules = [schedule_rank(tick, self.slices, rank, GROUPS, window) for rank in range(self.ranks)]
        self.flags = np.zeros((self.ranks, self.ranks), np.uint32)
        self.names = np.zeros((self.ranks, self.ranks), np.int64)

    def home(self, rank: int, kind: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """A strided view: every second row, groups with a gap between them."""
        schedule = self.schedules[rank]
        rows = schedule.query_tokens if kind == QUERY else schedule.key_tokens
        return torch.randn(rows, 2, GROUPS, width + 3).to(dtype)[:, 1, :, :width]

    def push(self, tables: list, sources: list[list[tuple]], rows: np.ndarray, fields: list, number: int) -> list:
        """One exchange of all ranks: landed tensors [rank][field]."""
        begins, totals = plan_landing(rows, [kind for kind, _, _ in fields], [w * d.itemsize for _, w, d in fields])
        areas = [np.full(int(total) + 64, 0xEE, np.uint8) for total in totals]
        at = np.array([area.ctypes.data for area in areas], np.int64)
        for rank in range(self.ranks):
            table = tables[rank]
            own = np.array([self.flags[p, rank : rank + 1].ctypes.data for p in range(self.ranks)], np.int64)
            addressed = address_fields(sources[rank], at + begins)
            names = self.names.ctypes.data + 8 * (self.ranks * np.arange(self.ranks) + rank)
            name = (number << 40) + rank
            self.calls.push(0, table.peers, table.begin, table.slices, addressed, own, number, names, name)
        assert (self.flags == number).all()
        assert (self.names == (number << 40) + np.arange(self.ranks)).all(), "each rank holds the names of all"
        for area, total in zip(areas, totals, strict=True):
            assert (area[int(total) :] == 0xEE).all(), "written behind the end of a landing area"
        landed = []
        for rank in range(self.ranks):
            row = []
            for f, (kind, width, dtype) in enumerate(fields):
                begin, count = int(begins[f, rank]), int(rows[rank, kind])
                part = torch.from_numpy(areas[rank])[begin : begin + count * width * dtype.itemsize].clone()
                row.append(part.view(dtype).view(count, width))
            landed.append(row)
        return landed


def address(kind: int, home: torch.Tensor) -> tuple[int, int, int, int, int]:
    size = home.element_size()
    return kind, home.data_ptr(), home.stride(0) * size, home.stride(1) * size, home.shape[2] * size


@pytest.mark.parametrize("name", layouts())
@pytest.mark.parametrize("window", [None, 20])
def test_an_exchange_there_and_back(name: str, window: int | None, calls: CudaCalls) -> None:
    cluster = Cluster(name, 3, calls, window)
    ranks = range(cluster.ranks)
    homes = [[cluster.home(rank, *field) for field in FIELDS] for rank in ranks]
    sources = [[address(field[0], home) for field, home in zip(FIELDS, homes[rank], strict=True)] for rank in ranks]
    tables = [dispatch_pushes(schedule) for schedule in cluster.schedules]
    assert sorted(int(table.peers[0]) for table in tables) == list(ranks), "every rank starts with another peer"
    served = cluster.push(tables, sources, cluster.slices.served_rows, list(FIELDS), 7)
    table = cluster.slices.table
    for f, (kind, width, _) in enumerate(FIELDS):
        expected = [torch.full((int(n), width), 9e9) for n in cluster.slices.served_rows[:, kind]]
        for one in table[table[:, KIND] == kind]:
            rows = homes[one[HOME]][f][one[HOME_ROW] : one[HOME_ROW] + one[ROWS], one[GROUP]]
            expected[one[SERVER]][one[SERVER_ROW] : one[SERVER_ROW] + one[ROWS]] = rows.float()
        for rank in ranks:
            assert torch.equal(served[rank][f].float(), expected[rank])

    # Back: the served tensors themselves, times a number per rank, so that every contribution differs.
    given = [[(x.float() * (1 + rank / 8)).to(x.dtype).contiguous() for x in served[rank]] for rank in ranks]
    sources = [
        [(kind, x.data_ptr(), *[x.shape[1] * x.element_size()] * 3) for (kind, _, _), x in zip(FIELDS, given[rank])]
        for rank in ranks
    ]
    tables = [return_pushes(schedule) for schedule in cluster.schedules]
    landed = cluster.push(tables, sources, cluster.slices.landed_rows, list(FIELDS), 8)
    for rank, schedule in enumerate(cluster.schedules):
        placed = {kind: find_placement(schedule, kind, CPU) for kind in (QUERY, KEY)}
        for f, (kind, _, dtype) in enumerate(FIELDS):
            add = kind == KEY
            home = cluster.home(rank, *FIELDS[f])
            expected = home.double().clone()
            for one in table[(table[:, HOME] == rank) & (table[:, KIND] == kind)]:
                rows = given[one[SERVER]][f][one[SERVER_ROW] : one[SERVER_ROW] + one[ROWS]].double()
                at = slice(one[HOME_ROW], one[HOME_ROW] + one[ROWS])
                expected[at, one[GROUP]] = rows + (expected[at, one[GROUP]] if add else 0)
            place(placed[kind], landed[rank][f], given[rank][f], home, add)
            tolerance = 2**-7 if add and dtype == torch.bfloat16 else 0
            torch.testing.assert_close(home.double(), expected, rtol=tolerance, atol=1e-6 if add else 0)


def test_sums_are_rounded_once(calls: CudaCalls) -> None:
    """256 contributions of 1 to 256 in bf16: adding one after the other in bf16 would stay at 256."""
    placement = make_placement(np.array([1]), np.array([0, 256]), np.arange(256), CPU)
    home = torch.zeros(1, 2, 4, dtype=torch.bfloat16)
    home[0, 1] = 256
    landed = torch.ones(256, 4, dtype=torch.bfloat16)
    place(placement, landed, landed[:0], home, add=True)
    assert home[0, 1].tolist() == [512.0] * 4 and home[0, 0].tolist() == [0.0] * 4


def test_waits_compare_with_wrap_around_and_errors_have_the_drivers_text(calls: CudaCalls) -> None:
    flags = np.array([5, 2**32 - 1], np.uint32)
    at = np.array([flags[i:].ctypes.data for i in range(2)], np.int64)
    calls.wait(0, at, 2**32 - 3)
    with pytest.raises(NativeCallError, match="cuStreamWaitValue32 failed with CUDA error 600"):
        calls.wait(0, at, 6)
    fields, slices = np.array([[QUERY, 0, 64, 64, 64, 0]], np.int64), np.array([[QUERY, 0, 0, 0, 4]], np.int64)
    with pytest.raises(NativeCallError, match="cuMemcpyAsync failed with CUDA error 719 .a made-up failure"):
        calls.push(13, np.zeros(1, np.int64), np.array([0, 1]), slices, fields, at[:1], 1)


@pytest.mark.parametrize("form", ["whole", "heads with a gap", "one of three in a row"])
def test_rows_are_taken_from_any_view(form: str) -> None:
    whole = torch.arange(7 * 24 * 8.0).view(7, 24, 8)
    home = {"whole": whole, "heads with a gap": whole[..., :5], "one of three in a row": whole[:, 8:16]}[form]
    index = torch.tensor([0, home.shape[1] + 1, 7 * home.shape[1] - 1, 0])
    found = take(home, index)
    assert found.is_contiguous()
    assert torch.equal(found, home[index // home.shape[1], index % home.shape[1]])
