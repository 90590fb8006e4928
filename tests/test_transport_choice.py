"""Which transport a group gets: the same on every rank, named reasons, refusals where one was asked for by name."""

from __future__ import annotations

import logging
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from deepspeed_cad.errors import CADPeerError, CADUnsupportedError
from deepspeed_cad.exchange import probe as probing
from deepspeed_cad.exchange.nvlink import NvlinkTransport
from deepspeed_cad.exchange.probe import choose_transport, probe

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def alone(value: int) -> list[int]:
    return [value]


def test_cpu_ranks_use_c10d_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert choose_transport("auto", None, CPU, alone).name == "c10d"  # type: ignore[arg-type]
        assert choose_transport("c10d", None, CPU, alone).name == "c10d"  # type: ignore[arg-type]
    assert not caplog.records


@pytest.mark.parametrize("name", ["nvlink", "nccl"])
def test_a_transport_asked_for_by_name_is_refused_with_its_reason(name: str) -> None:
    with pytest.raises(CADUnsupportedError, match=f'"{name}" does not work here: {name}: it needs NVIDIA GPUs.*cpu'):
        choose_transport(name, None, CPU, alone)  # type: ignore[arg-type]


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(CADUnsupportedError, match='no transport "ib"; there are: auto, nvlink, nccl, c10d'):
        choose_transport("ib", None, CPU, alone)  # type: ignore[arg-type]


class Made:
    """A transport that only says that it was made and closed."""

    closed: list[str] = []

    def __init__(self, name: str) -> None:
        self.name = name

    def close(self) -> None:
        self.closed.append(self.name)


@pytest.fixture()
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As if all ranks had GPUs and every library."""
    Made.closed = []
    monkeypatch.setattr(probing, "_local_refusal", lambda name, device: None)
    monkeypatch.setattr(probing, "peer_reach", lambda device: [0, 1])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    for name, kind in (("nvlink", "NvlinkTransport"), ("nccl", "NcclTransport"), ("c10d", "C10dTransport")):
        monkeypatch.setattr(probing, kind, lambda *_, n=name: Made(n))
    return monkeypatch


def test_one_node_with_peer_access_uses_nvlink(gpus: pytest.MonkeyPatch) -> None:
    assert choose_transport("auto", None, GPU, lambda value: [value, value]).name == "nvlink"  # type: ignore[arg-type]


def test_two_hosts_use_nccl_with_one_warning(gpus: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def agree(value: int) -> list[int]:
        return [value, value + 1] if value > 1 else [value, value]

    with caplog.at_level(logging.WARNING):
        assert choose_transport("auto", None, GPU, agree).name == "nccl"  # type: ignore[arg-type]
    assert [r.getMessage() for r in caplog.records] == [
        "core attention is exchanged by nccl, because nvlink: the ranks are on 2 hosts"
    ]


def test_a_gpu_out_of_reach_is_named(gpus: pytest.MonkeyPatch) -> None:
    gpus.setattr(probing, "peer_reach", lambda device: [0])

    def agree(value: int) -> list[int]:
        return [0, 1] if value == 0 else [value, value]

    with pytest.raises(CADUnsupportedError, match="GPU 0 cannot reach the memory of GPU 1"):
        choose_transport("nvlink", None, GPU, agree)  # type: ignore[arg-type]


def test_all_ranks_fall_back_where_one_cannot_start(gpus: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def agree(value: int) -> list[int]:
        asked.append(value)
        return [value, 0] if len(asked) == 5 else [value, value]  # the fifth question: was nvlink made?

    assert choose_transport("auto", None, GPU, agree).name == "nccl"  # type: ignore[arg-type]
    assert Made.closed == ["nvlink"]


def test_a_transport_that_fails_to_start_is_passed_over(gpus: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no symmetric memory\nlong text")

    gpus.setattr(probing, "NvlinkTransport", broken)
    with pytest.raises(CADUnsupportedError, match="nvlink: RuntimeError: no symmetric memory. Leave"):
        choose_transport("nvlink", None, GPU, alone)  # type: ignore[arg-type]


def test_doctor_gets_a_reason_for_each() -> None:
    assert probe("c10d")[0]
    if not torch.cuda.is_available():
        assert probe("nvlink") == (False, "torch sees no GPU")
        assert probe("nccl") == (False, "torch sees no GPU")


def test_growing_waits_for_every_rank_and_not_for_ever() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=5))
    one = NvlinkTransport.__new__(NvlinkTransport)
    one.rank, one.ranks, one.timeout_s, one.liveness = 0, 2, 0.2, None
    one._store, one._meetings, one._stuck = store, 0, ""
    store.set("1/1", "here")
    one._meet("the growth of area 0")
    with pytest.raises(CADPeerError, match="rank 0 waited for the growth of area 0: not every rank came within 0.2 s"):
        one._meet("the growth of area 0")
