"""Several hosts: network namespaces behind links of 100 Mbit/s, real processes, real gloo."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from host_train import write_profile
from namespaces import Hosts, open_hosts
from ports import free_port

SCRIPT = Path(__file__).with_name("host_train.py")
PAIR_S = 3e-8
"""Seconds of a query-key pair of one head group here, forward and backward, about."""
ERROR_S = 160.0
"""What errors on all ranks may take beyond "timeout_s": ranks wait for each other's word, and machines are busy."""


def start(hosts: Hosts, place: list[int], pauses: str = "", **asked: Any) -> list[subprocess.Popen[str]]:
    """One process for each rank, on the host that `place` says."""
    common = {"ranks": len(place), "store": hosts.address(0), "port": free_port(), "pauses": pauses, **asked}
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return [
        hosts.start(host, [sys.executable, str(SCRIPT), json.dumps({"rank": rank, **common})], environment)
        for rank, host in enumerate(place)
    ]


def finish(processes: list[subprocess.Popen[str]], timeout: float = 200.0) -> tuple[list[dict[str, Any]], list[str]]:
    deadline, found, logs = time.monotonic() + timeout, [], []
    for process in processes:
        out, log = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        assert process.returncode == 0, log[-3000:]
        found.append(json.loads(out.strip().splitlines()[-1]))
        logs.append(log)
    return found, logs


@pytest.mark.long
def test_hosts_train_the_same(tmp_path: Path) -> None:
    write_profile(tmp_path / "profile.json", PAIR_S)
    block = {"granularity": 16, "cost": str(tmp_path / "profile.json")}
    with open_hosts(2) as hosts:
        found, logs = finish(start(hosts, [0, 0, 1], lengths=[[700], [200, 100], [150, 50, 9]], block=block, steps=5))
    for one in found:
        assert one["losses"] == pytest.approx([one["expected"]] * 5, rel=1e-5)
        assert "between hosts 0.0" in one["says"] and "(measured)" in one["says"]
        assert 0 < float(one["says"].split("between hosts ")[1].split(" GB/s")[0]) < 0.015, "100 Mbit/s are 0.0125 GB/s"
    assert "links" in logs[0] and len({one["says"].split(", links")[1] for one in found}) == 1


@pytest.mark.slow
def test_what_moves_stays_off_the_slow_link(tmp_path: Path) -> None:
    """A long document, a neighbour with time, and a rank with as much time behind 20 Mbit/s, by the profile."""
    write_profile(tmp_path / "profile.json", PAIR_S)
    block = {"granularity": 16, "cost": str(tmp_path / "profile.json"), "links": {"inside": 1.0, "between": 0.0025}}
    with open_hosts(2, "20mbit") as hosts:
        started = start(hosts, [0, 0, 1], lengths=[[700], [100, 50], [100, 50]], block=block, steps=3, fixed=True)
        near, _, far = (one["exchanged"] for one in finish(started)[0])
    assert near > 100_000, "the neighbour helps"
    assert far < 0.1 * near, (near, far)


def _errors(count: int, moment: str, breaks: Callable[[Hosts], None]) -> list[str]:
    """Of ranks on hosts between which something breaks as soon as all of them have come to a moment."""
    block, lengths = {"granularity": 16, "timeout_s": 20.0, "cost": "pairs"}, [[300], *[[40]] * (count - 1)]
    with open_hosts(count) as hosts:
        processes = start(hosts, [*range(count)], moment, lengths=lengths, linger_s=20, steps=9999, block=block)
        for process in processes:
            assert process.stdout.readline().strip() == moment, process.communicate(timeout=20)[1][-3000:]
        breaks(hosts)
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
        return [one["error"] for one in finish(processes, block["timeout_s"] + ERROR_S)[0]]


@pytest.mark.long
def test_a_link_that_dies_is_an_error_on_every_rank() -> None:
    assert all("rank" in one for one in _errors(2, "trains", lambda hosts: hosts.cut(1)))


@pytest.mark.long
def test_hosts_that_cannot_reach_each_other_are_one_clear_error() -> None:
    """The store is reached by all; two hosts lose their route to each other before CAD is turned on."""
    for one in _errors(3, "joined", lambda hosts: (hosts.forbid(1, 2), hosts.forbid(2, 1))):
        assert "GLOO_SOCKET_IFNAME" in one and "rank" in one, one
