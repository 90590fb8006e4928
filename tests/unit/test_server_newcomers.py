"""Servers that come while a job runs, in this process: asked in, given up, or told that the training has ended."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADPeerError
from deepspeed_cad.server.handshake import Listener
from deepspeed_cad.server.join import open_board
from deepspeed_cad.server.rendezvous import Abandoned, Rendezvous, hello
from deepspeed_cad.server.split import Split
from deepspeed_cad.server.surviving import change
from deepspeed_cad.server.surviving.board import look_for_end, wait_to_be_asked_in
from deepspeed_cad.server.surviving.change import SurvivingServers
from deepspeed_cad.server.surviving.link import SurvivingLink

CONFIG = CADConfig(servers={"joined": 1}, on_server_failure="continue", timeout_s=20)


class Job:
    """One trainer, whose only server is gone, and servers that come."""

    def __init__(self, place: str, pool: ThreadPoolExecutor) -> None:
        self.place, self.pool = place, pool
        role = Split(1, 1, 0, place)
        meeting = Rendezvous(role, CONFIG.timeout_s)
        meeting.root.set("hello/0", "{}")
        self.link = SurvivingLink(0, {}, open_board(meeting, role, CONFIG), 20.0)
        self.servers = SurvivingServers(role, CONFIG, self.link.liveness, self.link, torch.device("cpu"))

    def knock(self, number: int) -> Rendezvous:
        """A server comes; nobody says that it lives on."""
        role = Split(1, 1, number, self.place)
        meeting = Rendezvous(role, CONFIG.timeout_s)
        meeting.knock(hello(role, CONFIG, "1.0"))
        return meeting

    def come(self, number: int) -> Future[dict[int, socket.socket]]:
        """A server comes and goes on as its process does; gives its connections."""
        meeting = self.knock(number)

        def live() -> dict[int, socket.socket]:
            board = open_board(meeting, meeting.split, CONFIG)
            wait_to_be_asked_in(board)
            listener = Listener(number, self.place)
            meeting.open_door(listener.door)
            return listener.accept(1, CONFIG.timeout_s, lambda: look_for_end(board))

        return self.pool.submit(live)


@pytest.fixture
def job() -> Iterator[Job]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ThreadPoolExecutor(2) as pool:
        made = Job(f"127.0.0.1:{store.port}", pool)
        yield made
        made.servers.close()
        made.link.leave("the test is over")
        made.link.drop()


def test_the_leader_sees_who_came(job: Job) -> None:
    seen = threading.Event()
    job.servers.passes.halt = seen.set  # type: ignore[method-assign]
    job.servers.begin(None, lambda opened: None)
    for number in (2, 3):
        job.knock(number)
    for _ in range(200):
        if job.servers.newcomers == 2:
            break
        seen.wait(0.05)
    assert job.servers.newcomers == 2 and not seen.is_set(), "they take part when a micro-batch is gathered"


def test_one_that_died_after_it_came_is_given_up_and_the_next_one_is_let_in(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change, "CONNECT_S", 0.3)
    dead = job.knock(2)
    lives = job.come(3)
    assert job.servers._let_in(0) == 2
    assert "came and did not listen within 0.3 s" in job.link.gone[2]
    with pytest.raises(CADPeerError, match="the trainers go on without it: server 2 on .* did not listen"):
        look_for_end(open_board(dead, dead.split, CONFIG))
    monkeypatch.setattr(change, "CONNECT_S", 20.0)
    assert job.servers._let_in(1) == 3
    assert list(lives.result(20)) == [0] and list(job.link.gone) == [2]


def test_one_that_cannot_listen_says_why(job: Job) -> None:
    job.knock(2).open_door("no network leads there")
    assert job.servers._let_in(0) == 2
    assert job.link.gone[2].startswith("server 2 on") and "cannot listen: no network leads" in job.link.gone[2]


@pytest.mark.parametrize("asked", [False, True])
def test_one_that_comes_too_late_ends_well(job: Job, asked: bool) -> None:
    waits = job.come(2)
    if asked:
        job.link.liveness.store.set("asked/2", "now")
    job.link.leave("")
    with pytest.raises(Abandoned, match="the training ended before it came to a step"):
        waits.result(20)
