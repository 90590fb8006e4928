"""Servers that are lost, and servers that come while a job runs: asked in, given up, or told that training ended."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADPeerError, ServerLostError
from deepspeed_cad.exchange.failure.board import Liveness
from deepspeed_cad.server import servers as room
from deepspeed_cad.server.launch import Split
from deepspeed_cad.server.links import ServerLink
from deepspeed_cad.server.meeting import (
    Abandoned,
    Hello,
    Members,
    Rendezvous,
    look_for_end,
    open_board,
    wait_to_be_asked_in,
    why_not_change,
)
from deepspeed_cad.server.servers import SurvivingServers, speeds_of
from deepspeed_cad.server.sockets import Listener

CONFIG = CADConfig(servers={"joined": 1}, on_server_failure="continue", timeout_s=20)


class Job:
    """One trainer, whose only server is gone, and servers that come."""

    def __init__(self, place: str, pool: ThreadPoolExecutor) -> None:
        self.place, self.pool = place, pool
        role = Split(1, 1, 0, place)
        meeting = Rendezvous(role, CONFIG.timeout_s)
        meeting.root.set("hello/0", "{}")
        self.link = ServerLink(0, {}, open_board(meeting, True), 20.0)
        self.servers = SurvivingServers(meeting, CONFIG, self.link.liveness, self.link, torch.device("cpu"))

    def knock(self, number: int) -> Rendezvous:
        """A server comes; nobody says that it lives on."""
        role = Split(1, 1, number, self.place)
        meeting = Rendezvous(role, CONFIG.timeout_s)
        meeting.knock(Hello.of(role, CONFIG))
        return meeting

    def come(self, number: int) -> Future[dict[int, socket.socket]]:
        """A server comes and goes on as its process does; gives its connections."""
        meeting = self.knock(number)

        def live() -> dict[int, socket.socket]:
            board = open_board(meeting, True)
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


def test_one_that_died_after_it_came_is_given_up_and_the_next_one_is_let_in(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "CONNECT_S", 0.3)
    dead = job.knock(2)
    lives = job.come(3)
    assert job.servers._let_in(0) == 2
    assert "came and did not listen within 0.3 s" in job.link.gone[2]
    with pytest.raises(CADPeerError, match="the trainers go on without it: server 2 on .* did not listen"):
        look_for_end(open_board(dead, True))
    monkeypatch.setattr(room, "CONNECT_S", 20.0)
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


@pytest.mark.parametrize(
    ("policy", "device", "transport", "refused"),
    [
        ("stop", "cuda", "c10d", ""),
        ("continue", "cpu", "c10d", ""),
        ("continue", "cuda", "auto", ""),
        ("continue", "cuda", "nvlink", ""),
        ("continue", "cuda", "c10d", 'key "transport" is "c10d", of which nothing can be given up'),
    ],
)
def test_where_servers_may_change(policy: str, device: str, transport: str, refused: str) -> None:
    config = CADConfig(servers={"reserved": 1}, on_server_failure=policy, transport=transport)
    found = why_not_change(config, torch.device(device))
    assert refused in found and bool(refused) == bool(found)


def test_only_what_servers_take_part_in_is_lost_with_one() -> None:
    board = Liveness(dist.HashStore(), 0, 3)
    board.losses = SimpleNamespace(why=lambda: "server 2 ended", wait=lambda: "server 2 ended")
    with pytest.raises(ServerLostError, match="server 2"), Liveness.watch(board, "an exchange", with_servers=True):
        raise RuntimeError("connection closed by peer")
    assert board.reason(0) is None  # this rank has not stopped
    board.watched = range(1)
    with pytest.raises(CADPeerError) as caught, Liveness.watch(board, "lengths"):
        raise RuntimeError("connection closed by peer")
    assert not isinstance(caught.value, ServerLostError)


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((2, 3), [1.0, 2.0, 0.5, 0.25]),
        ((3,), [1.0, 2.0, 0.25]),  # server 2 died
        ((3, 4), [1.0, 2.0, 0.25, 0.375]),  # and another came, of which nobody knows how fast it is
        ((), [1.0, 2.0]),
    ],
)
def test_speeds_follow_servers_that_change(numbers: tuple[int, ...], expected: list[float]) -> None:
    found = speeds_of(Members(1, 2, numbers), np.array([1.0, 2.0, 0.5, 0.25]))
    assert found.tolist() == expected
