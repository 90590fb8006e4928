"""Trainers and servers meet: the same error on every rank where they do not belong together."""

import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from test_roll_call import on_ranks

from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADConfigError, CADError, CADPeerError, CADUnsupportedError, ServerLostError
from deepspeed_cad.exchange.failure import patience
from deepspeed_cad.launch.armed import farewell
from deepspeed_cad.request import VARIABLE, Request
from deepspeed_cad.server import meeting as meetings
from deepspeed_cad.server import process
from deepspeed_cad.server import servers as room
from deepspeed_cad.server.launch import PROCESS, Split, find_role, published, take_role
from deepspeed_cad.server.links import ServerLink
from deepspeed_cad.server.loop import Loop, ServedMicroBatch
from deepspeed_cad.server.meeting import Hello, Members, Rendezvous, look_for_errors, open_board, take_place
from deepspeed_cad.server.orders import RELEASE
from deepspeed_cad.server.process import _Server
from deepspeed_cad.server.servers import SurvivingServers, speeds_of
from deepspeed_cad.server.sockets import Door, Frame
from deepspeed_cad.version import __version__ as OURS

CONFIG = CADConfig(servers={"reserved": 1})
JOINED = CADConfig(servers={"joined": 1})
SERVER, CPU = Split(2, 1, 2, "here:1"), torch.device("cpu")


@pytest.fixture
def place() -> Iterator[str]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield f"127.0.0.1:{store.port}"


def _all(place: str, say: Callable[[Split, Hello], Hello], timeout_s: float = 20.0, ranks: int = 3) -> list[Any]:
    """What each of two trainers and a server gives or raises, where `say` makes of a rank's word what it says."""

    def meet(rank: int) -> Any:
        role = Split(2, 1, rank, place)
        meeting = Rendezvous(role, timeout_s)
        meeting.claim()
        return meeting.meet(say(role, Hello.of(role, CONFIG)))

    return on_ranks(meet, ranks)


@pytest.mark.parametrize("changes, words", [
    ({"version": "0.9"}, f"server 2 on .* has deepspeed_cad 0.9 and trainer 0 on .* has {OURS}: install the same"),
    ({"config": CONFIG.to_dict() | {"granularity": 64}}, 'different "cad" blocks .granularity: 128 and 64.'),
    ({"servers": 2}, "counts 2 trainers and 1 servers, server 2 on .* 2 and 2"),
])  # fmt: skip
def test_the_same_error_on_every_rank(place: str, changes: dict[str, Any], words: str) -> None:
    found = _all(place, lambda role, mine: replace(mine, **changes) if role.is_server else mine)
    assert [type(one) for one in found] == [CADConfigError] * 3 and len({str(one) for one in found}) == 1
    with pytest.raises(CADConfigError, match=words):
        raise found[0]


