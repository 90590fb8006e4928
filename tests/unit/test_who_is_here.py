"""Who turned CAD on, by one process that plays a rank of several; tests/processes/test_meet.py has real ranks."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from deepspeed_cad.errors import CADPeerError
from deepspeed_cad.exchange.failure import patience, roll_call


@pytest.fixture()
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """The store of a job of four ranks, of which this is rank 0."""
    store = dist.HashStore()
    monkeypatch.setattr(roll_call, "_store", lambda: store)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    return store


def arrive(store: dist.Store, *ranks: int) -> None:
    for rank in ranks:
        turn = store.add(f"sessions/{rank}", 1)
        store.add(f"arrived/0-4/{turn}", 1)


def test_those_who_never_came_are_named(store: dist.Store) -> None:
    arrive(store, 2)
    with pytest.raises(CADPeerError, match="rank 0 waited 0 s for ranks 1, 3 to turn CAD on"):
        roll_call.call_roll(None, 0.01)


def test_a_second_session_waits_for_second_sessions(store: dist.Store) -> None:
    arrive(store, 0, 1, 2, 3, 1, 2)
    with pytest.raises(CADPeerError, match="for rank 3 to turn CAD on"):
        roll_call.call_roll(None, 0.01)


def test_the_awaited_are_named_in_a_warning_first(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(patience, "LATE_S", 0.01)
    arrive(store, 1, 2)
    with pytest.raises(CADPeerError):
        roll_call.call_roll(None, 0.02)
    assert "rank 0 has waited 0 s for rank 3 to turn CAD on" in caplog.text


@pytest.mark.parametrize(
    ("count", "named"),
    [(1, "rank 0"), (2, "ranks 0, 1"), (17, "ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 and 1 more")],
)
def test_names_of_ranks(count: int, named: str) -> None:
    assert roll_call._name(range(count)) == named
