"""What exchanges are made of: the C++ that executes copies (over a stand-in driver), and rows taken and placed."""

import ctypes
import shutil
import subprocess
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from scripts import ROOT

from deepspeed_cad.errors import CADError
from deepspeed_cad.exchange import native_calls
from deepspeed_cad.exchange.copies import dispatch_pushes, return_pushes
from deepspeed_cad.exchange.links import peer_schedule
from deepspeed_cad.exchange.native_calls import CudaCalls
from deepspeed_cad.exchange.placement import Placement, place, take
from deepspeed_cad.native import NativeCallError
from deepspeed_cad.schedule import QUERY

CPU = torch.device("cpu")


@cache
def over_a_stand_in_driver() -> CudaCalls:
    """The C++ transport, compiled once for all files of tests, where there is a compiler."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
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
    return over_a_stand_in_driver()


def test_sums_are_rounded_once(calls: CudaCalls) -> None:
    """256 contributions of 1 to 256 in bf16: adding one after the other in bf16 would stay at 256."""
    placement = Placement.of(np.array([[0, 1, 1, source] for source in range(256)]), CPU)
    home = torch.zeros(1, 2, 4, dtype=torch.bfloat16)
    home[0, 1] = 256
    landed = torch.ones(256, 4, dtype=torch.bfloat16)
    place(placement, landed, landed[:0], home, add=True)
    assert home[0, 1].tolist() == [512.0] * 4 and home[0, 0].tolist() == [0.0] * 4


@pytest.mark.parametrize("add", [True, False])
def test_runs_are_placed_row_by_row_wherever_they_overlap(add: bool) -> None:
    random = np.random.default_rng(0)
    row, group, rows, source = (random.integers(0, most, 60) for most in (100, 3, 30, 170))
    runs = np.stack([row, group, rows + 1, np.where(random.random(60) < 0.5, source, -1 - source)], axis=1)
    if not add:  # each row at home once
        runs = runs[::20] * [0, 0, 1, 1] + np.array([[0, 0, 0, 0], [0, 1, 0, 0], [40, 1, 0, 0]])
    landed, served = torch.rand(200, 4, dtype=torch.float64), torch.rand(200, 4, dtype=torch.float64)
    found = torch.rand(130, 3, 6, dtype=torch.float64)[..., 1:5]
    expected = found.clone()
    for row, group, rows, source in runs.tolist():
        for step in range(rows):
            came = landed[source + step] if source >= 0 else served[-1 - source + step]
            expected[row + step, group] = came + (expected[row + step, group] if add else 0)
    placement = Placement.of(runs, CPU)
    place(placement, landed, served, found, add)
    assert torch.equal(found, expected)
    programs = -(-placement.pieces[:, 2] // Placement.ROWS_PER_PROGRAM)
    assert torch.equal(placement.programs, torch.repeat_interleave(programs))
    assert torch.equal(placement.pieces[:, 5], programs.cumsum(0) - programs)


def test_what_cannot_be_placed_is_refused() -> None:
    home, came = torch.zeros(4, 2, 6), torch.ones(3, 6)
    twice = Placement.of(np.array([[0, 1, 3, 0], [2, 1, 1, -2]]), CPU)
    with pytest.raises(CADError, match="2 rows came back for one row of an output"):
        place(twice, came, came, home, add=False)
    for landed, at_home in ((came.T.contiguous().T, home), (came, home.transpose(1, 2))):
        with pytest.raises(CADError, match="rows cannot be placed: home has strides"):
            place(twice, landed, came, at_home, add=True)
    assert not home.any()


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


def test_a_slice_that_ends_beyond_where_it_lands_is_refused() -> None:
    """C++ would copy it over whatever lies there."""
    schedule = peer_schedule([[1], [0]], 0, 2, 64)
    assert len(dispatch_pushes(schedule).slices) and len(return_pushes(schedule).slices)
    short = replace(schedule, served_rows=schedule.served_rows - 1, landed_rows=schedule.landed_rows - 1)
    for pushes in (dispatch_pushes, return_pushes):
        with pytest.raises(CADError, match="rank 0: a slice ends at row .* schedule and plan disagree"):
            pushes(short)
