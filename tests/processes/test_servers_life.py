"""Life and death of reserved servers: how trainers end, how a server dies, who comes first, and bad input."""

from __future__ import annotations

import json
import signal
import time

import pytest
import torch
from jobs import BLOCK, ROOT, SCRIPT, Job, job

__all__ = ["job"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "who", "reason"),
    [
        ("raise", 1, "ValueError: no more data"),
        pytest.param("raise", 0, "ValueError: no more data", marks=pytest.mark.long),
        pytest.param("kill", 1, "trainer 1", marks=pytest.mark.long),
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
def test_all_end_well(job: Job) -> None:
    job.launch_all(3, "well", "9")
    assert set(job.ends("rank0").values()) == {0}
    assert "server 2 is done: 6 micro-batches served" in job.said("rank2")
    assert "CAD is on: 2 trainers and 1 reserved server" in job.said("rank0")


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_dead_server_ends_the_training_with_its_name(job: Job, how: signal.Signals) -> None:
    job.launch_all(3, "wait", "9")
    job.wait_for("rank0", "step 1")
    job.processes["rank2"].send_signal(how)
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


@pytest.mark.slow
def test_a_server_with_another_configuration_or_one_too_many(job: Job) -> None:
    block = {**BLOCK, "servers": {"joined": 1}}
    job.launch_all(2, "wait", "9", block=block)
    other = job.serve("other", "--cad", json.dumps({**block, "granularity": 32}))
    assert other.wait(120) == 2 and 'another "cad" block than this server (granularity)' in job.said("other")
    job.serve("server")
    job.wait_for("rank0", "step 1")
    late = job.serve("late")
    assert late.wait(120) == 2 and "has its 1 servers already" in job.said("late")
    # The training that is under way goes on.
    job.wait_for("rank0", "step 20")


@pytest.mark.slow
def test_two_launches_at_one_rendezvous(job: Job) -> None:
    job.launch_all(3, "wait", "9")
    job.start(
        "again", ["-m", "deepspeed_cad.run", "--cad", json.dumps(BLOCK), SCRIPT, "wait", "9"], RANK=2, WORLD_SIZE=3,
        LOCAL_RANK=2, LOCAL_WORLD_SIZE=3, MASTER_ADDR="127.0.0.1", MASTER_PORT=job.port,
    )  # fmt: skip
    assert "two launches use the same rendezvous" in job.said(_first_to_end(job, ("again", "rank2")))


def _first_to_end(job: Job, names: tuple[str, ...]) -> str:
    while True:
        for name in names:
            if job.processes[name].poll() is not None:
                return name
        time.sleep(0.1)


@pytest.mark.slow
def test_reserved_ranks_without_the_launcher(job: Job) -> None:
    """The JSON alone: an error that shows the command."""
    script = "import torch, sys; sys.path.insert(0, sys.argv[1]); import training, deepspeed_cad\n"
    script += f"deepspeed_cad.apply(training.tiny_llama(), {BLOCK!r})"
    done = job.start("alone", ["-c", script, str(ROOT / "tests")], RANK=0, WORLD_SIZE=1, LOCAL_WORLD_SIZE=4)
    assert done.wait(120) == 1
    assert "torchrun --nproc_per_node 4 -m deepspeed_cad.run --cad" in job.said("alone")


@pytest.mark.parametrize(
    ("servers", "words"),
    [
        ({"reserved": 2}, "at least one must train"),
        pytest.param({"reserved_per_node": 2}, "no trainer would be left on a host of 2 ranks", marks=pytest.mark.long),
    ],
)
def test_a_reservation_that_does_not_fit(job: Job, servers: dict, words: str) -> None:
    job.launch_all(2, "well", "9", block={**BLOCK, "servers": servers})
    assert set(job.ends("rank0").values()) == {2}
    for name in job.processes:
        assert words in job.said(name) and "Traceback" not in job.said(name)


OUT_OF_MEMORY = """
import torch
from deepspeed_cad.server import loop
made, calls = loop.{0}, iter(range(1000))
def fails(*given):
    if next(calls) >= 3:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return made(*given)
loop.{0} = fails
"""
BUDGET = "from deepspeed_cad.server import process; process._Server._budget = lambda self: 4096"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "words"),
    [
        pytest.param(
            OUT_OF_MEMORY.format("serve_arrived"), "server 2 has no memory left on cpu", marks=pytest.mark.long
        ),
        (OUT_OF_MEMORY.format("serve_arrived_backward"), "Tried to allocate 2.00 GiB. Reserve more servers"),
        pytest.param(
            BUDGET,
            "server 2 holds 0 MiB for backwards to come and has 0 MiB for that: reserve more servers",
            marks=pytest.mark.long,
        ),
    ],
    ids=["forward", "backward", "budget"],
)
def test_a_server_out_of_memory_ends_all_with_its_reason(job: Job, first: str, words: str) -> None:
    job.launch_all(3, "wait", "9", first=first, who=2)
    codes = job.ends("rank2")
    assert codes["rank2"] == 1 and 0 not in codes.values(), codes
    for name in job.processes:
        assert words in job.said(name), job.said(name)


OTHER_VERSION = "from deepspeed_cad.server import process; process.__version__ = '9.9'"
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
    codes = job.ends("rank0")
    assert 0 not in codes.values(), codes
    for name in job.processes:
        assert words in job.said(name) and "Traceback" not in job.said(name), job.said(name)


@pytest.mark.slow
def test_a_script_with_a_world_of_its_own_numbers(job: Job) -> None:
    """The store is the launcher's, as under torchrun: a server hears there why the trainers ended."""
    store = torch.distributed.TCPStore("127.0.0.1", job.port, is_master=True, wait_for_workers=False)
    job.launch_all(3, "apart", "9")
    codes = job.ends("rank0")
    assert codes == {"rank0": 2, "rank1": 2, "rank2": 1} and store.port == job.port
    for name in job.processes:
        assert "torch.distributed counts 1 ranks here" in job.said(name), job.said(name)
        assert "Traceback" not in job.said(name)
