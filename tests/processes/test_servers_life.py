"""Life and death of reserved servers as processes: how trainers end, how servers die and come, and bad input."""

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


def test_one_dies_another_comes_and_training_goes_on(job: Job) -> None:
    job.serve("first")
    job.launch_all(2, "until", "9", block=GOES_ON)
    job.wait_for("rank0", "step 2")
    job.processes["first"].send_signal(signal.SIGTERM)
    job.wait_for("rank0", "server 2 ended: its process died. Training goes on with the trainers alone")
    job.serve("second")
    job.wait_for("rank0", "server 3 came. Training goes on with server 3")
    job.wait_for("second", "server 3 is up")
    (job.folder / "stop").touch()
    codes = job.ends("rank0")
    assert codes.pop("first") == 128 + signal.SIGTERM and set(codes.values()) == {0}
    assert "ended: SIGTERM from the launcher or the user" in job.said("first")
    assert "server 3 is done" in job.said("second") and "Error" not in job.said("rank0") + job.said("rank1")
