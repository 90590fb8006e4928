"""Life and death of reserved servers: how trainers end, how a server dies, who comes first, who comes later."""

from __future__ import annotations

import signal

import pytest
import torch
from jobs import BLOCK, Job, job

__all__ = ["job"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "who", "reason"),
    [
        ("raise", 1, "ValueError: no more data"),
        pytest.param("terminate", 1, "trainer 1", marks=pytest.mark.long),
        pytest.param("interrupt", 0, "KeyboardInterrupt", marks=pytest.mark.long),
        pytest.param("early", 1, "trainers 1 had ended well", marks=pytest.mark.long),
    ],
)
def test_trainers_that_fail_end_the_servers_with_the_reason(job: Job, how: str, who: int, reason: str) -> None:
    job.launch_all(3, how, str(who))
    codes = job.ends("rank0" if how == "early" else f"rank{who}")
    assert codes["rank2"] == 1 and codes[f"rank{1 - who}"] != 0, codes
    assert reason in job.said("rank2").split("server 2 ended:")[1]
    assert "rank" in job.said(f"rank{1 - who}").splitlines()[-1] or "Error" in job.said(f"rank{1 - who}")


@pytest.mark.slow
def test_trainers_that_never_train_end_the_servers_well(job: Job) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", job.port, is_master=True, wait_for_workers=False)
    job.launch_all(3, "idle", "9")
    assert set(job.ends("rank0").values()) == {0} and store.port == job.port
    assert "ended without having trained with CAD" in job.said("rank2")


@pytest.mark.slow
def test_a_dead_server_ends_the_training_with_its_name(job: Job) -> None:
    job.launch_all(3, "wait", "9")
    job.wait_for("rank0", "step 1")
    job.processes["rank2"].send_signal(signal.SIGKILL)
    codes = job.ends("rank2")
    assert codes["rank0"] not in (0, None) and codes["rank1"] not in (0, None)
    for name in ("rank0", "rank1"):
        assert "server 2 ended: its process died" in job.said(name)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["server", pytest.param("trainers", marks=pytest.mark.long)])
def test_a_server_of_another_launch_joins(job: Job, first: str) -> None:
    block = {**BLOCK, "servers": {"joined": 1}}
    if first == "server":
        job.serve("server")
        job.wait_for("server", "waits at most")
    job.launch_all(2, "well", "9", block=block)
    if first == "trainers":
        job.serve("server")
    assert set(job.ends("rank0").values()) == {0}
    assert "server 2 is done: 6 micro-batches served" in job.said("server")
    assert "CAD is on: 2 trainers and 1 reserved server" in job.said("rank0")


OUT_OF_MEMORY = """
import torch
from deepspeed_cad.server import loop
made, calls = loop.serve_arrived_backward, iter(range(1000))
def fails(*given):
    if next(calls) >= 3:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return made(*given)
loop.serve_arrived_backward = fails
"""
BUDGET = "from deepspeed_cad.server import process; process._budget = lambda device: 4096"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "words"),
    [
        (OUT_OF_MEMORY, "Tried to allocate 2.00 GiB. Reserve more servers"),
        pytest.param(BUDGET, "server 2 holds 0 MiB for backwards to come and has 0 MiB", marks=pytest.mark.long),
    ],
    ids=["memory", "budget"],
)
def test_a_server_out_of_memory_ends_all_with_its_reason(job: Job, first: str, words: str) -> None:
    job.launch_all(3, "wait", "9", first=first, who=2)
    codes = job.ends("rank2")
    assert codes["rank2"] == 1 and 0 not in codes.values(), codes
    for name in job.processes:
        assert words in job.said(name), job.said(name)


OTHER_VERSION = "from deepspeed_cad.server import meeting; meeting.__version__ = '9.9'"
EARLY_WORLD = "import torch.distributed as d; d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("who", "first", "words"),
    [
        (2, OTHER_VERSION, "has deepspeed_cad 9.9 and trainer 0"),
        (None, EARLY_WORLD, "torch.distributed is initialised already"),
    ],
    ids=["version", "world"],
)
def test_what_does_not_fit_ends_all_with_the_same_words(job: Job, who: int | None, first: str, words: str) -> None:
    job.launch_all(3, "well", "9", first=first, who=who)
    assert 0 not in job.ends("rank0").values()
    for name in job.processes:
        assert words in job.said(name) and "Traceback" not in job.said(name), job.said(name)


# Training goes on

GOES_ON = {**BLOCK, "servers": {"joined": 1}, "on_server_failure": "continue"}


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
    (job.folder / "stop").touch()
    codes = job.ends("rank0")
    assert codes.pop(hung) == 1 and set(codes.values()) == {0}


@pytest.mark.slow
def test_a_server_that_fails_is_dropped_with_its_reason(job: Job) -> None:
    job.launch_all(3, "well", "9", block={**GOES_ON, "servers": {"reserved": 1}}, first=BUDGET, who=2)
    assert job.ends("rank0") == {"rank0": 0, "rank1": 0, "rank2": 1}
    assert "server 2 ended: server 2 holds 0 MiB" in job.said("rank0")
    assert "Training goes on with the trainers alone" in job.said("rank0")


@pytest.mark.slow
def test_a_trainer_that_dies_ends_all_the_same(job: Job) -> None:
    job.launch_all(4, "kill", "1", block={**GOES_ON, "servers": {"reserved": 2}})
    codes = job.ends("rank1")
    assert 0 not in codes.values() and codes["rank2"] == codes["rank3"] == 1
    assert "trainer 1" in job.said("rank2") and "rank 1 stopped" in job.said("rank0"), job.said("rank0")
