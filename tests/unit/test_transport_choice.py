"""Which transport a group gets: the same on every rank, named reasons, refusals where one was asked for by name."""

import logging
import threading
import time
import weakref
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from deepspeed_cad.errors import CADUnsupportedError, ServerLostError
from deepspeed_cad.exchange import group as peers
from deepspeed_cad.exchange import probe as probing
from deepspeed_cad.exchange.failure.board import Liveness
from deepspeed_cad.exchange.failure.watchdog import Alarm
from deepspeed_cad.exchange.group import OwnGroup, host_group
from deepspeed_cad.exchange.native_calls import UnreachedError
from deepspeed_cad.exchange.probe import choose_transport

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def alone(value: int) -> list[int]:
    return [value]


@pytest.mark.parametrize("name, device, words", [
    ("nvlink", CPU, '"nvlink" does not work here: nvlink: it needs NVIDIA GPUs.*cpu'),
    ("nccl", GPU, '"nccl" does not work here: nccl: it needs NVIDIA GPUs, this torch is built for AMD'),
    ("ib", CPU, 'no transport "ib"; there are: auto, nvlink, mixed, nccl, c10d'),
])  # fmt: skip
def test_a_transport_asked_for_by_name_is_refused_with_its_reason(
    name: str, device: torch.device, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(CADUnsupportedError, match=words):
        choose_transport(name, None, device, alone)  # type: ignore[arg-type]


def test_what_the_doctor_says_of_a_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(probing, "open_nccl", lambda: 22805)
    monkeypatch.setattr(probing, "_local_refusal", lambda name, device: f"no {name} on {device}")
    assert probing.probe("nccl") == (False, "no nccl on cuda:0")
    monkeypatch.setattr(probing, "_local_refusal", lambda name, device: None)
    assert probing.probe("nccl") == (True, "NCCL 2.28.5 as torch loads it")
    for reached in [0], [0, 1]:
        monkeypatch.setattr(probing, "peer_reach", lambda device, reached=reached: reached)
        assert probing.probe("nvlink")[0] == (len(reached) > 1)


@pytest.mark.parametrize("name, needs", [
    ("nccl", {"open_nccl"}), ("nvlink", {"CudaCalls", "symmetric_memory"}),
    ("mixed", {"open_nccl", "CudaCalls", "symmetric_memory"}),
])  # fmt: skip
def test_a_library_that_is_missing_is_the_reason(name: str, needs: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", mock.Mock())
    for missing in ("open_nccl", "CudaCalls", "symmetric_memory"):
        with monkeypatch.context() as patch:
            for one in needs:
                error = CADUnsupportedError("no libnccl") if one == missing else None
                patch.setattr(probing, one, mock.Mock(side_effect=error))
            assert probing._local_refusal(name, GPU) == ("no libnccl" if missing in needs else None)


def test_what_is_opened_knows_its_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    choose, group = mock.Mock(), OwnGroup(1, 2, "own", mock.Mock(), mock.Mock())
    monkeypatch.setattr(probing, "choose_transport", choose)
    monkeypatch.setattr(probing, "host_number", lambda: 9)
    agree, board = (lambda value: [4, value]), mock.Mock()
    opened = probing.open_transport("auto", group, CPU, agree, board, 7.0, ("c10d",))
    assert (opened.group, opened.hosts, opened.transport) == (group, [4, 9], choose.return_value)
    choose.assert_called_once_with("auto", group, CPU, agree, board, 7.0, 9, ("c10d",))


def test_a_host_is_a_name_and_a_start_of_its_system(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [probing.host_number(), probing.host_number()]
    monkeypatch.setattr(probing.socket, "gethostname", lambda: "another")
    found.append(probing.host_number())
    monkeypatch.setattr(probing.Path, "read_text", lambda self: "another")
    assert len({*found, probing.host_number()}) == 3 and found[0] == found[1]


CLOSED: list[str] = []


def made(name: str, *given: object) -> Any:
    """A transport that only says what it was made of."""
    end = partial(CLOSED.append, name), partial(CLOSED.append, f"{name}, given up")
    return SimpleNamespace(name=name, given=given, close=end[0], abandon=lambda: end[1])


@pytest.fixture()
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As if all ranks had GPUs and every library."""
    CLOSED.clear()
    monkeypatch.setattr(probing, "_local_refusal", lambda name, device: None)
    monkeypatch.setattr(probing, "peer_reach", lambda device: [0, 1])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    for name, kind in (("nccl", "NcclTransport"), ("c10d", "c10d_transport")):
        monkeypatch.setattr(probing, kind, partial(made, name))
    monkeypatch.setattr(probing, "LandingTransport", lambda *given: made("mixed" if given[3:] else "nvlink", *given))
    return monkeypatch


class Job:
    """The answers of all ranks to the questions of `choose_transport`, in their order; this rank is 0.

    Questions of "auto" on GPUs: host; then for each candidate: does it fit here; and for nvlink and mixed: GPU, are all
    ranks of the host reached; then: was it made.
    """

    def __init__(self, hosts: list[int], **answers: list[int]) -> None:
        self.hosts, self.answers, self.asked = hosts, answers, 0

    def __call__(self, value: int) -> list[int]:
        self.asked += 1
        if self.asked == 1:
            assert value == self.hosts[0]
            return self.hosts
        return self.answers.get(f"answer_{self.asked}", [value] * len(self.hosts))


def choose(name: str, job: Job) -> Any:
    return choose_transport(name, None, GPU, job, BOARD, 7.0, job.hosts[0])  # type: ignore[arg-type]


BOARD = Liveness(dist.HashStore(), 0, 2)
NO_REACH = "the GPUs of ranks 2, 3 do not reach each other's memory inside their host: nccl carries what they exchange"
UNREACHED = "the GPU of rank 1 cannot reach the memory of all others"
BY_NCCL = "core attention is exchanged by nccl, because mixed: "


@pytest.mark.parametrize("hosts, answers, near, warning", [
    ([7, 7, 9, 9], {}, [0, 0, 2, 2], ""),
    ([7, 9, 7, 9], {}, [0, 1, 0, 1], ""),
    ([7, 7, 7, 9], {}, [0, 0, 0, 3], ""),
    ([7, 9, 9], {}, [0, 1, 1], ""),
    # Rank 0 has GPU 0 and reaches 0 and 1; on the other host there are GPUs 2 and 3.
    ([1, 1, 2, 2], {"answer_3": [0, 1, 2, 3]}, [0, 0, 2, 2], ""),
    ([1, 1, 2, 2], {"answer_3": [0, -1, 2, 3]}, [0, 0, 2, 2], ""),  # rank 1 sees its own GPU only
    ([1, 1, 2, 2], {"answer_4": [1, 1, 1, 0]}, [0, 0, 2, 3], NO_REACH),
    ([1, 2, 3], {}, None, ""),
    ([1, 1, 2, 2], {"answer_4": [1, 0, 0, 1]}, None, BY_NCCL + UNREACHED),
    ([1, 1, 2, 2], {"answer_5": [1, 1, 0, 1]}, None, f"{BY_NCCL}another rank could not start it"),
    ([1, 1, 2, 2], {"answer_3": [0, 2, 0, 1]}, None, f"{BY_NCCL}GPU 0 cannot reach the memory of GPU 2"),
])  # fmt: skip
def test_what_several_hosts_use(
    hosts: list[int], answers: dict[str, list[int]], near: list[int] | None, warning: str,
    gpus: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Peer copies inside hosts where they work, and NCCL; asked for by name "mixed" does that with one rank each."""
    with caplog.at_level(logging.INFO):
        found = choose("auto", Job(hosts, **answers))
    assert (found.name, found.given[3]) == (("nccl", True) if near is None else ("mixed", near))
    alarm: Any = found.given[2]
    assert (alarm.rank, alarm.liveness, alarm.timeout_s) == (0, BOARD, 7.0)
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == ([warning] if warning else [])
    assert f"core attention is exchanged by {found.name}" in caplog.text
    assert CLOSED == (["mixed"] if "answer_5" in answers else [])
    for name, at, *more in ("mixed", [1, 2, 3], [0, 1, 2]), ("nvlink", [1, 1]), ("nccl", [1, 1], False), ("c10d", [1]):
        found = choose(name, Job(at))
        assert (found.name, *found.given[:2], *found.given[3:]) == (name, None, GPU, *more)
    for name, at, words in ("mixed", [1, 1], "mixed: .* on one host"), ("nvlink", [1, 2], "nvlink: .* on 2 hosts"):
        with pytest.raises(CADUnsupportedError, match=words):
            choose(name, Job(at))


def test_a_transport_that_fails_to_start_is_passed_over(gpus: pytest.MonkeyPatch) -> None:
    broken = RuntimeError("no symmetric memory\nlong text")
    gpus.setattr(probing, "LandingTransport", mock.Mock(side_effect=broken))
    with pytest.raises(CADUnsupportedError, match="nvlink: RuntimeError: no symmetric memory. Leave"):
        choose_transport("nvlink", None, GPU, alone)  # type: ignore[arg-type]
    with pytest.raises(CADUnsupportedError, match='nvlink: RuntimeError: no symmetric memory. Set "on_server_failure"'):
        choose_transport("auto", None, GPU, alone, auto=("nvlink",))  # type: ignore[arg-type]


@pytest.mark.parametrize("made", [True, False])
def test_a_server_that_is_lost_meanwhile_is_no_fallback(made: bool, gpus: pytest.MonkeyPatch) -> None:
    lost = ServerLostError("server 2 ended")
    gather = mock.Mock(side_effect=[[7, 8, 9], [1, 1, 1], lost if made else [0, 0, 0]])
    if not made:
        gpus.setattr(probing, "NcclTransport", mock.Mock(side_effect=lost))
    with pytest.raises(ServerLostError):
        choose_transport("auto", None, GPU, gather, host=7)  # type: ignore[arg-type]
    assert CLOSED == (["nccl, given up"] if made else [])


@pytest.mark.parametrize("here", [True, False])
def test_hosts_that_nccl_does_not_join_are_an_error_and_no_fallback(here: bool, gpus: pytest.MonkeyPatch) -> None:
    """c10d on GPUs runs through NCCL too, and would wait for the same hosts again."""
    if here:
        gpus.setattr(probing, "NcclTransport", mock.Mock(side_effect=UnreachedError("cannot reach each other")))
    job = Job([7, 8, 9], answer_3=[-1 if here else 1, -1, 1])
    with pytest.raises(UnreachedError, match="cannot reach each other" if here else "did not join rank 1"):
        choose("auto", job)
    assert job.asked == 3 and CLOSED == ([] if here else ["nccl"])


@pytest.mark.parametrize("old_torch", [False, True])
def test_a_host_group_is_known_to_torch_until_it_is_forgotten(old_torch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Symmetric memory finds it by name: rank, size and store. Nothing is exchanged to make it."""
    c10d = dist.distributed_c10d
    enabled: list[tuple[str, list[int]]] = []

    def enable(name: str) -> None:
        made = c10d._resolve_process_group(name)
        assert c10d._get_process_group_store(made) is not None
        enabled.append((name, sorted(c10d._world.pg_group_ranks[made])))

    if old_torch:
        monkeypatch.setattr(peers, "symmetric_memory", lambda: SimpleNamespace(enable_symm_mem_for_group=enable))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    whole = c10d._get_default_group()
    alone = host_group(whole, [3])
    assert (alone.handle, alone.members.tolist(), alone.place) == (None, [0], 0)
    peer = peers.find_peers(whole, Alarm(0, None, 9.0), None)
    assert peer.handle is whole and (peer.members.tolist(), peer.place) == ([0], 0), "all map each other's memory"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_rank", lambda group=None: 2)
        patch.setattr(dist, "get_global_rank", lambda group, rank: rank)
        one, other = (host_group(whole, [5, 8, 5, 5, 8]) for _ in range(2))
    assert one.members.tolist() == [0, 2, 3] and one.place == 1 and one.handle != other.handle
    assert enabled == ([(group.handle, [0, 2, 3]) for group in (one, other)] if old_torch else [])
    found = c10d._resolve_process_group(one.handle)
    assert (found.rank(), found.size()) == (1, 3)
    stores = [peers.open_store(whole, "landing") for _ in range(2)]
    stores[0].set("key", "one")
    assert not stores[1].check(["key"]), "two transports do not meet each other"
    assert len(c10d._world.pg_config_info) == 1, "torch's profiler reads this"
    for group in (one, other, alone):
        group.forget()
    with pytest.raises(RuntimeError):
        c10d._resolve_process_group(one.handle)


def test_all_ranks_beside_servers_map_each_others_memory() -> None:
    """By the name of their group; where servers may change, through a store that waits for those who come later."""
    own, alarm = OwnGroup(1, 3, "trainers and servers", dist.HashStore(), mock.Mock()), Alarm(1, None, 9.0)
    with mock.patch.object(peers, "_show") as show:
        plain = peers.find_peers(own, alarm, None)
    assert (plain.handle, plain.registered) == (own.name, None)
    show.assert_called_once_with(own.name, own.processes, own.store, {0: 0, 1: 1, 2: 2})
    near = peers.find_peers(own, alarm, [4, 7, 7])
    alarm.liveness.losses = mock.Mock()
    changing = peers.find_peers(own, alarm, None)
    members = [(one.members.tolist(), one.place) for one in (plain, near, changing)]
    assert members == [([0, 1, 2], 1), ([1, 2], 0), ([0, 1, 2], 1)] and near.handle.endswith(f"in {own.name}, 1")
    found = dist.distributed_c10d._resolve_process_group(changing.handle)
    assert (found.rank(), found.size(), found) == (1, 3, changing.registered[0])
    changing.registered[1].set("any", "mine")
    assert own.store.get("symmetric memory/any") == b"mine"
    for group in plain, near, changing:
        group.forget()
    for name in near.handle, changing.handle:
        with pytest.raises(RuntimeError):
            dist.distributed_c10d._resolve_process_group(name)


def test_a_group_that_is_given_up_is_freed_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """When others have let go of it: to free it waits for what is under way."""
    may_go, own = threading.Event(), peers.make_group(dist.HashStore(), 0, 1, CPU, "own", 9.0)
    assert dist.distributed_c10d._resolve_process_group("own") is own.processes
    assert peers.numbers_of(own, BOARD, 7) == [7]
    monkeypatch.setattr(peers, "time", SimpleNamespace(sleep=lambda seconds: may_go.wait(60.0)))
    freed = weakref.ref(own)
    own.abandon()
    del own
    with pytest.raises(RuntimeError):
        dist.distributed_c10d._resolve_process_group("own")
    assert freed() is not None
    may_go.set()
    while freed() is not None:
        time.sleep(0.01)
