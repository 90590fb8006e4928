"""Servers that die, and servers that come, as processes of their own beside a training script that goes on."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest
from jobs import BLOCK, Job, job

__all__ = ["job"]

GOES_ON = {**BLOCK, "servers": {"joined": 1}, "on_server_failure": "continue"}


def _wait(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
def test_one_dies_another_comes_and_training_goes_on(job: Job) -> None:
    job.serve("first")
    job.launch_all(2, "until", "9", block=GOES_ON)
    job.wait_for("rank0", "step 2")
    job.processes["first"].send_signal(signal.SIGKILL)
    job.wait_for("rank0", "server 2 ended: its process died. Training goes on with the trainers alone")
    job.serve("second")
    job.wait_for("rank0", "server 3 came. Training goes on with server 3")
    job.wait_for("second", "server 3 is up")
    (job.folder / "stop").touch()
    codes = job.ends("rank0")
    assert codes.pop("first") == -signal.SIGKILL and set(codes.values()) == {0}
    assert "server 3 is done" in job.said("second") and "Error" not in job.said("rank0") + job.said("rank1")


@pytest.mark.slow
def test_one_that_hangs_is_dropped_and_ends_when_it_wakes(job: Job) -> None:
    for name in ("first", "second"):
        job.serve(name)
    job.launch_all(2, "until", "9", block={**GOES_ON, "servers": {"joined": 2}, "timeout_s": 20})
    job.wait_for("rank0", "step 1")
    hung = next(name for name in ("first", "second") if "server 2 is up" in job.said(name))
    job.processes[hung].send_signal(signal.SIGSTOP)
    silent = "server 2 ended: it has said nothing for 10 s: it hangs, or nothing reaches its host"
    job.wait_for("rank0", f"{silent}. Training goes on with server 3")
    job.processes[hung].send_signal(signal.SIGCONT)
    assert job.processes[hung].wait(120) == 1
    assert "the trainers go on without it: it has said nothing for 10 s" in job.said(hung)
    written = len(job.said("rank0"))
    _wait(lambda: "step" in job.said("rank0")[written:])
    (job.folder / "stop").touch()
    codes = job.ends("rank0")
    assert codes.pop(hung) == 1 and set(codes.values()) == {0}


@pytest.mark.slow
def test_a_server_that_fails_is_dropped_with_its_reason(job: Job) -> None:
    block = {**GOES_ON, "servers": {"reserved": 1}}
    fails = "from deepspeed_cad.server import process; process._budget = lambda device: 4096"
    job.launch_all(3, "well", "9", block=block, first=fails, who=2)
    assert job.ends("rank0") == {"rank0": 0, "rank1": 0, "rank2": 1}
    assert "server 2 ended: server 2 holds 0 MiB" in job.said("rank0")
    assert "Training goes on with the trainers alone" in job.said("rank0")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "reason"),
    [pytest.param("raise", "ValueError: no more data", marks=pytest.mark.long), ("kill", "trainer 1")],
)
def test_a_trainer_that_fails_ends_all_the_same(job: Job, how: str, reason: str) -> None:
    job.launch_all(4, how, "1", block={**GOES_ON, "servers": {"reserved": 2}})
    codes = job.ends("rank1")
    assert 0 not in codes.values() and codes["rank2"] == codes["rank3"] == 1
    assert reason in job.said("rank2") and "rank 1 stopped" in job.said("rank0"), job.said("rank0")
