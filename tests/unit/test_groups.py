"""Which groups a rank opens, asks and closes, and what it is told that does not reach all others."""

import gc
import socket
import weakref
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from deepspeed_cad import groups
from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADConfigError, CADError, CADPeerError
from deepspeed_cad.exchange import group
from deepspeed_cad.exchange.group import LETTING_GO_S, OPENING, OwnGroup, has_ways_apart, make_group, numbers_of
from deepspeed_cad.groups import Groups, open_groups
from deepspeed_cad.server.servers import NoServers
from deepspeed_cad.shares import Replica

GPU, LIMIT = torch.device("cuda", 0), timedelta(seconds=9)


@pytest.fixture()
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    """The groups that are made by rank 2 of four, of which 0 and 1, and 2 and 3 divide heads."""
    made: list[tuple[Any, dict[str, Any]]] = []

    def make(members: list[int] | None = None, **how: Any) -> int:
        made.append((members, how))
        return len(made)

    def gather(into: list[Any], own: Any, group: int) -> None:
        assert (own, group) == ((Replica((2, 3)), socket.gethostname()), 1)
        into[:] = [(Replica((rank & 2, rank | 1)), f"host {rank}") for rank in range(4)]

    monkeypatch.setattr(dist, "new_group", make)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=SimpleNamespace), raising=False)
    monkeypatch.setattr(groups, "open_board", lambda *given: SimpleNamespace(given=given))
    monkeypatch.setattr(groups, "call_roll", mock.Mock())
    return made


def test_ranks_that_divide_heads_exchange_with_those_of_their_share(opened: list, monkeypatch: Any) -> None:
    found = open_groups(CADConfig(timeout_s=9.0), GPU, Replica((2, 3)), 2, 4)
    gloo = {"timeout": LIMIT, "backend": "gloo"}
    options = SimpleNamespace(_timeout=LIMIT, is_high_priority_stream=True)
    nccl = {"timeout": LIMIT, "backend": "nccl", "pg_options": options}
    assert opened == [(None, gloo), ([0, 2], nccl), ([0, 2], gloo), ([1, 3], nccl), ([1, 3], gloo)]
    assert (found.cpu, found.exchange, found.share, found.hosts) == (1, 2, 3, ["host 0", "host 2"])
    board: Any = found.liveness
    assert (board.given, board.watched, board.beside) == ((1, 2, 4, 9.0), [0, 2], [1, 3])
    assert found.servers.crew(None, None).trainers == 2
    groups.call_roll.assert_called_once_with(9.0)  # type: ignore[attr-defined]
    of_job = mock.Mock()
    monkeypatch.setattr(groups, "numbers_of", lambda *given: [*given])
    assert found.agree(of_job)(7) == [3, board, 7] and of_job.mock_calls == [mock.call(0)]
    opened.clear()
    groups._open_trainers(9.0, GPU, Replica((2, 3)), 2, 4, exchanges=False)
    assert opened == [(None, gloo)], "servers open theirs with them"


def test_whom_a_rank_asks_and_what_it_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    of_job, own, closed = mock.Mock(return_value=[7, 8]), mock.Mock(spec=OwnGroup), list[object]()
    monkeypatch.setattr(groups, "numbers_of", lambda *given: [*given])
    monkeypatch.setattr(dist, "destroy_process_group", closed.append)
    asked: Any = [Groups(NoServers(1)), Groups(NoServers(1), own, own, liveness="board"), Groups(NoServers(1), "cpu")]
    assert [one.agree(of_job)(7) for one in asked] == [[7], [own, "board", 7], [7, 8]]
    for is_there in (True, False):
        monkeypatch.setattr(dist, "is_initialized", lambda is_there=is_there: is_there)
        Groups(NoServers(1), "cpu", own, share="share").close()  # type: ignore[arg-type]
    assert closed == ["cpu", "share"] and own.close.call_count == 2


def test_numbers_of_all_ranks_are_waited_for_patiently(monkeypatch: pytest.MonkeyPatch) -> None:
    work, board, own = mock.Mock(), mock.Mock(), OwnGroup(1, 2, "own", mock.Mock(), mock.Mock())

    def gather(into: list[torch.Tensor], value: torch.Tensor, group: object, async_op: bool) -> Any:
        assert (group, async_op) == (own.processes, True)
        into[0].fill_(5), into[1].copy_(value)
        return work

    monkeypatch.setattr(dist, "all_gather", gather)
    assert numbers_of(own, board, 7) == [5, 7]
    board.patiently.assert_called_once_with(work.get_future().done, OPENING, with_servers=True)
    work.wait.side_effect = RuntimeError("reset")
    with pytest.raises(CADPeerError, match=f"^{OPENING} failed: reset$"):
        numbers_of(own, None, 7)


def test_a_group_of_a_store_alone_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    find, cpu = dist.distributed_c10d._resolve_process_group, torch.device("cpu")
    own = make_group(dist.HashStore(), 0, 1, cpu, "own", 9.0)
    assert find("own") is own.processes and numbers_of(own, None, 5) == [5]
    own.close()
    with pytest.raises(RuntimeError):
        find("own")
    monkeypatch.setattr(dist, "ProcessGroupGloo", mock.Mock(side_effect=TypeError("no timeout")))
    with pytest.raises(CADError, match=r"in a way that is not known here \(no timeout\)"):
        make_group(dist.HashStore(), 0, 1, cpu, "own", 9.0)


def test_a_group_is_given_up_while_others_may_still_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gone, later = mock.Mock(), list[Any]()
    monkeypatch.setattr(group, "_TORCH", gone)
    monkeypatch.setattr(group, "start_daemon", lambda name, run, device: later.append(run))
    monkeypatch.setattr(group, "time", gone)
    own = OwnGroup(1, 2, "own", gone, gone)
    held = weakref.ref(own)
    assert [has_ways_apart(*one) for one in ((own, False), (own, True), (gone, False))] == [True, False, False]
    group.abort(own, GPU)
    own.abandon()
    del own
    gc.collect()
    assert held() is not None
    later[0]()
    gc.collect()
    assert held() is None
    aborted = [mock.call._get_backend(GPU), mock.call._get_backend().abort()]
    assert gone.mock_calls == [*aborted, mock.call._unregister_process_group("own"), mock.call.sleep(LETTING_GO_S)]


def test_a_rank_that_does_not_reach_all_others_is_told_what_to_set(opened: list, monkeypatch: Any) -> None:
    monkeypatch.setattr(dist, "all_gather_object", lambda *given, group: None)  # as if all said the same
    with pytest.raises(CADConfigError, match="rank 0 is not among the ranks"):
        open_groups(CADConfig(), GPU, Replica((2, 3)), 2, 4)
    monkeypatch.setattr(dist, "new_group", mock.Mock(side_effect=RuntimeError("timed out")))
    words = r"^rank 1 on .* to all other ranks, with 9 s for each try \(timed out\)\. .*: set GLOO_SOCKET_IFNAME"
    with pytest.raises(CADPeerError, match=words):
        open_groups(CADConfig(timeout_s=9.0), GPU, None, 1, 4)
