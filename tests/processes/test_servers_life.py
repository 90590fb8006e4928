"""Life and death of reserved servers as processes: how trainers end, how servers die and come, and bad input."""

import re
import signal

import pytest
from jobs import BLOCK, Job

GOES_ON = {**BLOCK, "servers": {"joined": 1}, "on_server_failure": "continue"}

pytestmark = pytest.mark.slow


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
