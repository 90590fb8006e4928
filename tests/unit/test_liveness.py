"""The board by itself: which rank waits in vain, and why."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from deepspeed_cad.errors import CADPeerError
from deepspeed_cad.exchange.failure import board as room
from deepspeed_cad.exchange.failure import patience
from deepspeed_cad.exchange.failure.board import LOST, Liveness


@pytest.mark.parametrize(
    ("dropped", "taken", "named"), [([3, 4], [2, 3, 4], 3), ([3], [2], None), ([], [2, 3], None), ([12], [1, 2], None)]
)
def test_a_rank_that_left_its_loop_is_named_by_those_who_wait(dropped: list, taken: list, named: int | None) -> None:
    store = dist.HashStore()
    mine, other = Liveness(store, 0, 2), Liveness(store, 1, 2)
    for micro_batch in taken:
        mine.take(micro_batch)
    other.drop(dropped)
    said = mine.why_hopeless()
    assert said == "" if named is None else f"rank 1 left its loop before micro-batch {named}" in said


def test_a_rank_that_stopped_or_closed_is_named() -> None:
    store = dist.HashStore()
    board = [Liveness(store, rank, 3) for rank in range(3)]
    assert board[0].why_hopeless() == "" and board[0].stopped() == ""
    board[1].report("out of memory")
    board[2].close()
    assert board[0].why_hopeless() == "rank 1 stopped: out of memory; rank 2 stopped: its session was closed"
    board[1].stop("another exchange")
    assert board[0].stopped() == "another exchange"


def test_who_died_is_named_and_not_who_lost_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "WORDS_S", 0.2)
    monkeypatch.setattr(patience, "LOOK_S", 0.01)
    store = dist.HashStore()
    board = [Liveness(store, rank, 4) for rank in range(4)]
    for rank in (0, 2):
        board[rank].report(f"{LOST} in the lengths")
    with pytest.raises(CADPeerError, match=r"rank 1 waited for the lengths: rank 3 died or hangs"):
        board[1].patiently(lambda: False, "the lengths")