def test_a_server_that_does_not_come(place: str, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(patience, "LATE_S", 0.1)
    found = _all(place, lambda role, mine: mine, timeout_s=5.0, ranks=2)
    assert all(re.fullmatch(r"rank [01] has waited 0 s for .*server 2", text) for text in caplog.messages)
    assert len(caplog.messages) == 2
    assert all(isinstance(one, CADConfigError) and "server 2 did not come within 5 s" in str(one) for one in found)


def test_all_read_what_all_say_and_another_launch_is_refused(place: str) -> None:
    said = _all(place, lambda role, mine: mine)
    assert said[0] == said[1] == said[2] and [one.rank for one in said[0]] == [0, 1, 2]
    for words in "rank 2 opened a session with reserved servers before", "two launches use the same rendezvous":
        with pytest.raises(CADConfigError, match=words):
            Rendezvous(Split(2, 1, 2, place), 20.0).claim()
        meetings._claimed.clear()  # as in another process


@pytest.mark.parametrize("config, ranks", [
    (JOINED, [2]), (replace(JOINED, on_server_failure="continue"), [2, 3]),
    (replace(CONFIG, on_server_failure="continue"), [3, 4]),
])  # fmt: skip
def test_a_server_of_another_launch_takes_the_next_place(place: str, config: CADConfig, ranks: list[int]) -> None:
    role = Split(2, 1, 0, place, 5)
    meetings.offer_places(Rendezvous(role, 20.0), Hello.of(role, config))
    found = [(*one, one[0].came_later) for one in (take_place(place, 20.0) for _ in ranks)]
    assert found == [(Split(2, 1, rank, place, 5), config, rank > 2) for rank in ranks]


@pytest.mark.parametrize("changes, words", [
    # A key that only the other version knows is not what is wrong.
    ({"version": "99.0", "config": {"colour": "blue"}}, f"has deepspeed_cad 99.0 and this server has {OURS}"),
    ({"config": CONFIG.to_dict()}, "it launches its servers itself"),
    ({"servers": 0}, "has its 0 servers already"),
])  # fmt: skip
def test_a_job_that_does_not_fit(place: str, changes: dict[str, Any], words: str) -> None:
    role = Split(2, 1, 0, place)
    meetings.offer_places(Rendezvous(role, 20.0), replace(Hello.of(role, JOINED), **changes))
    with pytest.raises(CADConfigError, match=words):
        take_place(place, 20.0)


def test_no_job(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepspeed_cad.server.meeting.wait_until", lambda ask, timeout_s: ask())
    with pytest.raises(CADPeerError, match="no training with reserved servers came to it within 20 s"):
        take_place(place, 20.0)


@pytest.mark.parametrize("does", [("set",), ("set", "append")])
def test_a_newcomer_that_dies_on_its_way_hides_nobody(place: str, does: tuple[str, ...]) -> None:
    dies, lives = (Rendezvous(Split(2, 1, rank, place), 20.0) for rank in (3, 4))
    dies.root = SimpleNamespace(**{name: getattr(dies.root, name) for name in does})  # type: ignore[assignment]
    with suppress(AttributeError):
        dies.knock(Hello.of(dies.split, CONFIG))
    lives.knock(Hello.of(lives.split, CONFIG))
    assert sorted(Rendezvous(Split(2, 1, 0, place), 20.0).who_came()) == ([3, 4] if "append" in does else [4])


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 1, "WORLD_SIZE": 3, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 3}.items():
        monkeypatch.setenv(name, str(value))
    # So that what the tests set is put back.
    monkeypatch.setenv(VARIABLE, "")


@pytest.mark.parametrize(("reason", "kind"), [("", meetings.Abandoned), ("ValueError: no data", CADPeerError)])
def test_a_server_whose_trainers_end_early(
    launched: None, place: str, reason: str, kind: Any, monkeypatch: Any
) -> None:
    monkeypatch.setenv("MASTER_PORT", place.split(":")[1])
    take_role(Request(CONFIG, "a test"))[0].publish()
    for words in (reason, "exit code 1"):  # which comes after the error
        farewell(words)
    with pytest.raises(kind, match=f"trainer 1 ended without having trained with CAD(: )?{reason}$"):
        Rendezvous(Split(2, 1, 2, place), 20.0).meet(Hello.of(Split(2, 1, 2, place), CONFIG))
    monkeypatch.setattr(Rendezvous, "leave", mock.Mock(side_effect=CADPeerError("the store is gone")))
    farewell("")  # nobody is there to be told


@pytest.mark.parametrize(("world", "rank"), [(3, 1), (2, 0)])
def test_a_world_with_other_numbers(launched: None, world: int, rank: int) -> None:
    request, server = take_role(Request(CONFIG, "a test"))
    request.publish()
    assert server is None and os.environ["WORLD_SIZE"] == "2" and find_role(CONFIG.servers, 2, 1) is not None
    with pytest.raises(CADConfigError, match=f"counts {world} ranks here and this is rank {rank}, but 2 trainers were"):
        find_role(CONFIG.servers, world, rank)


def test_a_process_that_a_trainer_started_is_no_trainer(launched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    request, _ = take_role(Request(CONFIG, "a test"))
    request.publish()
    replace(request, split={**(request.split or {}), PROCESS: os.getpid() + 1}).publish()
    monkeypatch.setenv("LOCAL_SIZE", "7")
    for name, processes in ("LOCAL_WORLD_SIZE", "2"), ("LOCAL_SIZE", "7"), (VARIABLE, "N"):
        with pytest.raises(CADConfigError, match=f"per_node {processes} -m deepspeed_cad.run --cad '{{\"servers"):
            find_role(CONFIG.servers, 2, 1)
        monkeypatch.delenv(name)
    monkeypatch.setenv(VARIABLE, "{")
    assert published() is None, "what it is says whoever reads it"


def test_a_world_that_is_made_already(launched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(CADConfigError, match="torch.distributed is initialised already"):
        take_role(Request(CONFIG, "a test"))
    for config in (CADConfig(), replace(CONFIG, enabled=False)):
        assert take_role(request := Request(config, "a test")) == (request, None)
    assert find_role("all", 2, 1) is None
    joined = find_role({"joined": 2}, 3, 1)
    assert joined is not None and (joined.trainers, joined.servers, joined.rank) == (3, 2, 1), "all of the launch train"


CHANGES = CADConfig(servers={"joined": 1}, on_server_failure="continue", timeout_s=20)


class Job:
    """One trainer, whose only server is gone, and servers that come."""

    def __init__(self, place: str, pool: ThreadPoolExecutor) -> None:
        self.place, self.pool = place, pool
        meeting = Rendezvous(Split(1, 1, 0, place), CHANGES.timeout_s)
        meeting.root.set("hello/0", json.dumps(asdict(Hello.of(meeting.split, CHANGES))))
        self.link = ServerLink(0, {}, open_board(meeting, True), 20.0)
        self.servers = SurvivingServers(meeting, CHANGES, self.link.liveness, self.link, CPU)
        self.link.liveness.losses = self.servers

    def knock(self, number: int) -> Rendezvous:
        role = Split(1, 1, number, self.place)
        meeting = Rendezvous(role, CHANGES.timeout_s)
        meeting.knock(Hello.of(role, CHANGES))
        return meeting

    def come(self, number: int) -> Future[_Server]:
        """A server comes; gives it when it is let in."""
        server = _Server(Split(1, 1, number, self.place), CHANGES, CPU)
        server._end_with_trainers = lambda: None  # type: ignore[method-assign]  # or it would end this process
        return self.pool.submit(lambda: server.open() or server)  # type: ignore[func-returns-value]


@pytest.fixture
def job(place: str) -> Iterator[Job]:
    with ThreadPoolExecutor(2) as pool:
        made = Job(place, pool)
        yield made
        made.servers.close()
        made.link.leave("the test is over")
        made.link.drop()


def test_one_that_died_after_it_came_is_given_up_and_the_next_one_is_let_in(job: Job, monkeypatch: Any) -> None:
    monkeypatch.setattr(room, "CONNECT_S", 0.3)
    dead = job.knock(2)
    lives = job.come(3)
    assert job.servers._let_in(0) == 2 and "came and did not listen within 0.3 s" in job.link.gone[2]
    with pytest.raises(CADPeerError, match="the trainers go on without it: server 2 on .* did not listen"):
        meetings.look_for_end(open_board(dead, True))
    monkeypatch.setattr(room, "CONNECT_S", 20.0)
    assert patience.wait_until(lambda: job.servers.newcomers == 2, 20.0) and job.servers._let_in(1) == 3
    server = lives.result(20)
    assert list(server._links._connections) == [0] and list(job.link.gone) == [2] and server.opened is None
    assert (server.liveness.watched, server.liveness.losses) == (range(1), server.trainers)


def test_one_that_cannot_listen_says_why(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "Listener", mock.Mock(side_effect=CADPeerError("no network leads there")))
    came = job.come(2)
    assert patience.wait_until(lambda: job.servers.newcomers == 1, 20.0) and job.servers._let_in(0) == 2
    assert job.link.gone[2].startswith("server 2 on") and "cannot listen: no network leads" in job.link.gone[2]
    with pytest.raises(CADPeerError, match="^no network leads there$"):
        came.result(20)


def test_one_without_a_transport_ends_alone_and_one_that_died_is_named(job: Job, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(room, "open_again", mock.Mock(side_effect=CADUnsupportedError("c10d: another rank could not")))
    monkeypatch.setattr(job.link, "change", mock.Mock())
    job.servers.begin(None, mock.Mock())
    monkeypatch.setattr(job.servers, "_let_in", lambda index: 2 + index)
    job.link.gone |= {1: "it ended", 2: "it died"}
    job.servers._change(2)
    ended = "server 3 ended: it came, and could not be reached by a transport: c10d: another rank could not"
    said = f"server 1 ended: it ended; server 2 ended: it died; {ended}. Training goes on with the trainers alone"
    assert said in capsys.readouterr().err
    with pytest.raises(CADUnsupportedError):  # where nobody has just come
        monkeypatch.setattr(job.servers, "_agree", lambda came: None)
        job.servers.members = Members(3, 1, (1,), 0)
        job.servers._change()


def test_a_door_that_is_not_found_is_told_to_all(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [Hello.of(Split(1, 1, rank, place), JOINED) for rank in range(2)]
    monkeypatch.setattr(Rendezvous, "meet", lambda self, mine: others)
    server = Rendezvous(Split(1, 1, 1, place), 20.0)
    server.knock(others[1])
    server.open_door("no network leads there")
    look_for_errors(open_board(server, False))
    with pytest.raises(CADPeerError, match="cannot listen: no network leads there"):
        room.join_servers(Split(1, 1, 0, place), JOINED, CPU)
    with pytest.raises(CADPeerError, match="server 1 waited for trainers to connect: rank 0 stopped: .* no network"):
        look_for_errors(open_board(server, False))
    Rendezvous(Split(1, 1, 1, place, 1), 20.0).open_door(Door("there", 7, "00"))
    with mock.patch.multiple(room, **dict.fromkeys(("connect_to", "ServerLink", "open_group"), mock.DEFAULT)) as made:
        servers, _ = room.join_servers(Split(1, 1, 0, place, 1), replace(JOINED, timeout_s=30.0), CPU)
    made["ServerLink"].assert_called_once_with(0, {1: made["connect_to"].return_value}, servers.liveness, 15.0)


def test_a_store_is_waited_for_in_time_and_not_by_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in "127.0.0.1:1", "127.0.0.1":
        with pytest.raises(CADPeerError, match=f"no store of torch.distributed answers at {place} .* within 0.2 s: "):
            meetings.open_store(place, 0.2)
    by: list[threading.Thread] = []
    monkeypatch.setattr(dist, "TCPStore", lambda *given, **words: by.append(threading.current_thread()) or "store")
    assert meetings.open_store("127.0.0.1:29500", 5.0) == "store" and by[0] is not threading.main_thread()


def test_trainers_that_cannot_tell_each_other_stop_in_time(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}
    monkeypatch.setattr("deepspeed_cad.exchange.failure.board.WORDS_S", 0.1)
    monkeypatch.setattr(dist, "new_group", lambda **words: made.update(words) or "trainers")
    monkeypatch.setattr(dist, "all_reduce", mock.Mock(side_effect=RuntimeError("Connection closed by peer")))
    meeting = Rendezvous(Split(2, 1, 0, job.place), 20.0)
    two = SurvivingServers(meeting, CHANGES, job.link.liveness, job.link, CPU)
    assert made == {"timeout": timedelta(seconds=20), "backend": "gloo"} and not two._calls(len).compares_plans
    with pytest.raises(CADPeerError, match="rank 0 waited for what the other trainers say of servers: .*Connection"):
        two._all(True)


def test_a_server_that_one_trainer_lost_is_lost_for_all(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Server 2 as this trainer saw it, server 3 as the other did, which has started one exchange more."""

    def gather(words: list[Any], mine: Any, group: str) -> None:
        words[:] = [mine, ([3], 8)]

    monkeypatch.setattr(dist, "new_group", lambda **words: "trainers")
    monkeypatch.setattr(dist, "all_gather_object", gather)
    changed = mock.Mock()
    monkeypatch.setattr(job.link, "change", changed)
    meeting = Rendezvous(Split(2, 3, 0, job.place), 20.0)
    two = SurvivingServers(meeting, CHANGES, job.link.liveness, job.link, CPU)
    two._transport = mock.Mock(exchanges=7)
    job.link.gone[2] = "it ended"
    two._agree(0)
    assert two.members == Members(1, 2, (4,), 8) and changed.call_args.args[:2] == ((4,), 1)


def test_what_was_sent_counts_and_memory_is_freed_when_all_have_theirs(job: Job, monkeypatch: Any, caplog: Any) -> None:
    """While a transport is opened anew another server is lost, to this trainer and then to another one."""
    board = job.servers.liveness
    first, second, third = (mock.Mock(bytes_sent=sent, exchanges=3) for sent in (5, 0, 0))
    early, opened, idle = mock.Mock(transport=second), mock.Mock(transport=third), list[int | None]()
    board.idle_after = lambda: 5
    monkeypatch.setattr(room, "open_again", mock.Mock(side_effect=[ServerLostError("server 7 ended"), early, opened]))
    monkeypatch.setattr(job.servers, "_all", all_have := mock.Mock(side_effect=[False, False, True, True]))
    monkeypatch.setattr(job.link, "change", lambda *given: idle.append(board.idle_after()))
    job.servers.begin(first, install := mock.Mock())
    with caplog.at_level("INFO", "deepspeed_cad"):
        job.servers._change()
    assert job.servers.bytes_sent == 5 and "server 7 ended" in caplog.text
    assert install.call_args == mock.call(opened) and job.servers.generation == 3
    assert idle == [None] * 3 and board.idle_after() == 5, "this rank starts no exchange meanwhile"
    freed = [one.abandon.return_value for one in (first, second)]
    assert not any(one.called for one in freed) and job.servers.all_have(True) and not third.abandon.called
    assert all(one.called for one in freed)
    assert [call.args[0] for call in all_have.call_args_list] == [False, True, True, True]


def test_nobody_is_told_of_newcomers_where_the_store_is_gone(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.knock(2)
    assert job.servers.report(0).tolist() == [1]
    monkeypatch.setattr(job.servers._meeting, "who_came", mock.Mock(side_effect=CADPeerError("the store is gone")))
    assert job.servers.report(0).tolist() == [0]


def test_why_no_exchange_can_end(job: Job, monkeypatch: Any) -> None:
    """A server of this group is lost, or another trainer has called."""
    monkeypatch.setattr(room, "time", mock.Mock(**{"monotonic.side_effect": [100.0, 100.1, 101.0]}))
    assert job.servers.why() == ""
    job.servers._meeting.root.set("called/0", "1")
    assert [job.servers.why(), job.servers.why()] == ["", "another trainer has lost a server"]
    job.link.gone |= {1: "it died", 7: "long ago"}
    assert job.servers.wait() == "server 1 ended: it died"
    monkeypatch.setattr(room, "wait_until", waits := mock.Mock(side_effect=CADPeerError))
    assert job.servers.wait() == ""
    job.servers.members = Members(1, 1, ())
    assert job.servers.wait() == "" and [call.args[1] for call in waits.call_args_list] == [room.BLAME_S, 0]


def test_no_server_is_blamed_where_trainers_are_lost(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "BLAME_S", 1e9)
    open_board(Rendezvous(Split(1, 1, 1, job.place), 20.0), True).report("out of memory")
    assert job.servers.wait() == ""


def test_ranks_that_do_not_come_to_a_group_are_named(place: str, monkeypatch: Any) -> None:
    meeting, other = (Rendezvous(Split(2, 1, rank, place), 20.0) for rank in (1, 0))
    other.root.set("here/4/0", "1")
    monkeypatch.setattr(meetings, "run_aside", mock.Mock())
    board = open_board(meeting, True)
    assert (board.rank, board.ranks, board.may_change, board.store._limit_s) == (1, 3, True, 10.0)
    board.patiently = asked = mock.Mock(side_effect=[False, True, False])  # type: ignore[method-assign]
    for words in (r"ranks \[3\] of ", ""):
        with pytest.raises(CADPeerError, match=f"rank 1 waited 20 s for {words}ranks to open a group of"):
            meetings.open_group(meeting, Members(4, 2, (3,)), board, CPU)
    assert all(call.kwargs["with_servers"] and call.kwargs["timeout_s"] == 20.0 for call in asked.call_args_list)


@pytest.mark.parametrize("asked", [False, True])
def test_one_that_comes_too_late_ends_well(job: Job, asked: bool) -> None:
    waits = job.come(2)
    if asked:
        job.link.liveness.store.set("asked/2", "now")
    job.link.leave("")
    board = mock.Mock(**{"look_up.return_value": "", "store.check.side_effect": RuntimeError("the store is gone")})
    for end in (lambda: waits.result(20), lambda: meetings.look_for_end(board)):
        with pytest.raises(meetings.Abandoned, match="the training ended before it came to a step"):
            end()


@pytest.mark.parametrize("named, local, uses, found", [
    ("", "6", "", "cuda:2"), ("", None, "", "cuda:0"), ("", "6", "cpu", "cpu"), ("cuda:3", "6", "cpu", "cuda:3"),
    ("cpu", "6", "", "cpu"), ("cuda:4", None, "", "there is no device 'cuda:4' here: no such GPU"),
    ("a GPU", None, "", "there is no device 'a GPU' here: "),
])  # fmt: skip
def test_which_of_four_gpus_a_server_takes(named: str, local: Any, uses: str, found: str, monkeypatch: Any) -> None:
    taken = mock.Mock(side_effect=[RuntimeError("no such GPU") if named == "cuda:4" else None])
    for name, there in {"is_available": lambda: True, "device_count": lambda: 4, "set_device": taken}.items():
        monkeypatch.setattr(torch.cuda, name, there)
    monkeypatch.setenv("DS_ACCELERATOR", uses)
    monkeypatch.delenv("LOCAL_RANK", raising=False) if local is None else monkeypatch.setenv("LOCAL_RANK", local)
    with pytest.raises(CADConfigError, match=found) if " " in found else nullcontext():
        assert str(process.choose_device(named)) == found and taken.called == (found != "cpu")


def test_how_a_server_ends_that_does_not_serve(monkeypatch: Any, capsys: Any) -> None:
    """Well where nobody needs it; trainers that have connected hear of all else."""
    server = mock.Mock(**{"open.side_effect": [meetings.Abandoned("all ended"), RuntimeError("no route")]})
    monkeypatch.setattr(process, "_Server", lambda *given: server)
    monkeypatch.setattr(process, "_take_signals", lambda one: None)
    assert [process.serve(SERVER, CHANGES, CPU) for _ in range(2)] == [0, 1]
    said = ["deepspeed_cad: server 2 ends: all ended", "deepspeed_cad: server 2 ended: no route"]
    assert capsys.readouterr().err.splitlines() == said
    server.trainers.fail.assert_called_once_with("no route")


def test_a_signal_ends_a_server_at_once_where_trainers_do_without(monkeypatch: Any, capsys: Any) -> None:
    """Else the second one does, unless it comes with the first."""
    handlers, serves = dict[int, Any](), "serves until its trainers end, or a signal comes again"
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    for config, ended, moments, codes, says in (
        (CONFIG, False, [9.0, 13.9], [], serves), (CONFIG, False, [9.0, 14.0], [130], serves),
        (CONFIG, True, [9.0], [143], "ended"), (CHANGES, False, [9.0], [143], "ended"),
        (CONFIG, None, [9.0], [143], "ended"),  # it has met nobody yet
    ):  # fmt: skip
        links = mock.Mock(**{"ended.is_set.return_value": ended, "wait_for_reason.return_value": ""})
        monkeypatch.setattr(process, "time", mock.Mock(**{"monotonic.side_effect": moments}))
        monkeypatch.setattr(process, "os", left := mock.Mock())
        process._take_signals(mock.Mock(split=SERVER, config=config, trainers=None if ended is None else links))
        for number, _ in zip((signal.SIGTERM, signal.SIGINT), moments):
            handlers[number](number, None)
        first, *others = capsys.readouterr().err.splitlines()
        assert first == f"deepspeed_cad: server 2 {says}: SIGTERM from the launcher or the user"
        assert left._exit.call_args_list == [mock.call(code) for code in codes] and len(others) == (130 in codes)


def test_a_server_that_is_stuck_ends_behind_its_trainers(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(process, "os", left := mock.Mock())
    for reason, closed, codes in ("", True, []), ("", False, [0]), ("trainer 1 died", False, [0, 1]):
        server = mock.Mock(split=SERVER, **{"_links.reason": reason, "_closed.wait.return_value": closed})
        _Server._end_with_trainers(server)
        assert server._links.ended.wait.called and left._exit.call_args_list == [mock.call(code) for code in codes]
    assert capsys.readouterr().err == "deepspeed_cad: server 2 ended: trainer 1 died\n"


@pytest.mark.parametrize("policy, device, transport, refused", [
    ("stop", "cuda", "c10d", False), ("continue", "cpu", "c10d", False), ("continue", "cuda", "auto", False),
    ("continue", "cuda", "nvlink", False), ("continue", "cuda", "c10d", True),
])  # fmt: skip
def test_where_servers_may_change(place: str, policy: str, device: str, transport: str, refused: bool) -> None:
    config, on = replace(CONFIG, on_server_failure=policy, transport=transport), torch.device(device)
    assert bool(meetings.why_not_change(config, on)) == refused
    server, trainer = (Split(2, 1, rank, place) for rank in (2, 0))
    for begin in (_Server(server, config, on).open, partial(room.join_servers, trainer, config, on)) * refused:
        with pytest.raises(CADConfigError, match='key "transport" is "c10d", of which nothing can be given up'):
            begin()


@pytest.mark.parametrize("numbers, expected", [
    ((2, 3), [1.0, 2.0, 0.5, 0.25]),
    ((3,), [1.0, 2.0, 0.25]),  # server 2 died
    ((3, 4), [1.0, 2.0, 0.25, 0.375]),  # and another came, of which nobody knows how fast it is
    ((), [1.0, 2.0]),
])  # fmt: skip
def test_speeds_follow_servers_that_change(numbers: tuple[int, ...], expected: list[float]) -> None:
    assert speeds_of(meetings.Members(1, 2, numbers), np.array([1.0, 2.0, 0.5, 0.25])).tolist() == expected


def test_a_server_holds_no_more_than_there_is_room_for() -> None:
    loop, served = Loop(CPU, mock.Mock(), mock.Mock(), budget=3 << 20), [torch.zeros(3 << 18)]
    loop._hold(served)  # type: ignore[arg-type]
    with pytest.raises(CADError, match="server -1 holds 6 MiB for backwards to come and has 3 MiB for that"):
        loop._hold(served)  # type: ignore[arg-type]
    assert loop.held == loop.most_held == 6 << 20
    loop._new_call = loop._forward = lambda opened, *head: mock.Mock(served=[served])  # type: ignore[method-assign]
    opened = loop._opened[7] = ServedMicroBatch(())
    for held in 6 << 20, 3 << 20:  # the layer runs again, as where it is checkpointed
        loop._begin_pass(opened, (0, 0), {"backward": False})
        assert (loop.held, loop.micro_batches) == (held, 1)
    loop.follow(Frame({"do": RELEASE, "turns": [6, 7]}, []))
    assert (loop.held, loop.most_held, loop._opened) == (0, 6 << 20, {})


def test_a_server_that_ends_closes_what_it_opened(place: str) -> None:
    server = _Server(Split(2, 1, 2, place), CADConfig(servers={"reserved": 1}), CPU)
    server.worker, server._closed = mock.Mock(), threading.Event()
    server._close()  # before it opened anything
    opened = server.opened = mock.Mock()
    server._close()
    assert server._closed.is_set() and server.worker.close.call_count == 2
    opened.transport.close.assert_called_once_with()
    opened.group.close.assert_called_once_with()


@pytest.mark.parametrize("generation", [0, 4])
def test_a_server_takes_part_in_what_is_measured_at_the_start(generation: int, place: str, monkeypatch: Any) -> None:
    """Trainers wait for it there. Where servers change, it follows, and nothing is measured again."""
    said: list[str] = []
    server, before, opened = _Server(Split(2, 1, 3, place), CHANGES, CPU), mock.Mock(), mock.Mock()
    server.meeting = server.liveness = server.loop = loop = mock.Mock()
    server.opened, server._links = before, mock.Mock(generation=-1)
    opens = mock.Mock(side_effect=[opened, CADUnsupportedError("c10d: another rank could not")])
    monkeypatch.setattr(process, "open_again", opens)
    monkeypatch.setattr(process, "with_links", lambda *given: said.append("links"))
    monkeypatch.setattr(process, "find_speeds", lambda *given: said.append("speeds"))
    for ends in nullcontext(), pytest.raises(ServerLostError, match="another rank could not"):
        with ends:
            server._regroup({"generation": generation, "servers": [2, 3], "exchanges": 7})
    assert said == ["links", "speeds"] * (not generation)
    assert opens.call_args.args[1] == Members(generation, 2, (2, 3), 7)
    before.transport.abandon.return_value.assert_called_once_with()
    loop.begin_with.assert_called_once_with(3, opened.transport)
    assert server.opened is None and server._links.generation == generation
