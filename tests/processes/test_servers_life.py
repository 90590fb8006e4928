"""Life and death of reserved servers as processes: how trainers end, how servers die and come, and bad input."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import Script
from ports import free_port
from scripts import ROOT

SCRIPT = str(ROOT / "tests" / "processes" / "script_servers.py")
BLOCK = {"granularity": 16, "servers": {"reserved": 1}, "timeout_s": 300}
LIMIT_S = 120.0
"""All end soon after the first; without word of it they would wait for "timeout_s"."""
GOES_ON = {**BLOCK, "servers": {"joined": 1}, "on_server_failure": "continue"}

pytestmark = pytest.mark.slow


class Job:
    """Processes as a launcher starts them, and nobody who ends them when one fails."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.processes = folder, free_port(), dict[str, Script]()

    def start(self, name: str, words: list[str], **variables: object) -> None:
        """One process; its output goes to a file."""
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        env |= {key: str(value) for key, value in variables.items()}
        self.processes[name] = Script(words, self.folder, env, self.folder / name)

    def launch_all(self, world: int, *script: str, block: dict = BLOCK) -> None:
        """Every rank under the launcher of CAD."""
        words = ["-m", "deepspeed_cad.run", "--cad", json.dumps(block), SCRIPT, *script]
        for rank in range(world):
            ranks = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
            self.start(f"rank{rank}", words, **ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT=self.port)

    def serve(self, name: str) -> None:
        self.start(name, ["-m", "deepspeed_cad.cli", "serve", "--rendezvous", f"127.0.0.1:{self.port}"])

    def said(self, name: str) -> str:
        return (self.folder / name).read_text()

    def wait_for(self, name: str, words: str) -> None:
        """Until a process writes something."""
        while words not in self.said(name):
            assert self.processes[name].poll() is None, self.said(name)
            time.sleep(0.05)

    def ends(self, first: str) -> dict[str, int]:
        """Exit codes; all end within LIMIT_S of the first."""
        self.processes[first].wait(240)
        end = time.monotonic() + LIMIT_S
        codes = {}
        for name, process in self.processes.items():
            try:
                codes[name] = process.wait(max(end - time.monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"{name} still runs {LIMIT_S} s after {first} ended:\n{self.said(name)}") from None
        return codes


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """A job without processes; those that it starts end with the test."""
    made = Job(tmp_path)
    yield made
    for process in made.processes.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("how, block, reason", [
    ("raise", {}, "ValueError: no more data"),
    ("kill", {"servers": {"reserved": 2}, "on_server_failure": "continue"}, "trainer 1"),
])  # fmt: skip
def test_trainers_that_fail_end_the_servers_with_it(job: Job, how: str, block: dict, reason: str) -> None:
    """Also where trainers go on without a server."""
    job.launch_all(4 if block else 3, how, "1", block={**BLOCK, **block})
    codes = job.ends("rank1")
    assert codes.pop("rank1") != 0 and codes.pop("rank0") != 0 and set(codes.values()) == {1}, codes
    for name in codes:
        assert reason in job.said(name).split(f"server {name[4:]} ended:")[1]
    assert "rank" in job.said("rank0").splitlines()[-1] or "Error" in job.said("rank0")


def test_a_dead_server_ends_the_training_with_its_name(job: Job) -> None:
    job.launch_all(3, "wait", "9")
    job.wait_for("rank0", "step 1")
    job.processes["rank2"].send_signal(signal.SIGKILL)
    codes = job.ends("rank2")
    for name in ("rank0", "rank1"):
        assert codes[name] != 0 and "server 2 ended: its process died" in job.said(name)


def test_one_cannot_exchange_one_dies_another_comes_and_training_goes_on(job: Job) -> None:
    job.serve("first")
    job.launch_all(2, "until", "9", block=GOES_ON)
    job.wait_for("rank0", "step 2")
    fails = "import sys; from deepspeed_cad.exchange import probe; probe.c10d_transport = lambda *given: 1 / 0"
    serve = f"from deepspeed_cad.cli import main; sys.exit(main(['serve', '--rendezvous', '127.0.0.1:{job.port}']))"
    job.start("second", ["-c", f"{fails}; {serve}"])
    job.wait_for("rank0", "server 3 ended: ")  # by its own word, or because trainers could not reach it
    job.wait_for("rank0", "Training goes on with server 2")
    job.processes["first"].send_signal(signal.SIGTERM)
    job.wait_for("rank0", "server 2 ended: its process died. Training goes on with the trainers alone")
    job.serve("third")
    job.wait_for("rank0", "server 4 came. Training goes on with server 4")
    job.wait_for("third", "server 4 is up")
    (job.folder / "stop").touch()
    codes = job.ends("rank0")
    assert [codes.pop(name) for name in ("first", "second")] == [128 + signal.SIGTERM, 1] and set(codes.values()) == {0}
    assert "ended: SIGTERM from the launcher or the user" in job.said("first")
    assert "ZeroDivisionError" in job.said("second") and "server 4 is done" in job.said("third")
    assert "Traceback" not in job.said("rank0") and "Error" not in job.said("rank1")


def test_a_server_goes_on_while_trainers_save_what_they_have(job: Job) -> None:
    """As where a launcher signals all processes: twice at once counts as once."""
    job.launch_all(3, "until", "9")
    job.wait_for("rank0", "step 2")
    for number in (signal.SIGTERM, signal.SIGINT):
        job.processes["rank2"].send_signal(number)
        job.wait_for("rank2", "server 2 serves until its trainers end, or a signal comes again: SIGTERM")
    done = len(re.findall("step", job.said("rank0")))
    job.wait_for("rank0", f"step {done + 3}")
    (job.folder / "stop").touch()
    assert set(job.ends("rank0").values()) == {0}
    assert job.said("rank2").count("a signal comes again") == 1
